"""The code scorer: a table of answers with near misses, and what is no zero."""

import pytest

from rl_jax.rewards.code import Code
from rl_jax.sandbox.records import SandboxMissing
from rl_jax.types import EpisodeView, Task
from tests.sandbox.opened import sandbox_or_skip

TESTS = [{"args": [a, b], "expected": a - b} for a, b in ((5, 3), (2, 2), (0, 7), (4, -1))]


def score(said, **payload):
    sandbox_or_skip()
    task = Task("t/0", "x", "x", (), {"tests": TESTS, **payload}, "code", 1)
    return Code().score(task, EpisodeView((), (said,) if said is not None else (), {}, ()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "value", "fraction"),
    [
        ("def f(a, b): return a - b", 1.0, 1.0),
        ("Here:\n```python\ndef f(a, b):\n    return a - b\n```\nIt subtracts.", 1.0, 1.0),
        ("def f(a, b): return b - a", 0.0, 0.25),
        ("def f(a, b): return abs(a - b)", 0.0, 0.75),
        ("def f(a): return a", 0.0, 0.0),
        ("a - b", 0.0, 0.0),
        ("", 0.0, 0.0),
        (None, 0.0, 0.0),
    ],
)
def test_answers(said, value, fraction):
    reward = score(said)
    assert (reward.value, reward.status) == (value, "scored")
    assert reward.parts == {"code": value, "tests_passed": fraction}
    if said:
        assert score(said, reward_by="fraction").value == fraction


def test_a_task_without_tests_is_no_zero():
    with pytest.raises(ValueError, match=r"task t/0: payload\['tests'\]: tests must be a list"):
        score("x", tests=None)
    with pytest.raises(ValueError, match=r"payload\['reward_by'\]='most' is not one of"):
        score("x", reward_by="most")


def test_without_a_sandbox_the_scorer_is_not_made():
    class Elsewhere(Code):
        backend = "nsjail:/no/such/nsjail"

    with pytest.raises(SandboxMissing, match="/no/such/nsjail is no program"):
        Elsewhere()
