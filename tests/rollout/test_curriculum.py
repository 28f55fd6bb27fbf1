"""The curriculum: what it draws, what it learns from, and that a batch may then hold any tags."""

import json
from collections import Counter

import pytest

from rl_jax.rollout.buffer import SampleBuffer
from rl_jax.rollout.curriculum import ANY, Bandit
from rl_jax.rollout.tasks import TaskStream
from rl_jax.settings import CurriculumSettings
from tests.rollout.test_buffer import SETTINGS, ledger, make_group  # noqa: F401
from tests.rollout.test_tasks import make_tasks
from tests.test_driver import rows, run_job

DUMP = CurriculumSettings("dump", window=4, floor=0.1)


def test_a_tag_without_advantages_is_drawn_less_and_never_given_up():
    """By hand: means 0.5 and 0 of 8 episodes each; equal counts, so the bonus is equal: e^5 to 1 at tau 0.1."""
    bandit = Bandit(["hard", "solved"], 0, DUMP)
    assert bandit.probs == {"hard": 0.5, "solved": 0.5}
    bandit.saw({"hard": [9.0] * 4, "solved": [9.0] * 4})
    bandit.saw({"hard": [0.5, -0.5, 0.5, -0.5], "solved": [0.0] * 4})  # of the window, the last 4
    solved = 0.9 / (1 + 2.718281828**5) + 0.05
    assert bandit.probs["solved"] == pytest.approx(solved)
    drawn = Counter(bandit.draw() for _ in range(4000))
    assert drawn["solved"] / 4000 == pytest.approx(solved, abs=0.015)


def test_a_tag_that_is_rarely_seen_is_looked_at_again():
    bandit = Bandit(["seen", "rare"], 0, CurriculumSettings("dump", floor=0.0))
    bandit.saw({"seen": [0.3] * 290, "rare": [0.0] * 10})
    before = bandit.probs["rare"]
    bandit.saw({"seen": [0.3] * 3000})
    assert bandit.probs["rare"] > before > 0


def stream_of(sizes, curriculum=DUMP, seed=3):
    bandit = Bandit(list(sizes), seed, curriculum)
    return TaskStream({t: make_tasks(t, n) for t, n in sizes.items()}, seed, True, bandit)


def test_a_restored_stream_draws_what_the_first_would_have():
    first = stream_of({"a": 5, "b": 3})
    for _ in range(7):
        first.next()
    first.curriculum.saw({"a": [0.1, 0.2], "b": [1.0] * 9})
    state = json.loads(json.dumps(first.state(), sort_keys=True))
    expected = [first.next() for _ in range(30)]
    second = stream_of({"a": 5, "b": 3})
    second.restore(state)
    assert [second.next() for _ in range(30)] == expected
    assert second.curriculum.probs == first.curriculum.probs
    tags = Counter(issued.task.tag for issued in expected)
    assert tags["b"] > tags["a"] > 0
    assert len({(i.epoch, i.index) for i in expected}) == 30  # each epoch of a tag in its own order


def test_a_wish_is_not_drawn_and_a_state_without_a_curriculum_begins_one():
    plain = TaskStream({t: make_tasks(t, 4) for t in "ab"}, 3)
    plain.next("a")
    stream = stream_of({"a": 4, "b": 4})
    stream.restore(plain.state())
    assert stream.next("b").task.tag == "b" and stream.state()["curriculum"]["drawn"] == 0


def test_batch_is_full_whatever_the_tags(ledger):  # noqa: F811
    buffer = SampleBuffer(SETTINGS, ledger, (ANY,))
    for i, tag in enumerate("aab"):
        assert buffer.put(make_group(ledger, i, tag=tag))
    assert buffer.held() == {ANY: 3}
    assert [g.tag for g in buffer.take(1)] == ["a", "a"]
    assert buffer.held() == {ANY: 3} and buffer.num_waiting == 1


TWO = """
from ml_collections import ConfigDict
from tests.job_config import get_config as tiny

def get_config():
    config = tiny()
    config.tasks.curriculum.name = "dump"
    config.rollout.batch_groups = 3
    env = "rl_jax.testing.envs:EvenEnv"
    config.tasks.sources = [ConfigDict({"tag": t, "env": env, "config": {}}) for t in ("one", "two")]
    return config
"""


@pytest.mark.slow
def test_run_that_was_stopped_draws_what_a_straight_one_does(tmp_path):
    """Three groups a step of two tags, which equal shares could not give; synchronous, so that draws are the same."""
    (tmp_path / "two.py").write_text(TWO)
    config = f"--config={tmp_path / 'two.py'}"
    straight = run_job(tmp_path / "straight", config=config)
    run_job(tmp_path / "cut", "--config.steps=2", config=config)
    cut = run_job(tmp_path / "cut", "--config.steps=3", config=config)
    probs = [[row["curriculum/prob.one"] for row in rows(d)] for d in (straight, cut)]
    assert probs[0] == pytest.approx(probs[1]) and len(probs[0]) == 3

    def trained(directory):
        records = map(json.loads, (directory / "ledger.jsonl").read_text().splitlines())
        return [(r["uid"].partition("/")[2], r["step"]) for r in records if r["state"] == "TRAINED"]

    assert sorted(trained(straight)) == sorted(trained(cut)) and len(trained(cut)) == 3 * 3 * 2
