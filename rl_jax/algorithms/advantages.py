"""Group advantages on the host: numpy, float64, one value per sequence.

Rules for every estimator here: a group of one has advantage 0; a group whose valid rewards are all
equal has advantage exactly 0, decided by max == min and not by std > 0 (a float mean differs from
its equal members by rounding, which a division by the std would blow up); invalid members are left
out of the statistics and get 0. Group ids are any integers, in any order, of unequal sizes.
"""

from collections.abc import Iterator, Sequence

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


def group_normalised(
    rewards: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray | None = None,
    *,
    std_scope: str = "group",
    eps: float = 1e-6,
    ddof: int = 1,
) -> np.ndarray:
    """(reward - group mean) / (std + eps), over the valid members of a group.

    Args:    rewards: float[S]; groups: int[S]; valid: bool[S], all if None.  std_scope: group | batch (std over all
             valid rewards of the batch) | none (no division).
    Returns: float64[S], 0 for invalid members, groups of one and groups of equal rewards.
    Source:  GRPO arXiv:2402.03300; std_scope none is Dr.GRPO arXiv:2503.20783. Differs: Bessel's ddof 1.
    """
    if std_scope not in ("group", "batch", "none"):
        raise ValueError(f"std_scope={std_scope!r} is unknown; one of group, batch, none")
    rewards, valid = _checked(rewards, groups, valid)
    batch_std = np.std(rewards[valid], ddof=ddof) if valid.sum() > ddof else 0.0
    advantages = np.zeros(len(rewards), np.float64)
    for members in _informative(rewards, groups, valid):
        own = rewards[members]
        centred = own - own.mean()
        if std_scope == "group":
            centred = centred / (np.std(own, ddof=ddof) + eps)
        elif std_scope == "batch":
            centred = centred / (batch_std + eps)
        advantages[members] = centred
    return advantages


def leave_one_out(
    rewards: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray | None = None,
    *,
    normalize: bool = False,
    eps: float = 1e-4,
) -> np.ndarray:
    """reward - mean of the other valid members' rewards; optionally normalised over the batch's valid sequences.

    Args:    as group_normalised.  normalize: (A - mean A) / (std A + eps) with ddof 1.
    Returns: float64[S], 0 for invalid members, groups of one and groups of equal rewards.
    Source:  RLOO arXiv:2402.14740; normalize as in TRL.
    """
    rewards, valid = _checked(rewards, groups, valid)
    advantages = np.zeros(len(rewards), np.float64)
    for members in _informative(rewards, groups, valid):
        own = rewards[members]
        advantages[members] = (own - own.mean()) * (len(own) / (len(own) - 1))
    if normalize and valid.sum() > 1:
        kept = advantages[valid]
        if kept.max() > kept.min():
            advantages[valid] = (kept - kept.mean()) / (np.std(kept, ddof=1) + eps)
    return advantages


def _checked(rewards, groups, valid) -> tuple[np.ndarray, np.ndarray]:
    rewards = np.asarray(rewards, np.float64)
    valid = np.ones(len(rewards), bool) if valid is None else np.asarray(valid) != 0
    if not len(rewards) == len(groups) == len(valid):
        raise ValueError(
            f"rewards, groups and valid differ in length: {len(rewards)}, {len(groups)}, {len(valid)}"
        )
    return rewards, valid


def _informative(
    rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray
) -> Iterator[np.ndarray]:
    """Indices of the valid members of each group whose rewards are not all equal."""
    groups = np.asarray(groups)
    for group in np.unique(groups):
        members = np.flatnonzero((groups == group) & valid)
        if len(members) > 1 and rewards[members].max() > rewards[members].min():
            yield members
