"""GMPO: GRPO's advantages, and the geometric mean of a sequence's ratios, each clipped in log space first.

Source: arXiv:2507.20673. Aggregation seq-mean-token-mean makes the loss the mean over sequences.
"""

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.sequence_losses import gmpo
from rl_jax.algorithms.token_losses import TokenLoss


class Gmpo(Grpo):
    def loss(self, x: LossInputs) -> TokenLoss:
        return gmpo(x, clip_low=self.settings.clip_low, clip_high=self.settings.clip_high)
