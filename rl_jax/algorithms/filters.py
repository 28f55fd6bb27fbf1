"""Which groups are worth training on. Host; raw task rewards, before any shaping.

A filter drops whole groups before anything is counted; the buffer replaces them, so a batch never gets short.
"""

import numpy as np

from rl_jax.algorithms.group_advantages import checked, informative


def informative_groups(
    rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray | None = None
) -> np.ndarray:
    """Ids of the groups with at least two valid members and unequal rewards, ascending.

    Source:  dynamic sampling, DAPO arXiv:2503.14476. Differs: a group of one is dropped, it has no advantage.
    """
    rewards, valid = checked(rewards, groups, valid)
    groups = np.asarray(groups)
    return np.array(
        [groups[members[0]] for members in informative(rewards, groups, valid)], groups.dtype
    )


def groups_in_band(
    rewards: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray | None = None,
    *,
    low: float,
    high: float,
) -> np.ndarray:
    """Ids of the groups with low < mean reward < high, both exclusive, ascending."""
    rewards, valid = checked(rewards, groups, valid)
    groups = np.asarray(groups)
    means = {g: rewards[(groups == g) & valid].mean() for g in np.unique(groups[valid])}
    return np.array([g for g, mean in means.items() if low < mean < high], groups.dtype)
