"""Live episodes against what the servers and the environment workers can hold.

Owns: the number of live episodes in each place (a pool of servers), and who waits for one. A tag may use several places
and a place may serve several tags, so slots are counted by place: each of them once, whoever may use it.
Invariants: live episodes in a place <= its capacity, all together <= the environments the workers hold, those of a tag
that has a limit (tasks.sources[..].max_live) <= that limit. Evaluation episodes wait in line here and go first, so
training cannot starve an evaluation; one that waits for its tag's limit holds back that tag's training alone. Training
episodes never wait here: the scheduler starts only what is free. An episode counts from start to end, also while its
environment acts: its KV should still be there when its next turn comes. Its turns go to the servers of its place. Of a
tag's places the one that fewest tags may use comes first, so that a tag with a choice leaves room for one without;
among equals the emptiest. Where all of them are full it is any other place at once: tags prefer pools, and every pool
serves the one model.
A slot is named by the place it was taken in: a pool that is fenced meanwhile must not change whose it is.
Must not: be used off the rollout's loop; await anything but its own futures.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence


class Slots:
    """capacity() and places(tag) are types.Sampler's, asked each time: servers may be fenced and come back."""

    def __init__(
        self,
        capacity: Callable[[], Mapping[str, int]],
        places: Callable[[str], Sequence[str]],
        tags: Sequence[str],
        max_live: int,
        limits: Mapping[str, int] | None = None,
    ):
        """max_live: episodes of all tags together. limits: of those tags that have one of their own."""
        self._capacity, self._places, self._tags = capacity, places, tuple(tags)
        self._max_live = max_live
        self._limits = dict(limits or {})
        self._live: Counter[str] = Counter()  # by place
        self._live_of: Counter[str] = Counter()  # by tag
        self._line: deque[tuple[str, asyncio.Future]] = deque()  # (tag, its turn)

    @property
    def num_live(self) -> int:
        return self._live.total()

    @property
    def room(self) -> int:
        """Episodes that the environment workers can still take."""
        return max(0, self._max_live - self.num_live)

    def limits(self) -> dict[str, int]:
        """Episodes that may start now by the tag's own limit, of each tag that has one."""
        return {tag: self._left(tag) for tag in self._limits}

    def check(self) -> None:
        """Raises ValueError if a tag has no server at all."""
        capacity = self._capacity()
        for tag in self._tags:
            if sum(capacity.get(place, 0) for place in self._places(tag)) <= 0 or self.room <= 0:
                raise ValueError(
                    f"no server takes episodes of tag {tag!r}: capacity {dict(capacity)}, environments"
                    f" {self._max_live}; give a pool this tag or a pool without tags"
                )

    def places(self) -> dict[str, tuple[str, ...]]:
        """The places of each tag, those that fewest tags may use first."""
        num_tags = self._num_tags()
        return {
            tag: tuple(sorted(self._places(tag), key=lambda p: num_tags[p])) for tag in self._tags
        }

    def free(self) -> dict[str, int]:
        """Training episodes that may start now, by place; all together at most `room`."""
        is_kept = any(self._left(tag) > 0 for tag, _ in self._line)
        return {place: 0 if is_kept else num for place, num in self._empty().items()}

    def try_acquire(self, tag: str) -> str | None:
        """Take a slot for a training episode if one is free: its place, for release()."""
        return self._take(tag, self.free())

    async def acquire(self, tag: str) -> str:
        """Wait in line for a slot (evaluation): its place, for release()."""
        turn = asyncio.get_running_loop().create_future()
        self._line.append((tag, turn))
        self._advance()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(turn.result(), tag)
            raise

    def release(self, place: str, tag: str) -> None:
        """Give a slot of the tag's back."""
        self._live[place] -= 1
        self._live_of[tag] -= 1
        self._advance()

    def _empty(self) -> dict[str, int]:
        return {p: max(0, min(n - self._live[p], self.room)) for p, n in self._capacity().items()}

    def _left(self, tag: str) -> int:
        """Episodes of the tag that its own limit allows to start; 1 or more without one."""
        return max(0, self._limits[tag] - self._live_of[tag]) if tag in self._limits else 1

    def _take(self, tag: str, free: Mapping[str, int]) -> str | None:
        """One slot of what is free, in the tag's best place, or in another where those are full."""
        if self._left(tag) <= 0:
            return None
        num_tags = self._num_tags()

        def rank(place: str) -> tuple[int, float]:
            live = self._live[place]
            return num_tags[place], live / (live + free[place])

        preferred = [place for place in self._places(tag) if free.get(place, 0) > 0]
        others = [place for place in free if free[place] > 0]
        place = min(preferred or others, key=rank, default=None)
        if place is not None:
            self._live[place] += 1
            self._live_of[tag] += 1
        return place

    def _num_tags(self) -> Counter[str]:
        """Tags that may use each place."""
        return Counter(place for tag in self._tags for place in self._places(tag))

    def _advance(self) -> None:
        """Give free slots to those in line, first come first served within a place."""
        waiting: deque[tuple[str, asyncio.Future]] = deque()
        for tag, turn in self._line:
            if turn.done():
                continue
            place = self._take(tag, self._empty())
            if place is None:
                waiting.append((tag, turn))
            else:
                turn.set_result(place)
        self._line = waiting
