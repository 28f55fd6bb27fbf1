"""Which groups are worth training on. Host; raw task rewards, before any shaping.

A filter drops whole groups before anything is counted; the buffer replaces them, so a batch never gets short.
"""

import numpy as np


def informative_groups(
    rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray | None = None
) -> np.ndarray:
    """Ids of the groups with at least two valid members and unequal rewards, ascending.

    Source:  dynamic sampling, DAPO arXiv:2503.14476. Differs: a group of one is dropped, it has no advantage.
    """
    return _kept(rewards, groups, valid, lambda own: len(own) > 1 and own.max() > own.min())


def groups_in_band(
    rewards: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray | None = None,
    *,
    low: float,
    high: float,
) -> np.ndarray:
    """Ids of the groups with low < mean reward < high, both exclusive, ascending."""
    return _kept(rewards, groups, valid, lambda own: len(own) > 0 and low < own.mean() < high)


def _kept(rewards, groups, valid, keep) -> np.ndarray:
    rewards, groups = np.asarray(rewards, np.float64), np.asarray(groups)
    valid = np.ones(len(groups), bool) if valid is None else np.asarray(valid) != 0
    return np.array(
        [g for g in np.unique(groups) if keep(rewards[(groups == g) & valid])], groups.dtype
    )
