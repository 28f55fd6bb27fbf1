"""The order of an epoch: a permutation that depends on a name, the epoch and the size only."""

import hashlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np


def epoch_order(name: str, size: int) -> Callable[[int], np.ndarray]:
    """epoch -> i64[size], a permutation; the last two epochs are kept. name: what else it depends on, seed included."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")

    @lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        # A bit generator's raw stream is the same in every numpy, which Generator.permutation's is not.
        raw = np.random.Philox(key=[key, epoch]).random_raw(size)
        return np.argsort(raw, kind="stable")

    return order
