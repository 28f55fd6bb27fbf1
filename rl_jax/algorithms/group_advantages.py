"""Group advantages on the host: numpy, float64, one value per sequence.

Rules for every estimator here: a group of one has advantage 0; a group whose valid rewards are all
equal has advantage exactly 0, decided by max == min and not by std > 0 (a float mean differs from
its equal members by rounding, which a division by the std would blow up); invalid members are left
out of the statistics and get 0. Group ids are any integers, in any order, of unequal sizes.
"""

from collections.abc import Iterator, Sequence

import numpy as np

STD_SCOPES = ("group", "batch", "none")


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
    if std_scope not in STD_SCOPES:
        raise ValueError(f"std_scope={std_scope!r} is unknown; one of {', '.join(STD_SCOPES)}")
    rewards, valid = checked(rewards, groups, valid)
    batch_std = np.std(rewards[valid], ddof=ddof) if valid.sum() > ddof else 0.0
    advantages = np.zeros(len(rewards), np.float64)
    for members in informative(rewards, groups, valid):
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
    rewards, valid = checked(rewards, groups, valid)
    advantages = np.zeros(len(rewards), np.float64)
    for members in informative(rewards, groups, valid):
        own = rewards[members]
        advantages[members] = (own - own.mean()) * (len(own) / (len(own) - 1))
    return batch_normalised(advantages, valid, eps=eps) if normalize else advantages


def length_weighted(
    rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, valid: np.ndarray | None = None
) -> np.ndarray:
    """reward - sum(n r) / sum(n) of the group, n = trained tokens: the baseline of least variance per token.

    Source:  OPO arXiv:2505.23585.
    """
    rewards, valid = checked(rewards, groups, valid)
    lengths = np.asarray(lengths, np.float64)
    advantages = np.zeros(len(rewards), np.float64)
    for members in informative(rewards, groups, valid):
        own, weight = rewards[members], lengths[members]
        if weight.sum() > 0:
            advantages[members] = own - (weight * own).sum() / weight.sum()
    return advantages


def max_likelihood(
    rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray | None = None
) -> np.ndarray:
    """(reward - mean) / mean of the group where the mean is positive, else 0: hard tasks weigh more.

    Source:  MaxRL arXiv:2602.02710; for rewards in [0, 1].
    """
    rewards, valid = checked(rewards, groups, valid)
    advantages = np.zeros(len(rewards), np.float64)
    for members in informative(rewards, groups, valid):
        own = rewards[members]
        if own.mean() > 0:
            advantages[members] = (own - own.mean()) / own.mean()
    return advantages


def best_of_group(
    rewards: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray | None = None,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
) -> np.ndarray:
    """Only the group's best gets max - second, over (std + eps) if normalize; a tie for the best is no signal.

    Source:  Pass@k policy optimisation arXiv:2503.19595.
    """
    rewards, valid = checked(rewards, groups, valid)
    advantages = np.zeros(len(rewards), np.float64)
    for members in informative(rewards, groups, valid):
        own = rewards[members]
        second, best = np.sort(own)[-2:]
        gap = best - second
        advantages[members[np.argmax(own)]] = (
            gap / (np.std(own, ddof=1) + eps) if normalize else gap
        )
    return advantages


def multi_reward(
    components: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray | None = None,
    *,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
) -> np.ndarray:
    """Each reward component normalised in the group, summed with weights, then normalised over the batch.

    Args:    components: float[S, C]; weights: C numbers, 1 each if None.
    Source:  GDPO arXiv:2601.05242.
    """
    components = np.asarray(components, np.float64)
    weights = [1.0] * components.shape[1] if weights is None else weights
    _, valid = checked(components[:, 0], groups, valid)
    total = np.zeros(len(components), np.float64)
    for column, weight in zip(components.T, weights, strict=True):
        total += weight * group_normalised(column, groups, valid, eps=eps)
    return batch_normalised(total, valid, eps=eps)


def batch_normalised(values: np.ndarray, valid: np.ndarray, *, eps: float) -> np.ndarray:
    """(x - mean) / (std + eps) over the valid values, ddof 1; equal values become 0, a single one stays as it is.

    Args:    values: centred in their groups, so that their mean is 0 but for rounding: a 0 stays exactly 0.
    """
    values, valid = np.asarray(values, np.float64), np.asarray(valid) != 0
    out = values.copy()
    kept = values[valid]
    if len(kept) > 1:
        flat = kept.max() == kept.min()
        scaled = (kept - kept.mean()) / (np.std(kept, ddof=1) + eps)
        out[valid] = 0.0 if flat else np.where(kept == 0, 0.0, scaled)
    return out


def above_greedy(rewards: np.ndarray, greedy_rewards: np.ndarray) -> np.ndarray:
    """reward - reward of the greedy answer to the same task, float64[S]. Source: ReMax arXiv:2310.10505."""
    return np.asarray(rewards, np.float64) - np.asarray(greedy_rewards, np.float64)


def checked(rewards, groups, valid) -> tuple[np.ndarray, np.ndarray]:
    """(rewards f64[S], valid bool[S], all if None). Raises ValueError where lengths differ."""
    rewards = np.asarray(rewards, np.float64)
    valid = np.ones(len(rewards), bool) if valid is None else np.asarray(valid) != 0
    if not len(rewards) == len(groups) == len(valid):
        raise ValueError(
            f"rewards, groups and valid differ in length: {len(rewards)}, {len(groups)}, {len(valid)}"
        )
    return rewards, valid


def informative(rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of the valid members of each group whose rewards are not all equal."""
    groups = np.asarray(groups)
    for group in np.unique(groups):
        members = np.flatnonzero((groups == group) & valid)
        if len(members) > 1 and rewards[members].max() > rewards[members].min():
            yield members
