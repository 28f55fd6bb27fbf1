"""Exact match: answers and near misses."""

import pytest

from rl_jax.rewards.exact_match import ExactMatch
from rl_jax.types import EpisodeView, Task


def score(answer, *turn_texts):
    task = Task(
        "t", "e", "e", (), {"answer": answer} if answer is not None else {}, "exact_match", 1
    )
    return ExactMatch().score(task, EpisodeView((), turn_texts, {}, ()))


@pytest.mark.parametrize(
    "answer, texts, value",
    [
        ("12", ("12",), 1.0),
        ("12", (" 12\n",), 1.0),
        ("12", ("1", "12"), 1.0),  # the last turn counts
        ("12", ("12", "1"), 0.0),
        ("12", ("12.",), 0.0),
        ("12", ("012",), 0.0),
        ("cat", ("Cat",), 0.0),
        ("12", (), 0.0),
        ("", ("",), 1.0),
    ],
)
def test_answers_and_near_misses(answer, texts, value):
    reward = score(answer, *texts)
    assert (reward.value, reward.status, reward.parts) == (value, "scored", {"exact_match": value})


def test_a_task_without_an_answer_is_an_error():
    with pytest.raises(ValueError, match="no text in payload"):
        score(None, "12")
