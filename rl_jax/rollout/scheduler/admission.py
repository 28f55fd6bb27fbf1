"""What the policies share: which groups go, how many may be issued, and how free slots are given out.

Invariants, for each of the n tags (a batch holds need / n groups of each):
- quota: groups issued and not consumed are at most (1 + max_staleness) * need / n, and no more than the batches that
  the run still takes: its last steps start no group that could only be cancelled at its end. A group is consumed when
  the version that its step makes is published, not when it is taken: at max_staleness 0 nothing starts between take and
  publish, so every token of a batch has the version that the batch trains.
- redundancy: extra_groups / n more may be in flight while the complete ones (waiting or taken) are fewer than the
  quota. As soon as they are not, every group of the tag that is in flight is dropped (REDUNDANT), so what is complete
  never exceeds the quota. A group starts up to extra_members more members than it wants; who starts them ends those
  that are left over when it is complete.
- age: when version v is published, a group that is counted from a version older than v - max_staleness (that of its
  oldest token, or of the episode that started first: rollout.age_of; the View has it) can never be consumed
  legally any more and is dropped at once. Admission alone does not give the bound: a slow episode may see many steps.
- members first: a slot goes to a missing member of the oldest group before it goes to a new group, so no group starves.
- needed first: what is redundant gets a slot only when nothing that is needed wants it.
- own places first: what the places that tags prefer have free is given out before any tag gets a slot elsewhere, which
  it does at once where its own are full and nobody who prefers that slot wants it.
- limits: of a task's tag no more episodes start than View.limits has; slots that its groups may not use are free to
  the groups of others, so a source at its limit holds up nobody.
- fair tags: a new group goes to the tag with the fewest groups issued and not consumed.
The number of groups issued is read from the View (the data), never counted here: a restart cannot admit too many.
max_staleness is View.bound where that is given (rollout.staleness_policy).
Must not: know which policy asks.
"""

from collections import Counter
from collections.abc import Callable

from rl_jax.algorithms.staleness import admissible, is_fresh
from rl_jax.rollout.scheduler import REDUNDANT, SchedulerConfig
from rl_jax.types import Drop, GroupView, Start, View

STALE = "stale"


def bound_of(rules: SchedulerConfig, view: View) -> int:
    """Versions that a batch may be old now."""
    return rules.max_staleness if view.bound is None else view.bound


def expire(rules: SchedulerConfig, view: View) -> tuple[list[GroupView], list[Drop]]:
    """The groups in flight, in order of issue, that are young enough to go on; and the end of the others."""
    kept, drops = [], []
    for group in view.groups:
        if is_fresh(view.version, group.oldest_version, bound_of(rules, view)):
            kept.append(group)
        else:
            drops.append(Drop(group.group, STALE))
    return kept, drops


class Admission:
    """Groups issued and not consumed, by tag, in one decision."""

    def __init__(self, rules: SchedulerConfig, view: View, kept: list[GroupView]):
        self._rules, self._need = rules, view.need_groups
        self._bound = bound_of(rules, view)
        if view.batches_left is not None:
            self._bound = min(self._bound, view.batches_left - 1)
        self.held = Counter(view.held)
        self.flying = Counter(group.tag for group in kept)

    def issue(self, tag: str) -> None:
        self.flying[tag] += 1

    def issued(self, tag: str) -> int:
        return self.held[tag] + self.flying[tag]

    def may_issue(self, tag: str, is_extra: bool) -> bool:
        """One more group of the tag; is_extra: as one of the redundant ones."""
        if not is_extra:
            return self._left(self.issued(tag)) > 0
        return not self.is_met(tag) and self._left(self.issued(tag), self._rules.extra_groups) > 0

    def is_met(self, tag: str) -> bool:
        """Whether the complete groups of the tag are its quota."""
        return self._left(self.held[tag]) <= 0

    def redundant(self, kept: list[GroupView]) -> list[GroupView]:
        """Groups in flight that nobody needs any more."""
        if not self._rules.extra_groups:
            return []
        return [group for group in kept if self.is_met(group.tag)]

    def _left(self, issued: int, extra: int = 0) -> int:
        # As if every tag had as many, so that a tag's share of a batch need not be a whole number.
        num = len(self._rules.tags)
        return (admissible(num * issued, self._bound, self._need) + extra) // num


def drop(
    groups: list[GroupView], kept: list[GroupView], admission: Admission
) -> tuple[list[GroupView], list[Drop]]:
    """What is kept without `groups`, which are redundant, and the end of these."""
    gone = {group.group for group in groups}
    for group in groups:
        admission.flying[group.tag] -= 1
    return [g for g in kept if g.group not in gone], [Drop(g.group, REDUNDANT) for g in groups]


def starts(
    rules: SchedulerConfig,
    view: View,
    kept: list[GroupView],
    admission: Admission,
    may_issue: Callable[[str, bool], bool],
) -> list[Start]:
    """Fill the free slots, what is needed first; may_issue(tag, is_extra) says whether another group may start."""
    free = _Free(view)
    if free.is_empty:  # as at most events
        return []
    ordered = sorted(kept, key=lambda g: g.issued_s)  # stable: ties in the order of issue
    ordered = [group for group in ordered if not group.deferred]
    running = {group.group: group.started for group in ordered}
    out: list[Start] = []
    new: list[int] = []  # where in `out` the groups stand that this decision issues

    def add(tag: str, wanted: int, source: str = "") -> int:
        members = min(wanted, free.of(tag, source)) if wanted > 0 else 0
        if members:
            free.use(tag, members, source)
        return members

    for is_extra in (False, True):
        for free.is_anywhere in (False, True):
            for group in ordered:
                most = group.want + group.extra * is_extra
                if members := add(group.tag, most - running[group.group], group.source):
                    running[group.group] += members
                    out.append(Start(group.group, members, group.tag))
            size = rules.group_size + rules.extra_members * is_extra
            for i in new if is_extra else ():
                if members := add(out[i].tag, size - out[i].members):
                    out[i] = Start(None, out[i].members + members, out[i].tag)
            while tags := [t for t in rules.tags if may_issue(t, is_extra) and free.of(t) > 0]:
                tag = min(tags, key=lambda t: (admission.issued(t), rules.tags.index(t)))
                admission.issue(tag)
                new.append(len(out))
                out.append(Start(None, add(tag, size), tag))
    return out


class _Free:
    """What may still start in one decision: each slot once, whichever tags may use it."""

    def __init__(self, view: View):
        self._free = {place: max(0, num) for place, num in view.free.items()}
        self._room = sum(self._free.values()) if view.room is None else view.room
        self._places, self._limits = view.places, dict(view.limits)
        self.is_anywhere = False  # places that a tag does not prefer count, too

    @property
    def is_empty(self) -> bool:
        return self._room <= 0 or not any(self._free.values())

    def of(self, tag: str, source: str = "") -> int:
        """source: the tag of the task, where it is known and another."""
        room = min(self._room, self._limits.get(source or tag, self._room))
        return min(room, sum(self._free.get(place, 0) for place in self._of(tag)))

    def use(self, tag: str, num: int, source: str = "") -> None:
        self._room -= num
        if (source or tag) in self._limits:
            self._limits[source or tag] -= num
        for place in self._of(tag):
            taken = min(num, self._free.get(place, 0))
            self._free[place] = self._free.get(place, 0) - taken
            num -= taken

    def _of(self, tag: str) -> tuple[str, ...]:
        if self.is_anywhere:
            return tuple(self._free)
        return self._places.get(tag) or ((tag,) if tag in self._free else ("",))
