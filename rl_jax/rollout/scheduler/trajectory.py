"""Trajectory-level scheduling with bounded staleness: an episode starts as soon as a slot and the bound allow it.

Owns: when a group or a missing member starts, and which groups in flight are too old, or redundant. Invariants: those
of admission.py, and nothing else holds a start back. Its state is what it was told at the start.
An episode in flight when weights are published goes on, under the newer ones from its next token on, for as long as the
bound allows (partial rollouts).
Source: RollArt, arXiv:2512.22560 (trajectory-level rollout, bound alpha evicted during the iteration, redundant groups
and members); AReaL (arXiv:2505.24298) for the admission half. Differs: the age is that of the oldest sampled token,
unless age_of=start.
"""

from rl_jax.rollout.scheduler import SchedulerConfig
from rl_jax.rollout.scheduler.admission import Admission, drop, expire, starts
from rl_jax.types import Event, SchedulerAction, View


class TrajectoryScheduler:
    """Implements types.SchedulerPolicy."""

    def init(self, cfg: SchedulerConfig) -> SchedulerConfig:
        return cfg

    def decide(
        self, state: SchedulerConfig, view: View, event: Event
    ) -> tuple[SchedulerConfig, list[SchedulerAction]]:
        """The event itself does not matter: what is missing and what is too old is all in the View."""
        kept, stale = expire(state, view)
        admission = Admission(state, view, kept)
        kept, redundant = drop(admission.redundant(kept), kept, admission)
        started = starts(state, view, kept, admission, admission.may_issue)
        return state, [*stale, *redundant, *started]
