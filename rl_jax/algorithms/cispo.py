"""CISPO: GRPO's advantages, and a policy gradient whose importance weight is clipped and not its gradient.

The bounds are absolute: [0, 5] by default, so no token is silenced. Source: MiniMax-M1 arXiv:2506.13585, ScaleRL
arXiv:2510.13786.
"""

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.token_losses import TokenLoss, cispo


class Cispo(Grpo):
    def loss(self, x: LossInputs) -> TokenLoss:
        return cispo(x, ratio_min=self.settings.ratio_min, ratio_max=self.settings.ratio_max)
