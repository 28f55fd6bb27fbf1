"""AIPO: leave-one-out advantages, and a policy gradient under the truncated weight to the policy that sampled.

Source: LlamaRL arXiv:2505.24034 (cap 2 to 10). Differs: the paper leaves the baseline open.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import leave_one_out
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_losses import TokenLoss, truncated_is


class Aipo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.spread(leave_one_out(*scored.totals))

    def loss(self, x: LossInputs) -> TokenLoss:
        return truncated_is(x, cap=self.settings.ratio_max)
