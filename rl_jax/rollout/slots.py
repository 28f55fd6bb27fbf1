"""Live episodes against what the servers and the environment workers can hold.

Owns: the number of live episodes by pool key (a tag with servers of its own, or "" for all other tags).
Invariants: live episodes of a key <= its capacity, all together <= the environments the workers hold; evaluation
episodes wait in line here and go first, so training cannot starve an evaluation. Training episodes never wait here: the
scheduler starts only what is free. A session keeps its slot between turns, so an episode holds it from start to end.
A slot is named by the key it was taken under: a pool that is fenced meanwhile must not change whose it is.
Must not: be used off the rollout's loop; await anything but its own futures.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping


class Slots:
    """capacity() is asked each time: servers may be fenced and come back."""

    def __init__(self, capacity: Callable[[], Mapping[str, int]], max_live: int):
        self._capacity, self._max_live = capacity, max_live
        self._live: Counter[str] = Counter()
        self._line: deque[tuple[str, asyncio.Future]] = deque()

    @property
    def num_live(self) -> int:
        return self._live.total()

    def check(self, tags: tuple[str, ...]) -> None:
        """Raises ValueError if a tag has no server at all."""
        capacity = self._capacity()
        for tag in tags:
            if capacity.get(tag, capacity.get("", 0)) <= 0 or self._max_live <= 0:
                raise ValueError(
                    f"no server takes episodes of tag {tag!r}: capacity {dict(capacity)}, environments"
                    f" {self._max_live}; give a pool this tag or a pool without tags"
                )

    def free(self) -> dict[str, int]:
        """Training episodes that may start now, by key."""
        room = self._max_live - self.num_live
        waiting = {key for key, _ in self._line}
        free = {key: min(n - self._live[key], room) for key, n in self._capacity().items()}
        return {key: 0 if key in waiting else max(0, n) for key, n in free.items()}

    def try_acquire(self, tag: str) -> str | None:
        """Take a slot for a training episode if one is free: its key, for release()."""
        key = self._key(tag)
        if self.free().get(key, 0) <= 0:
            return None
        self._live[key] += 1
        return key

    async def acquire(self, tag: str) -> str:
        """Wait in line for a slot (evaluation): its key, for release()."""
        key = self._key(tag)
        turn = asyncio.get_running_loop().create_future()
        self._line.append((key, turn))
        self._advance()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(key)
            raise
        return key

    def release(self, key: str) -> None:
        """Give a slot back."""
        self._live[key] -= 1
        self._advance()

    def _key(self, tag: str) -> str:
        return tag if tag in self._capacity() else ""

    def _advance(self) -> None:
        """Give free slots to those in line, first come first served within a key."""
        capacity = self._capacity()
        waiting: deque[tuple[str, asyncio.Future]] = deque()
        for key, turn in self._line:
            if turn.done():
                continue
            if self.num_live < self._max_live and self._live[key] < capacity.get(key, 0):
                self._live[key] += 1
                turn.set_result(None)
            else:
                waiting.append((key, turn))
        self._line = waiting
