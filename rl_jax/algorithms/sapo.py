"""SAPO: GRPO's advantages, and a smooth gate of the ratio in place of the clip, steeper for negative advantages.

Source: arXiv:2511.20347.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_losses import TokenLoss, sapo


class Sapo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.spread(group_normalised(*scored.totals, eps=self.settings.std_eps))

    def loss(self, x: LossInputs) -> TokenLoss:
        return sapo(x, tau_pos=self.settings.tau_pos, tau_neg=self.settings.tau_neg)
