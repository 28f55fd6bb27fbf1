"""TOPR: rewards centred in the group; good sequences train unweighted, bad ones under a weight tapered to [0, 1].

The weight is the sequence's (or the token's) ratio to the policy that sampled, so off-policy failures cannot push
without bound. Source: arXiv:2503.14286.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.sequence_losses import topr
from rl_jax.algorithms.token_losses import TokenLoss


class Topr(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.spread(group_normalised(*scored.totals, std_scope="none"))

    def loss(self, x: LossInputs) -> TokenLoss:
        return topr(x, level=self.settings.weight_level)
