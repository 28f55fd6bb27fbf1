"""Kimi k1.5: rewards centred in the group; a policy gradient with a square pull of the sequence to the old policy.

Source: arXiv:2501.12599. Aggregation seq-mean-token-mean makes the loss the mean over sequences.
"""

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.dr_grpo import DrGrpo
from rl_jax.algorithms.sequence_losses import kimi
from rl_jax.algorithms.token_losses import TokenLoss


class Kimi(DrGrpo):
    def loss(self, x: LossInputs) -> TokenLoss:
        return kimi(x, tau=self.settings.tau)
