"""The table of scheduler policies, and what every policy is told at the start.

A policy is pure (state in, state out) and sees only a View, so the same object runs under the real clock and under a
simulator's. Must not: do I/O, read a clock, or hold state of its own.
"""

from dataclasses import dataclass

# name -> "module:attribute" of a class without constructor arguments that implements types.SchedulerPolicy.
SCHEDULERS: dict[str, str] = {
    "trajectory": "rl_jax.rollout.scheduler.trajectory:TrajectoryScheduler",
    "batch": "rl_jax.rollout.scheduler.batch:BatchScheduler",
}
REDUNDANT = "redundant"  # why what runs beyond the quota goes once the quota is met


@dataclass(frozen=True)
class SchedulerConfig:
    """`cfg` of SchedulerPolicy.init; JSON by construction."""

    tags: tuple[
        str, ...
    ]  # of the task sources, in config order; a batch holds equal groups of each
    group_size: int  # episodes of one group
    max_staleness: int  # versions; View.bound is what of it holds now
    extra_groups: int = 0  # that may run beyond those that are needed
    extra_members: int = 0  # of each group, likewise
