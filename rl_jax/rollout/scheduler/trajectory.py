"""Trajectory-level scheduling with bounded staleness: an episode starts as soon as a slot and the bound allow it.

Owns: when a group or a missing member starts, and which groups in flight are too old to finish.
Invariants, for each of the n tags (a batch holds need / n groups of each):
- admission: groups issued and not consumed <= (1 + max_staleness) * need / n, and no more than the batches that the
  run still takes: its last steps start no group that could only be cancelled at its end. A group is consumed when the
  version that its step makes is published, not when it is taken: at max_staleness 0 nothing starts between take and
  publish, so every token of a batch has the version that the batch trains.
- age: when version v is published, a group that is counted from a version older than v - max_staleness (that of its
  oldest token, or of the episode that started first: rollout.age_of; the View has it) can never be consumed
  legally any more and is dropped at once. Admission alone does not give the bound: a slow episode may see many steps.
- members first: a slot goes to a missing member of the oldest group before it goes to a new group, so no group starves.
- own places first: what the places that tags prefer have free is given out before any tag gets a slot elsewhere, which
  it does at once where its own are full and nobody who prefers that slot wants it.
- fair tags: a new group goes to the tag with the fewest groups issued and not consumed.
The number of groups issued is read from the View (the data), never counted here: a restart cannot admit too many.
max_staleness is View.bound where that is given (rollout.staleness_policy).
Source: RollArt, arXiv:2512.22560 (trajectory-level rollout, bound alpha evicted during the iteration); AReaL
(arXiv:2505.24298) for the admission half. Differs: the age is that of the oldest sampled token, unless age_of=start.
"""

from dataclasses import dataclass

from rl_jax.algorithms.staleness import admissible, is_fresh
from rl_jax.rollout.scheduler import SchedulerConfig
from rl_jax.types import Drop, Event, SchedulerAction, Start, View

STALE = "stale"


@dataclass(frozen=True)
class TrajectoryState:
    """JSON by construction."""

    tags: tuple[str, ...]
    group_size: int
    max_staleness: int


class TrajectoryScheduler:
    """Implements types.SchedulerPolicy."""

    def init(self, cfg: SchedulerConfig) -> TrajectoryState:
        return TrajectoryState(tuple(cfg.tags), cfg.group_size, cfg.max_staleness)

    def decide(
        self, state: TrajectoryState, view: View, event: Event
    ) -> tuple[TrajectoryState, list[SchedulerAction]]:
        """The event itself does not matter: what is missing and what is too old is all in the View."""
        bound = state.max_staleness if view.bound is None else view.bound
        drops, kept = [], []
        for group in view.groups:
            if is_fresh(view.version, group.oldest_version, bound):
                kept.append(group)
            else:
                drops.append(Drop(group.group, STALE))
        free = _Free(view)
        starts = []
        issued = {tag: view.held.get(tag, 0) for tag in state.tags}
        for group in kept:
            issued[group.tag] = issued.get(group.tag, 0) + 1
        need = view.need_groups
        if view.batches_left is not None:
            bound = min(bound, view.batches_left - 1)

        def may_start(tag: str) -> bool:
            # As if every tag had as many, so that a tag's share of a batch need not be a whole number.
            num = len(state.tags)
            return admissible(num * issued[tag], bound, need) >= num

        missing = {group.group: group.want - group.started for group in kept}
        for free.is_anywhere in (False, True):
            for group in sorted(
                kept, key=lambda g: g.issued_s
            ):  # stable: ties in the order of issue
                members = min(missing[group.group], free.of(group.tag))
                if members > 0 and not group.deferred:
                    free.use(group.tag, members)
                    missing[group.group] -= members
                    starts.append(Start(group.group, members, group.tag))
            while open_tags := [t for t in state.tags if may_start(t) and free.of(t) > 0]:
                tag = min(open_tags, key=lambda t: (issued[t], state.tags.index(t)))
                members = min(state.group_size, free.of(tag))
                free.use(tag, members)
                issued[tag] += 1
                starts.append(Start(None, members, tag))
        return state, [*drops, *starts]


class _Free:
    """What may still start in one decision: each slot once, whichever tags may use it."""

    def __init__(self, view: View):
        self._free = {place: max(0, num) for place, num in view.free.items()}
        self._room = sum(self._free.values()) if view.room is None else view.room
        self._places = view.places
        self.is_anywhere = False  # places that a tag does not prefer count, too

    def of(self, tag: str) -> int:
        return min(self._room, sum(self._free.get(place, 0) for place in self._of(tag)))

    def use(self, tag: str, num: int) -> None:
        self._room -= num
        for place in self._of(tag):
            taken = min(num, self._free.get(place, 0))
            self._free[place] = self._free.get(place, 0) - taken
            num -= taken

    def _of(self, tag: str) -> tuple[str, ...]:
        if self.is_anywhere:
            return tuple(self._free)
        return self._places.get(tag) or ((tag,) if tag in self._free else ("",))
