"""Paging: which pages of a server's KV cache hold the history of each slot, and what a new history finds there already.

Owns: the page pool, the prefix tree and the page tables of one server.
Invariants: a slot's table lists pages for all of its KV, each held once for the slot; a page that another may read too
is never written where it is shared: `admit` gives the slot a page of its own in its place and says what to copy there;
a source of a copy stays held until `copied`. Pages that only the tree holds are there to be taken: `take` evicts the
least recently used.
Must not: know requests, versions' order or devices; wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.kv import NO_PAGE, KVSpec
from rl_jax.engine.pages import PagePool
from rl_jax.engine.prefix_tree import Origin, PrefixTree

SPARE = 256  # where pages run out, one in so many is freed at once


@dataclass(frozen=True)
class Found:
    """A history's KV that is in the tree: its first num_tokens tokens, listed under origin."""

    origin: Origin
    pages: tuple[int, ...]
    num_tokens: int

    def first(self, num_pages: int, page_size: int) -> "Found":
        """The part of it that fills so many pages, which it has."""
        return Found(self.origin, self.pages[:num_pages], num_pages * page_size)


class Paging:
    """Used by the server's thread only."""

    def __init__(self, spec: KVSpec, slots: int, table_pages: int):
        self.spec = spec
        self.pool = PagePool(spec.num_pages)
        self._spare = (
            spec.num_pages // SPARE
        )  # to evict page by page, as slots grow, costs more a page
        self.tree = PrefixTree(self.pool, spec.page_size)
        self.tables = np.full((slots, table_pages), NO_PAGE, np.int32)
        self._counts = np.zeros(slots, np.int64)  # pages of each table
        self._copies: list[tuple[int, int]] = []  # source (held for it), target

    def find(self, origins: Sequence[Origin], tokens: np.ndarray) -> Found:
        """The longest prefix of the tokens that any of the origins has; of equals the first origin's."""
        found = Found(origins[0], (), 0)
        for origin in origins:
            match = self.tree.match(origin, tokens)
            if match.num_tokens > found.num_tokens:
                found = Found(origin, match.pages, match.num_tokens)
        return found

    def admit(self, slot: int, found: Found, num_tokens: int) -> Found | None:
        """Give the slot, which has none, pages for num_tokens tokens, those found first.

        Returns: what it has of that, the whole pages only where there is none to copy to, and nothing of it where the
        slot is alone and what was found keeps too many others; None: too few are free.
        """
        page_size = self.spec.page_size
        if self._admit(slot, found, num_tokens):
            return found
        # A page to copy takes one more.
        whole = found.first(found.num_tokens // page_size, page_size)
        if whole != found and self._admit(slot, whole, num_tokens):
            return whole
        # Whoever holds a page that two origins list keeps what either lists before it: beside what it found even a
        # history that fits alone may have no room. Without that it always has.
        nothing = found.first(0, page_size)
        if self.num_held == 0 and self._admit(slot, nothing, num_tokens):
            return nothing
        return None

    @property
    def room(self) -> np.ndarray:
        """i64[slots], new: tokens that each slot has pages for."""
        return self._counts * self.spec.page_size

    def grow(self, slot: int, num_tokens: int) -> bool:
        """See that the slot has pages for num_tokens tokens. False: too few are free."""
        count = int(self._counts[slot])
        missing = self.spec.pages_of(num_tokens) - count
        if missing <= 0:
            return True
        new = self._take(missing)
        if new is None:
            return False
        self.tables[slot, count : count + missing] = new
        self._counts[slot] += missing
        return True

    def share(self, slot: int, origin: Origin, tokens: np.ndarray) -> None:
        """The KV of these first tokens of the slot is computed: others may read it."""
        pages = self.tables[slot, : self.spec.pages_of(len(tokens))]
        self.tree.insert(origin, tokens, pages.tolist())

    def pages_of(self, slot: int, start: int, end: int) -> np.ndarray:
        """i32[n] pages that hold tokens [start, end) of the slot; start is a page's begin."""
        return self.tables[slot, start // self.spec.page_size : self.spec.pages_of(end)].copy()

    def drop(self, slot: int) -> None:
        """The slot needs its pages no more; what is listed stays as long as nobody else needs the room."""
        count = self._counts[slot]
        self.pool.drop(self.tables[slot, :count].tolist())
        self.tables[slot, :count] = NO_PAGE
        self._counts[slot] = 0

    def take_copies(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(sources, targets) i32[n] to copy on the device now, before anything else is written; or None."""
        if not self._copies:
            return None
        copies, self._copies = np.array(self._copies, np.int32), []
        self.pool.drop(copies[:, 0].tolist())
        return copies[:, 0].copy(), copies[:, 1].copy()

    @property
    def num_held(self) -> int:
        """Pages that no new history can have: neither free nor to be evicted."""
        return self.pool.num_pages - self.pool.num_free - self.tree.num_evictable

    def gauges(self) -> dict[str, int]:
        listed, free = self.tree.num_pages, self.pool.num_free
        return {"pages": self.pool.num_pages, "free_pages": free, "listed_pages": listed}

    def _admit(self, slot: int, found: Found, num_tokens: int) -> bool:
        pages = list(found.pages)
        self.pool.hold(pages)
        is_cut = found.num_tokens % self.spec.page_size != 0
        new = self._take(self.spec.pages_of(num_tokens) - len(pages) + is_cut)
        if new is None:
            self.pool.drop(pages)
            return False
        if is_cut:  # the source's hold goes over from the table to the copy
            self._copies.append((pages[-1], new[0]))
            pages[-1] = new.pop(0)
        pages += new
        self.tables[slot, : len(pages)] = pages
        self._counts[slot] = len(pages)
        return True

    def _take(self, num: int) -> list[int] | None:
        if num <= 0:
            return []
        short = num - self.pool.num_free
        if short > 0:
            if short > self.tree.num_evictable:  # nothing is evicted in vain
                return None
            self.tree.evict(max(short, self._spare))
        return self.pool.take(num)


def chain(tokens: np.ndarray, page_size: int, salt: str = "") -> list[int]:
    """A hash for each page of the tokens, of it, all before it and the salt; the last page may be cut."""
    hashes, last = [], hash(salt) if salt else 0
    for at in range(0, len(tokens), page_size):
        last = hash((last, tokens[at : at + page_size].tobytes()))
        hashes.append(last)
    return hashes
