"""Between trajectories and the estimators' arrays: what counts, what trains, and values back onto tokens."""

from collections.abc import Sequence

import numpy as np

from rl_jax.types import Group, Outcome, Trajectory


def is_closed(trajectory: Trajectory) -> bool:
    """Whether the episode ended by itself or by a limit; failed and cancelled ones never train."""
    return trajectory.outcome in (Outcome.OK, Outcome.TRUNCATED)


def is_scored(trajectory: Trajectory) -> bool:
    """Whether the reward counts in its group's statistics.

    Raises: ValueError if the status says "scored" and the value is missing or not finite: a status upstream lies.
    """
    if trajectory.reward.status != "scored":
        return False
    value = trajectory.reward.value
    if value is None or not np.isfinite(value):
        raise ValueError(
            f"trajectory {trajectory.uid}: reward.status is scored and reward.value is {value}; "
            "the scorer must report a status other than scored for a missing or non-finite reward"
        )
    return is_closed(trajectory)


def trains_scored(trajectory: Trajectory, overlong_filter: bool) -> bool:
    """Rule of the reward algorithms: scored, and not truncated where the overlong filter is on.

    A truncated trajectory still counts in its group's mean and std: only its tokens leave the loss.
    """
    if overlong_filter and trajectory.outcome is Outcome.TRUNCATED:
        return False
    return is_scored(trajectory)


def group_rewards(groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rewards f64[S], group index i64[S], valid bool[S]) of all members in order; invalid rewards are 0.0."""
    rewards, group_ids, valid = [], [], []
    for index, group in enumerate(groups):
        for trajectory in group.trajectories:
            scored, value = is_scored(trajectory), trajectory.reward.value
            rewards.append(value if scored and value is not None else 0.0)
            group_ids.append(index)
            valid.append(scored)
    return np.array(rewards, np.float64), np.array(group_ids, np.int64), np.array(valid, bool)


def spread(groups: Sequence[Group], advantages: np.ndarray) -> list[np.ndarray]:
    """The sequence's advantage on each of its sampled tokens: one f32[T] per trajectory."""
    members = [trajectory for group in groups for trajectory in group.trajectories]
    return [
        np.where(member.loss_mask, advantage, 0.0).astype(np.float32)
        for member, advantage in zip(members, advantages, strict=True)
    ]
