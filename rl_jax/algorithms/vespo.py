"""VESPO: GRPO's advantages, and a policy gradient under a weight that fades as the sequence leaves the old policy.

Source: arXiv:2602.10693, with TRL's constants.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.sequence_losses import vespo
from rl_jax.algorithms.token_losses import TokenLoss


class Vespo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.spread(group_normalised(*scored.totals, eps=self.settings.std_eps))

    def loss(self, x: LossInputs) -> TokenLoss:
        return vespo(x)
