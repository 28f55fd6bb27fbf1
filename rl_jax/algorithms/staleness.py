"""The arithmetic of versions: ages of tokens, and the two gates that bound them. Host, integers.

Admission (capacity, may_start) spares work, consumption (is_fresh) is what bounds the age: with admission alone a
straggler can be consumed arbitrarily old. Both take one number, rollout.max_staleness.
"""

import numpy as np


def token_ages(versions: np.ndarray, mask: np.ndarray, version: int) -> np.ndarray:
    """int64[B, T]: version of the consumer minus the token's; 0 off the mask."""
    return np.where(np.asarray(mask) != 0, version - np.asarray(versions, np.int64), 0)


def version_mix(versions: np.ndarray, mask: np.ndarray, version: int) -> dict[str, np.ndarray]:
    """oldest, newest, mean age, num_versions and start_age of each row; zeros for a row without a trained token."""
    mask = np.asarray(mask) != 0
    ages = token_ages(versions, mask, version)
    own = [row[here] for row, here in zip(ages, mask)]
    return {
        "oldest": np.array([a.max(initial=0) for a in own], np.int64),
        "newest": np.array([a.min() if len(a) else 0 for a in own], np.int64),
        "mean": np.array([a.mean() if len(a) else 0.0 for a in own], np.float64),
        "num_versions": np.array([len(np.unique(a)) for a in own], np.int64),
        "start_age": np.array([a[0] if len(a) else 0 for a in own], np.int64),
    }


def is_fresh(version: int, sampled_version: int, max_staleness: int) -> bool:
    """Whether what a version sampled may still be consumed (or go on running)."""
    return version - sampled_version <= max_staleness


def buffer_limit(max_staleness: int, batch: int) -> int:
    """Most finished samples that may wait: (1 + max_staleness) batch."""
    return (1 + max_staleness) * batch


def capacity(
    version: int, accepted: int, running: int, *, max_staleness: int, batch: int, slots: int
) -> int:
    """How many more may start: min((max_staleness + version + 1) batch - accepted - running, slots - running).

    Source:  AReaL arXiv:2505.24298. May be negative after a resume with a smaller bound.
    """
    return min((max_staleness + version + 1) * batch - (accepted + running), slots - running)


def may_start(num_started: int, version: int, *, max_staleness: int, batch: int) -> bool:
    """Whether the num_started-th sample (from 1) may have started at this version: it is consumed in time, in order."""
    return (num_started - 1) // batch <= version + max_staleness
