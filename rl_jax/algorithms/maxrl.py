"""MaxRL: advantages divided by the group's mean reward, so that the log of the success rate is climbed.

A_i = (r_i - mean_g) / mean_g where the mean is positive, else 0; for rewards in [0, 1].
Source: arXiv:2602.02710. Loss: PPO clip as GRPO's.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.group_advantages import max_likelihood
from rl_jax.algorithms.policy import PolicyAlgorithm


class MaxRl(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.spread(max_likelihood(*scored.totals))
