"""Affinity: which hardware class each tag's episodes prefer, from what its turns cost on each.

Owns: the sums of each tag's work, and the assignment. A pure value: `turn` adds what a turn was, `look` what servers
take, and returns the next value. A tag is assigned a class, or none: then any pool will do.
1. A tag's work is how many tokens of its contexts were computed and how many were sampled, since sums count half after
   `half_life` looks. A class's prices are the seconds of a computed token and of a decode step on one of its servers,
   which as many turns share as run on a server on average: by both a tag costs so many server-seconds a class.
2. An assignment takes as long as its busiest class: the sum of its tags' costs over its number of servers. A tag of no
   class is spread over all servers.
3. The shortest assignment is taken where it was the same one for `looks` looks and each time took `factor` times less
   than the one now, and `rest` looks have passed since the last change: so a constant load moves once.
Nothing is assigned before every tag had `least_turns` turns and every class its prices.
Must not: read a clock, know servers, or decide what happens where a preferred pool is full (router, rollout/slots.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

MAX_TRIED = 4096  # assignments; with more, one tag is moved at a time
ANY = ""


@dataclass(frozen=True)
class Band:
    """Looks are about a second apart (liveness.interval_s)."""

    factor: float = 1.15
    looks: int = 5
    rest: int = 60
    half_life: float = 300.0
    least_turns: float = 8.0


@dataclass(frozen=True)
class Work:
    """Faded sums over a tag's turns."""

    turns: float = 0.0
    computed: float = 0.0  # tokens
    sampled: float = 0.0


@dataclass(frozen=True)
class Price:
    """Of one server of a class; None: not measured yet."""

    token_s: float | None  # to compute a token of a context
    step_s: float | None  # of a decode step
    num: int  # live servers of the class


@dataclass(frozen=True)
class Affinity:
    """`assigned`: tag -> class; a tag that is not there has none."""

    tags: tuple[str, ...] = ()  # that there are; nothing is assigned before each was seen
    band: Band = Band()
    work: Mapping[str, Work] = field(default_factory=dict)
    running: tuple[float, float] = (
        0.0,
        0.0,
    )  # faded sums: turns that a server generates for; looks
    assigned: Mapping[str, str] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()  # by tag, of the last looks
    num_looks: int = 0
    rest: int = 0
    moves: int = 0

    def turn(self, tag: str, num_computed: int, num_sampled: int) -> "Affinity":
        """A turn of the tag ended."""
        old = self.work.get(tag, Work())
        new = Work(old.turns + 1, old.computed + num_computed, old.sampled + num_sampled)
        return replace(self, work={**self.work, tag: new})

    def look(self, prices: Mapping[str, Price], running: float) -> "Affinity":
        """One look. prices: by class; running: turns that a server of any class generates for now, on average."""
        keep = 0.5 ** (1 / self.band.half_life)
        faded = {
            tag: Work(w.turns * keep, w.computed * keep, w.sampled * keep)
            for tag, w in self.work.items()
        }
        sums = (self.running[0] * keep + max(1.0, running), self.running[1] * keep + 1)
        new = replace(self, work=faded, running=sums, rest=max(0, self.rest - 1))
        costs = new._costs(prices)
        if costs is None:
            return replace(new, wanted=(), num_looks=0)
        best = new._best(costs, prices)
        now_s = busiest_s(new._now(), costs, prices)
        if best == new._now() or now_s < self.band.factor * busiest_s(best, costs, prices):
            return replace(new, wanted=(), num_looks=0)
        num_looks = 1 + (new.num_looks if best == new.wanted else 0)
        if num_looks < self.band.looks or new.rest > 0:
            return replace(new, wanted=best, num_looks=num_looks)
        assigned = {tag: name for tag, name in zip(new.tags, best, strict=True) if name != ANY}
        rest, moves = self.band.rest, self.moves + 1
        return replace(
            new, assigned=assigned, wanted=(), num_looks=0, rest=rest, moves=moves
        )  # fmt: skip

    def _now(self) -> tuple[str, ...]:
        return tuple(self.assigned.get(tag, ANY) for tag in self.tags)

    def _costs(self, prices: Mapping[str, Price]) -> list[dict[str, float]] | None:
        """By tag and class, server-seconds of its work; None where something is not known yet."""
        if len(prices) < 2 or not self.tags:
            return None
        found = []
        running = self.running[0] / self.running[1]
        for tag in self.tags:
            work = self.work.get(tag, Work())
            if work.turns < self.band.least_turns:
                return None
            of_tag = {}
            for name, price in prices.items():
                if price.token_s is None or price.step_s is None:
                    return None
                decode_s = work.sampled * price.step_s / running
                of_tag[name] = work.computed * price.token_s + decode_s
            found.append(of_tag)
        return found

    def _best(self, costs: list[dict[str, float]], prices: Mapping[str, Price]) -> tuple[str, ...]:
        """The assignment that takes least; of equals the one with the fewest tags assigned."""
        names = (ANY, *sorted(prices))
        rank = lambda each: (busiest_s(each, costs, prices), sum(n != ANY for n in each), each)
        if len(names) ** len(self.tags) <= MAX_TRIED:
            return min(product(names, repeat=len(self.tags)), key=rank)
        best = tuple(n if n in names else ANY for n in self._now())
        while True:
            near = ((*best[:i], n, *best[i + 1 :]) for i in range(len(best)) for n in names)
            if (new := min(near, key=rank)) == best:
                return best
            best = new


def busiest_s(
    assigned: tuple[str, ...], costs: list[dict[str, float]], prices: Mapping[str, Price]
) -> float:
    """Seconds of the busiest class; a tag that has no class, or one without live servers, is spread over all."""
    total = sum(price.num for price in prices.values())
    load = dict.fromkeys(prices, 0.0)
    for name, of_tag in zip(assigned, costs, strict=True):
        if name in prices:
            load[name] += of_tag[name] / prices[name].num
            continue
        for each in prices:
            load[each] += of_tag[each] / total
    return max(load.values())
