"""Batch-level scheduling: no group of a batch starts before the batch before it is complete. A baseline.

Owns: the batch under way. Invariants: those of admission.py; and a new batch opens only when the last one has all its
groups and nothing is in flight. A group that leaves unfinished (dropped, or not selected) is replaced at once, within
its batch. With max_staleness above 0 the next batch starts beside the train step, one batch at a time.
Of this batching there are two grains. This policy is the coarse one: groups start together, each episode then takes its
turns by itself. With rollout.env_stepping=batch beside it (turn_barrier.py) turns go together as well, which is what
RollArt calls batch-level stepping and compares with.
State: for each tag the number of complete groups, since version 0, at which the batch under way has its share. That
number is read from the View as version * share + held: a restart finds the batch where it stood, but for what was in
flight and is issued again. Where the state is lost and groups are in flight, their batch is taken to be the one that
has begun: each of their tags, and each that has a part of its share, is completed to a whole share.
Source: RollArt, arXiv:2512.22560 (its baseline).
"""

from dataclasses import dataclass

from rl_jax.rollout.scheduler import SchedulerConfig
from rl_jax.rollout.scheduler.admission import Admission, drop, expire, starts
from rl_jax.types import Event, SchedulerAction, View


@dataclass(frozen=True)
class BatchState:
    """JSON by construction. goals: as the module says, by the order of rules.tags; () before the first batch."""

    rules: SchedulerConfig
    goals: tuple[int, ...] = ()


class BatchScheduler:
    """Implements types.SchedulerPolicy."""

    def init(self, cfg: SchedulerConfig) -> BatchState:
        return BatchState(cfg)

    def decide(
        self, state: BatchState, view: View, event: Event
    ) -> tuple[BatchState, list[SchedulerAction]]:
        """The event itself does not matter: all is in the View and the goals."""
        rules = state.rules
        share = view.need_groups // len(rules.tags)
        kept, stale = expire(rules, view)
        admission = Admission(rules, view, kept)
        complete = {tag: view.version * share + admission.held[tag] for tag in rules.tags}
        goals = dict(zip(rules.tags, state.goals))
        if share and not goals:
            begun = {tag: complete[tag] + (admission.flying[tag] > 0) for tag in rules.tags}
            goals = {tag: -(-num // share) * share for tag, num in begun.items() if kept}

        def is_done(tag: str) -> bool:
            return complete[tag] >= goals.get(tag, 0)

        over = admission.redundant(kept)
        if rules.extra_groups:
            over = [group for group in kept if group in over or is_done(group.tag)]
        kept, redundant = drop(over, kept, admission)
        if not kept and all(map(is_done, rules.tags)):
            goals = {tag: num + share for tag, num in complete.items()}

        def may_issue(tag: str, is_extra: bool) -> bool:
            extra = rules.extra_groups // len(rules.tags) * is_extra
            left = goals.get(tag, 0) - complete[tag]
            return admission.flying[tag] < left + extra * (left > 0) and admission.may_issue(
                tag, is_extra
            )

        started = starts(rules, view, kept, admission, may_issue)
        state = BatchState(rules, tuple(goals.get(tag, 0) for tag in rules.tags))
        return state, [*stale, *redundant, *started]
