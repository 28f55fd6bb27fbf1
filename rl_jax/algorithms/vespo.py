"""VESPO: GRPO's advantages, and a policy gradient under a weight that fades as the sequence leaves the old policy.

Source: arXiv:2602.10693, with TRL's constants.
"""

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.sequence_losses import vespo
from rl_jax.algorithms.token_losses import TokenLoss


class Vespo(Grpo):
    def loss(self, x: LossInputs) -> TokenLoss:
        return vespo(x)
