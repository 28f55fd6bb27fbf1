"""Which seeds make which split, by hand."""

import pytest

from envs.seeds import split_seeds


def beginning(seed):
    """Ten of them, each twice in a row."""
    return str(seed // 2 % 10)


def test_seeds_that_begin_alike_are_one_task():
    train, held_out = (
        split_seeds(s, (6, 4), 0, "observation", beginning) for s in ("train", "eval")
    )
    assert held_out == [0, 2, 4, 6] and train == [8, 10, 12, 14, 16, 18]


def test_by_seed_each_seed_is_a_task_and_the_splits_share_none():
    train, held_out = (split_seeds(s, (3, 2), 1, "seed", beginning) for s in ("train", "eval"))
    assert held_out == [1_000_003, 1_000_004] and train == [1_000_005, 1_000_006, 1_000_007]


def test_too_few_beginnings_are_told_with_the_remedy():
    with pytest.raises(ValueError, match="only 10 of 11 tasks begin differently; lower num_tasks"):
        split_seeds("train", (6, 5), 0, "observation", beginning)
