"""A group in flight: which of its members run, are scored, failed or were given up. Loop-thread only.

Invariants: a sample is at most once in `members` (its live attempt), `leaving` (that was cancelled and has not ended:
no other attempt begins before) or `scored`; `want`, how many scored members complete it, is its size, or less where
more was given up than there are extra members. Must not: start or cancel anything.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rl_jax.algorithms.staleness import is_fresh, oldest_counted
from rl_jax.rollout.episode import Episode
from rl_jax.types import Group, GroupView, Trajectory


@dataclass
class Member:
    """A live attempt: from its ISSUED record until it is scored, failed or cancelled."""

    episode: Episode
    slot: str | None  # None once it is given back
    runner: asyncio.Task | None = None


@dataclass(frozen=True)
class Scored:
    """A scored member, with what the scheduler asks of it at every event."""

    trajectory: Trajectory
    start_version: int
    oldest_version: int
    num_tokens: int


@dataclass
class LiveGroup:
    uid: str
    issued: Any  # tasks.IssuedTask: task, epoch, index
    size: int  # members that are trained
    issued_s: float
    share: str  # its tag, or curriculum.ANY: what it counts as in a batch
    age_of: str  # rollout.age_of
    extra: int = 0  # members beyond them that may run: rollout.extra_members
    members: dict[int, Member] = field(default_factory=dict)  # by sample
    scored: dict[int, Scored] = field(default_factory=dict)  # by sample
    tries: Counter[int] = field(default_factory=Counter)  # attempts started here, by sample
    given_up: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    _viewed: tuple[Any, GroupView] | None = None  # the last view, and what it was made of

    @property
    def want(self) -> int:
        return min(self.size, self._playable)

    @property
    def spare(self) -> int:
        """Members that it can lose and still be whole."""
        return self._playable - self.want

    @property
    def _playable(self) -> int:
        return self.size + self.extra - len(self.given_up)

    @property
    def is_complete(self) -> bool:
        return len(self.scored) == self.want

    def missing(self) -> list[int]:
        """Samples that must be started (again)."""
        taken = self.members.keys() | self.scored.keys() | self.given_up | self.leaving
        return [sample for sample in range(self.size + self.extra) if sample not in taken]

    def add(self, trajectory: Trajectory) -> None:
        """A member was scored."""
        self.scored[trajectory.sample] = Scored(
            trajectory, trajectory.start_version, trajectory.oldest_version, trajectory.num_trained
        )

    def remove(self, sample: int) -> Trajectory:
        """A scored member is not of the group any more."""
        self._viewed = None  # there may soon be as many again
        return self.scored.pop(sample).trajectory

    def stale(self, now: int, max_staleness: int) -> list[int]:
        """Samples that are too old for any step from the version `now` on, by their own age, ascending."""
        if is_fresh(now, self.view(now).oldest_version, max_staleness):
            return []
        aged = {**self.scored, **{sample: m.episode for sample, m in self.members.items()}}
        oldest = {sample: oldest_counted([e], self.age_of, now) for sample, e in aged.items()}
        return sorted(
            s for s, version in oldest.items() if not is_fresh(now, version, max_staleness)
        )

    def oldest_version(self, now: int) -> int:
        """That its age is counted from: of any token sampled so far, from below, or of any start; `now` if there is
        none: what has not begun does not age."""
        live = [member.episode for member in self.members.values()]
        return oldest_counted([*self.scored.values(), *live], self.age_of, now)

    def view(self, now: int) -> GroupView:
        """What a scheduler sees. now: the current version. Made anew only where something changed: every event asks
        every group."""
        episodes = [member.episode for member in self.members.values()]
        live = [(e.num_tokens, e.start_version, e.oldest_version) for e in episodes]
        made_of = (live, len(self.scored), len(self.given_up), len(self.leaving), now)
        if self._viewed is None or self._viewed[0] != made_of:
            self._viewed = (made_of, self._view(now))
        return self._viewed[1]

    def _view(self, now: int) -> GroupView:
        scored = self.scored.values()
        return GroupView(
            group=self.uid,
            task_id=self.issued.task.id,
            tag=self.share,
            want=self.want,
            started=len(self.members) + len(scored) + len(self.leaving - self.given_up),
            scored=len(scored),
            num_tokens=(
                *(s.num_tokens for s in scored),
                *(m.episode.num_tokens for m in self.members.values()),
            ),
            oldest_version=self.oldest_version(now),
            issued_s=self.issued_s,
            extra=self.spare,
            source=self.issued.task.tag,
        )

    def group(self) -> Group:
        """The complete group, members by sample."""
        task = self.issued.task
        ordered = tuple(self.scored[sample].trajectory for sample in sorted(self.scored))
        return Group(self.uid, task.id, task.tag, self.issued.epoch, self.issued.index, ordered)
