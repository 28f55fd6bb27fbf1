"""One ordered event stream per decode server: what became true, in the order in which it did.

Invariants: the server's thread is the only writer; every event is consumed (by the request table)
before the next is written, so "slot s now belongs to request r" (Started) and "tokens of slot s"
(Tokens) can never be seen in another order; both carry epochs of slots, and tokens of an epoch
that is over are refused and counted. Every request that was accepted ends in exactly one Finished.
The last events stay in a bounded ring for inspection, without the arrays of their blocks.
Must not: be written or consumed from another thread.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rl_jax.types import BlockTokens, FinishReason, TurnError

RING_SIZE = 1024  # events kept for inspection


@dataclass(frozen=True, slots=True)
class Started:
    """From here on the slot's tokens of this epoch belong to the request."""

    key: str
    slot: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one block made, of all slots at once: the host's work for a slot that goes on is a few numpy elements."""

    version: int  # of the weights that made them
    epochs: np.ndarray  # i32[S] whose tokens they are
    counts: np.ndarray  # i32[S] tokens of each slot, the first ones of its row
    block: (
        BlockTokens | None
    )  # on the host, never written again; None in the ring, which would hold on to its arrays


@dataclass(frozen=True, slots=True)
class Parked:
    """The request lost its slot and its pages to others; it goes on where it was when there is room."""

    key: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended; `error` where it ended without a Turn."""

    key: str
    finish: FinishReason
    error: TurnError | None = None


@dataclass(frozen=True, slots=True)
class Swapped:
    """Later tokens come from this version. kv: recompute | keep, what happens to KV of older ones."""

    version: int
    sync_id: str
    kv: str


Event = Started | Tokens | Parked | Finished | Swapped


class EventStream:
    """Hands each event to the consumer at once and keeps the last ones."""

    def __init__(self, consume: Callable[[Event], None], ring_size: int = RING_SIZE):
        self._consume = consume
        self._ring: deque[tuple[int, Event]] = deque(maxlen=ring_size)
        self._num_events = 0

    def write(self, event: Event) -> None:
        kept = replace(event, block=None) if isinstance(event, Tokens) else event
        self._ring.append((self._num_events, kept))
        self._num_events += 1
        self._consume(event)

    def recent(self) -> tuple[tuple[int, Event], ...]:
        """(number from 0, event) of the last events, oldest first. May be called from any thread."""
        return tuple(self._ring)
