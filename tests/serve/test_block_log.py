"""BlockLog: whose tokens a block made, across versions, epochs and blocks that are dropped."""

import numpy as np
import pytest

from rl_jax.serve.block_log import PRUNE_EVERY, BlockLog
from rl_jax.serve.events import Tokens
from rl_jax.types import BlockTokens

S, K = 3, 4


def block(number: int, counts, epochs, *, version: int = 0, support: bool = False) -> Tokens:
    """Slot s makes tokens 100 number + 10 s + 0, 1, ...."""
    tokens = (100 * number + 10 * np.arange(S)[:, None] + np.arange(K)).astype(np.int32)
    made = BlockTokens(
        tokens=tokens,
        logprobs=-tokens.astype(np.float32),
        sampled_logprobs=-2 * tokens.astype(np.float32),
        valid=np.arange(K) < np.array(counts)[:, None],
        finish=np.zeros(S, np.int8),
        slot_epoch=np.array(epochs, np.int32),
        nan=np.zeros(S, bool),
        support=np.repeat(tokens[..., None], 2, axis=2) if support else None,
    )
    return Tokens(version, made.slot_epoch, np.array(counts), made)


def test_a_slot_gets_its_own_tokens_since_it_started():
    log = BlockLog(S)
    log.start(0, 5, 10)
    assert log.add(block(0, [4, 0, 0], [5, -1, -1]), 1.0) == (4, 0)
    log.start(2, 6, 20)
    assert log.add(block(1, [4, 0, 2], [5, -1, 6]), 2.0) == (6, 0)
    assert log.num_tokens.tolist() == [18, 0, 22]
    assert log.is_running.tolist() == [True, False, True]
    (made,) = log.stop(0, is_filtered=False)
    assert made.tokens.tolist() == [0, 1, 2, 3, 100, 101, 102, 103]
    assert made.logprobs.tolist() == [-t for t in made.tokens.tolist()]
    assert (made.first_s, made.sampled_logprobs, made.support) == (1.0, None, None)
    (made,) = log.stop(2, is_filtered=True)
    assert (made.tokens.tolist(), made.first_s) == ([120, 121], 2.0)
    assert made.sampled_logprobs.tolist() == [-240.0, -242.0]
    assert not log.is_running.any() and log.num_tokens.tolist() == [0, 0, 0]


def test_tokens_of_an_epoch_that_is_over_count_for_nobody():
    log = BlockLog(S)
    log.start(0, 5, 10)
    log.add(block(0, [4, 0, 0], [5, -1, -1]), 1.0)
    log.stop(0, is_filtered=False)
    log.start(0, 9, 30)
    assert log.add(block(1, [4, 3, 0], [5, 2, -1]), 2.0) == (0, 7)
    assert log.num_tokens.tolist() == [30, 0, 0]
    assert log.add(block(2, [1, 0, 0], [9, -1, -1]), 3.0) == (1, 0)
    (made,) = log.stop(0, is_filtered=False)
    assert (made.tokens.tolist(), made.first_s) == ([200], 3.0)


def test_versions_come_one_after_the_other():
    log = BlockLog(S)
    log.start(1, 5, 10)
    for number, version in enumerate([3, 3, 4, 3]):
        log.add(block(number, [0, 2, 0], [-1, 5, -1], version=version, support=True), float(number))
    made = log.stop(1, is_filtered=True)
    assert [m.version for m in made] == [3, 4, 3]
    assert [m.tokens.tolist() for m in made] == [[10, 11, 110, 111], [210, 211], [310, 311]]
    assert [m.first_s for m in made] == [0.0, 2.0, 3.0]
    assert made[0].support.tolist() == [[t, t] for t in (10, 11, 110, 111)]


def test_a_slot_without_tokens_gets_none():
    log = BlockLog(S)
    log.start(1, 5, 10)
    assert log.stop(1, is_filtered=False) == []
    log.start(1, 6, 10)
    log.add(block(0, [0, 0, 0], [-1, 6, -1]), 1.0)
    assert log.stop(1, is_filtered=False) == []


@pytest.mark.parametrize("length", [1, PRUNE_EVERY - 1, PRUNE_EVERY, 3 * PRUNE_EVERY + 1])
def test_blocks_are_kept_as_long_as_a_slot_needs_them_and_no_longer(length):
    log, number = BlockLog(S), 0
    for epoch in range(4 * PRUNE_EVERY // length + 2):
        log.start(0, epoch, 10)
        for _ in range(length):
            log.add(block(number, [1, 0, 0], [epoch, -1, -1]), 0.0)
            number += 1
            assert log.num_blocks <= length + PRUNE_EVERY
        (made,) = log.stop(0, is_filtered=False)
        assert made.tokens.tolist() == [100 * i for i in range(number - length, number)]
