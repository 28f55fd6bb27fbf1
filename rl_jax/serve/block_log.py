"""BlockLog: what blocks made for slots that generate, until a turn leaves its slot and takes it.

Owns: the last blocks' tokens, and each slot's epoch and the length of its history. Its writer is the server's thread.
Invariants: a block costs a few numpy operations over all slots, however many go on; tokens of an epoch that is over are
not counted for who has the slot now; a block is kept until no turn that it may belong to is in a slot, and up to
PRUNE_EVERY more while anybody generates.
Must not: know requests or sessions, or write to a block.
"""

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from rl_jax.serve.events import Tokens
from rl_jax.types import BlockTokens

NOBODY = -2  # no epoch: a block says -1 of a slot that was never armed
NEVER = np.iinfo(np.int64).max
PRUNE_EVERY = 64  # blocks


class Block(NamedTuple):
    version: int
    now_s: float  # when it was on the host
    made: BlockTokens
    counts: list[int]  # tokens of each slot


@dataclass(frozen=True, slots=True)
class Made:
    """Tokens that one version made for one slot, in a row."""

    version: int
    first_s: float  # when the first of them was on the host
    tokens: np.ndarray  # i32[n], n >= 1
    logprobs: np.ndarray  # f32[n]
    sampled_logprobs: np.ndarray | None  # f32[n]; None where they were not asked for
    support: np.ndarray | None  # i32[n, K]; None where they were not asked for, or not kept


class BlockLog:
    def __init__(self, slots: int):
        self.num_tokens = np.zeros(
            slots, np.int64
        )  # of the whole history; 0 where nobody generates
        self._epochs = np.full(slots, NOBODY, np.int64)
        self._since = np.full(slots, NEVER, np.int64)  # the number of the first block that counts
        self._blocks: list[Block] = []
        self._first = 0  # the number of the first of them

    @property
    def is_running(self) -> np.ndarray:
        """bool[S], new: which slots generate."""
        return self._epochs != NOBODY

    @property
    def num_blocks(self) -> int:
        """How many are kept."""
        return len(self._blocks)

    def start(self, slot: int, epoch: int, num_tokens: int) -> None:
        """From the next block on the slot extends a history of so many tokens."""
        self._epochs[slot], self.num_tokens[slot] = epoch, num_tokens
        self._since[slot] = self._first + len(self._blocks)

    def add(self, event: Tokens, now_s: float) -> tuple[int, int]:
        """A block's tokens. Returns: how many counted, and how many were of an epoch that is over."""
        assert event.block is not None, "it is consumed before the ring has it"
        counts = np.where(event.epochs == self._epochs, event.counts, 0)
        self.num_tokens += counts
        number = self._first + len(self._blocks)
        if number % PRUNE_EVERY == 0:
            done = min(int(self._since.min()), number) - self._first
            del self._blocks[:done]
            self._first += done
        self._blocks.append(Block(event.version, now_s, event.block, counts.tolist()))
        num = int(counts.sum())
        return num, int(event.counts.sum()) - num

    def stop(self, slot: int, *, is_filtered: bool) -> list[Made]:
        """What was made for the slot since `start`, a version after the other; nobody generates there now.

        is_filtered: ask for sampled_logprobs and support.
        """
        blocks = self._blocks[int(self._since[slot]) - self._first :]
        self._epochs[slot], self.num_tokens[slot], self._since[slot] = NOBODY, 0, NEVER
        if not self.is_running.any():
            self._first += len(self._blocks)
            self._blocks = []
        counted = [block for block in blocks if block.counts[slot]]
        by_version = groupby(counted, attrgetter("version"))
        return [_join(slot, list(run), is_filtered) for _, run in by_version]


def _join(slot: int, run: list[Block], is_filtered: bool) -> Made:
    """Of blocks of one version, at least one."""
    counts, size = [block.counts[slot] for block in run], run[0].made.tokens.shape[1]

    def rows(arrays: list[np.ndarray]) -> np.ndarray:
        whole_or_cut = [a[slot] if n == size else a[slot, :n] for a, n in zip(arrays, counts)]
        return np.concatenate(whole_or_cut)

    sampled = support = None
    if is_filtered:
        sampled = rows([block.made.sampled_logprobs for block in run])
        if run[0].made.support is not None:
            support = rows([block.made.support for block in run])
    tokens = rows([block.made.tokens for block in run])
    logprobs = rows([block.made.logprobs for block in run])
    return Made(run[0].version, run[0].now_s, tokens, logprobs, sampled, support)
