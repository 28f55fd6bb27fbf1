"""AIPO: leave-one-out advantages, and a policy gradient under the truncated weight to the policy that sampled.

Source: LlamaRL arXiv:2505.24034 (cap 2 to 10). Differs: the paper leaves the baseline open.
"""

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.rloo import Rloo
from rl_jax.algorithms.token_losses import TokenLoss, truncated_is


class Aipo(Rloo):
    def loss(self, x: LossInputs) -> TokenLoss:
        return truncated_is(x, cap=self.settings.ratio_max)
