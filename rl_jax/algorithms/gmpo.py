"""GMPO: GRPO's advantages, and the geometric mean of a sequence's ratios, each clipped in log space first.

Source: arXiv:2507.20673. Aggregation seq-mean-token-mean makes the loss the mean over sequences.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.sequence_losses import gmpo
from rl_jax.algorithms.token_losses import TokenLoss


class Gmpo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.spread(group_normalised(*scored.totals, eps=self.settings.std_eps))

    def loss(self, x: LossInputs) -> TokenLoss:
        return gmpo(x, clip_low=self.settings.clip_low, clip_high=self.settings.clip_high)
