"""TOPR: rewards centred in the group; good sequences train unweighted, bad ones under a weight tapered to [0, 1].

The weight is the sequence's (or the token's) ratio to the policy that sampled, so off-policy failures cannot push
without bound. Source: arXiv:2503.14286.
"""

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.dr_grpo import DrGrpo
from rl_jax.algorithms.sequence_losses import topr
from rl_jax.algorithms.token_losses import TokenLoss


class Topr(DrGrpo):
    def loss(self, x: LossInputs) -> TokenLoss:
        return topr(x, level=self.settings.weight_level)
