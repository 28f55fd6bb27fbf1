"""PagePool: which pages of one paged KV cache are in use, and by how many holders.

Owns: a count a page; its writer is the thread of the server that owns the cache.
Invariants: a page is free exactly where its count is 0; a call that raises has changed nothing; the
page that was freed last is handed out first, and a new pool hands out 0, 1, 2, ....
Life of a page: 1 `take` gives it to one holder, who may write it. 2 `hold` adds holders, who read
it. 3 `drop` takes one holder away; with the last one the page is free.
Must not: know who holds a page or what is in it, or touch device state.
"""

from collections.abc import Sequence


class OutOfPages(Exception):
    """More pages were wanted than are free; nothing was taken."""

    def __init__(self, wanted: int, free: int):
        super().__init__(
            f"{wanted} pages are wanted and {free} are free; evict cached prefixes or wait for turns to end"
        )
        self.wanted, self.free = wanted, free


class PagePool:
    """Each call costs O(pages named)."""

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages}; a cache has at least one page")
        self.num_pages = num_pages
        self._counts = [0] * num_pages  # a list: reading one element of an np.ndarray costs more
        self._free = list(range(num_pages - 1, -1, -1))  # a stack
        self._changed: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, page: int) -> int:
        """How many hold the page; 0 is free."""
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is not one of {self.num_pages}")
        return self._counts[page]

    def take(self, num: int) -> list[int]:
        """So many free pages, each with one holder. Raises: OutOfPages."""
        if num > len(self._free):
            raise OutOfPages(num, len(self._free))
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder of each. Raises: ValueError if one is not in use."""
        counts, num_pages, changed = self._counts, self.num_pages, self._changed
        for page in pages:
            if not 0 <= page < num_pages or counts[page] == 0:
                raise ValueError(f"page {page} is not in use, so it cannot be held; take it first")
        for page in pages:
            counts[page] += 1
            if counts[page] == 2:
                changed.add(page)

    def drop(self, pages: Sequence[int]) -> list[int]:
        """One holder less of each; those that are free now, in order. Raises: ValueError if one is not in use."""
        counts, num_pages, changed = self._counts, self.num_pages, self._changed
        freed = []
        for done, page in enumerate(pages):
            if not 0 <= page < num_pages or counts[page] == 0:
                for dropped in pages[:done]:
                    counts[dropped] += 1
                raise ValueError(f"page {page} is not in use, so it cannot be dropped once more")
            counts[page] -= 1
            if counts[page] == 0:
                freed.append(page)
            elif counts[page] == 1:
                changed.add(page)
        self._free += freed
        return freed

    def take_changed(self) -> set[int]:
        """Pages that came to have one holder, or more than one, since this was last asked.

        For one reader, PrefixTree, which so learns what it may evict without asking for every page.
        """
        changed, self._changed = self._changed, set()
        return changed
