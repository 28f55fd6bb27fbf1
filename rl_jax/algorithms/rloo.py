"""RLOO: each sequence's baseline is the mean reward of the other members of its group, which it does not bias.

A_i = r_i - mean of r_j, j != i = n / (n - 1) * (r_i - mean_g). Loss: the token-level PPO clip, as
GRPO's. With `normalize` A is then divided by its spread over the batch, (A - mean) / (std + std_eps), as TRL can.
Source: arXiv:2402.14740. Differs: the paper's policy gradient has no ratio; the clip is idle where
batches are on policy.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.group_advantages import leave_one_out
from rl_jax.algorithms.policy import PolicyAlgorithm


class Rloo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        s = self.settings
        return scored.spread(
            leave_one_out(*scored.totals, normalize=bool(s.normalize), eps=s.std_eps)
        )
