"""Kimi k1.5: rewards centred in the group; a policy gradient with a square pull of the sequence to the old policy.

Source: arXiv:2501.12599. Aggregation seq-mean-token-mean makes the loss the mean over sequences.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.sequence_losses import kimi
from rl_jax.algorithms.token_losses import TokenLoss


class Kimi(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.spread(group_normalised(*scored.totals, std_scope="none"))

    def loss(self, x: LossInputs) -> TokenLoss:
        return kimi(x, tau=self.settings.tau)
