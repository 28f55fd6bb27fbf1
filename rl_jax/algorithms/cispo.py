"""CISPO: GRPO's advantages, and a policy gradient whose importance weight is clipped and not its gradient.

The bounds are absolute: [0, 5] by default, so no token is silenced. Source: MiniMax-M1 arXiv:2506.13585, ScaleRL
arXiv:2510.13786.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_losses import TokenLoss, cispo


class Cispo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.spread(group_normalised(*scored.totals, eps=self.settings.std_eps))

    def loss(self, x: LossInputs) -> TokenLoss:
        return cispo(x, ratio_min=self.settings.ratio_min, ratio_max=self.settings.ratio_max)
