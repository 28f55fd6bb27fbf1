"""GSPO-token: GSPO's ratio of a sequence, and to each token the gradient of its own log-prob alone.

So weights and advantages may differ by token; with one advantage a sequence the gradient is GSPO's
(sequence_losses.py). Source: arXiv:2507.18071, section 4.3.
"""

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.sequence_losses import gspo_token
from rl_jax.algorithms.token_losses import TokenLoss


class GspoToken(Grpo):
    def loss(self, x: LossInputs) -> TokenLoss:
        s = self.settings
        bounds = {"clip_low": s.clip_low, "clip_high": s.clip_high}
        return gspo_token(x, **bounds, dual_clip=s.dual_clip or None)
