"""Reward shaping on the host: the soft punishment of overlong responses."""

import numpy as np


def overlong_penalty(
    lengths: np.ndarray, *, max_length: int, buffer: int, factor: float = 1.0
) -> np.ndarray:
    """clip((max_length - buffer - n) / buffer, -1, 0) factor, float64[S], to be added to the reward.

    Args:    lengths: trained tokens of each response.  buffer: tokens before max_length where the penalty grows.
    Source:  DAPO arXiv:2503.14476. Differs: never below -factor.
    """
    over = (max_length - buffer - np.asarray(lengths, np.float64)) / buffer
    return np.clip(over, -1.0, 0.0) * factor + 0.0  # + 0.0: no negative zeros
