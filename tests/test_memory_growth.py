"""A run that goes on holds no more after many steps than after few: counted, not weighed."""

import json
from pathlib import Path

import pytest

from rl_jax import launch
from rl_jax.driver import Driver
from rl_jax.testing.census import driver_counts, growth, object_counts, process_counts

CONFIG = f"--config={Path(__file__).parent / 'job_config.py'}"
NUM_STEPS, WARM_UP = 100, 60  # a server's ring of its last events is full after about 50


def test_growth_is_told_by_name():
    quiet = [{"a": 3, "b": 1}, {"a": 2, "b": 1}, {"a": 4, "b": 1}, {"a": 2, "b": 1}]
    assert growth(quiet) == {}
    assert growth([{"a": i, "b": 1} for i in range(4)]) == {"a": 2}
    leak = [{"object x": i, "object y": 5 * i} for i in range(4)]
    assert growth(leak, objects=2) == {"object y": 10}


@pytest.mark.slow(seconds=20)
def test_asynchronous_run_with_a_sync_each_step_leaves_nothing_behind(tmp_path, monkeypatch):
    counts, step = [], Driver.step

    def counted(driver, number):
        step(driver, number)
        if number > WARM_UP:
            found = process_counts() + driver_counts(driver) + object_counts()
            del found[
                "object rl_jax.engine.prefix_tree._Node"
            ]  # at most one a page, as they are free
            del found["object logging.LogRecord"]  # pytest keeps them
            counts.append(json.dumps(found))  # a string: what is counted must not grow by counting

    monkeypatch.setattr(Driver, "step", counted)
    words = [f"--config.steps={NUM_STEPS}", "--config.rollout.max_staleness=1"]
    assert launch.main([CONFIG, f"--run_dir={tmp_path}", *words]) == 0
    assert len(counts) == NUM_STEPS - WARM_UP
    # One object a step that stays would make at least 20.
    assert growth([json.loads(found) for found in counts], objects=15) == {}
