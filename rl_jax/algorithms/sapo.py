"""SAPO: GRPO's advantages, and a smooth gate of the ratio in place of the clip, steeper for negative advantages.

Source: arXiv:2511.20347.
"""

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.token_losses import TokenLoss, sapo


class Sapo(Grpo):
    def loss(self, x: LossInputs) -> TokenLoss:
        return sapo(x, tau_pos=self.settings.tau_pos, tau_neg=self.settings.tau_neg)
