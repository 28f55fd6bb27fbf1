"""A whole run whose trackers raise and hang: it trains as without them, and says what they lost."""

import json
from pathlib import Path

import pytest

from rl_jax import launch
from rl_jax.testing import trackers as fakes
from rl_jax.trackers import feed

NAMES = [f"rl_jax.testing.trackers:{kind}Tracker" for kind in ("Recording", "Raising", "Hanging")]


@pytest.mark.slow(seconds=8)
def test_trackers_that_raise_or_hang_cost_a_run_nothing_but_what_they_lose(tmp_path, monkeypatch):
    monkeypatch.setattr(feed, "CLOSE_S", 1.0)
    monkeypatch.setattr(fakes.RecordingTracker, "calls", calls := [])
    config = f"--config={Path(__file__).parents[1] / 'job_config.py'}"
    run = tmp_path / "run"
    words = [config, f"--run_dir={run}", f"--config.metrics.trackers={tuple(NAMES)}"]
    assert launch.main(words) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "time/step_s" in row]
    assert steps == [1, 2, 3]
    # what the one got is what the file has
    told = [step for kind, (step, values) in _metrics(calls) if "time/step_s" in values]
    assert told == steps
    hparams = [given for kind, given in calls if kind == "hparams"]
    assert all(given["rollout.max_staleness"] == 0 for given in hparams) and len(hparams) == 3
    samples = [given for kind, given in calls if kind == "rollouts"]
    assert [step for step, _ in samples[:3]] and all(len(s) <= 4 for _, s in samples)
    final = {e["tracker"]: e for e in events if e["kind"] == "tracker" and "put" in e}
    assert set(final) == set(NAMES[1:])
    assert final[NAMES[1]]["failed"] == len(rows)
    assert final[NAMES[2]]["dropped"] == final[NAMES[2]]["put"] - final[NAMES[2]]["delivered"] > 0
    assert (
        rows[-1].get(f"trackers/lost.{NAMES[1]}", 0) + rows[-2].get(f"trackers/lost.{NAMES[1]}", 0)
        > 0
    )
    assert (run / "STATUS.json").read_text().count('"done"') == 1


def _metrics(calls):
    return [(kind, given) for kind, given in calls if kind == "metrics"]
