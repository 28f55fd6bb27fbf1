"""DPPO: GRPO's advantages; tokens whose probability moved too far away give nothing, by divergence and not by ratio.

Source: arXiv:2602.04879.
"""

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.token_losses import TokenLoss, dppo


class Dppo(Grpo):
    def loss(self, x: LossInputs) -> TokenLoss:
        s = self.settings
        return dppo(
            x, divergence=s.divergence, div_low=s.div_low, div_high=s.div_high, ratio_cap=s.ratio_max
        )  # fmt: skip
