"""DPPO: GRPO's advantages; tokens whose probability moved too far away give nothing, by divergence and not by ratio.

Source: arXiv:2602.04879.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_losses import TokenLoss, dppo


class Dppo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.spread(group_normalised(*scored.totals, eps=self.settings.std_eps))

    def loss(self, x: LossInputs) -> TokenLoss:
        s = self.settings
        return dppo(
            x, divergence=s.divergence, div_low=s.div_low, div_high=s.div_high, ratio_cap=s.ratio_max
        )  # fmt: skip
