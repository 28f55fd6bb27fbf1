"""GSPO: GRPO's advantages, and the clip on one ratio a sequence, the geometric mean of its tokens' ratios.

The clip range is that of a mean of many log-ratios: 3e-4 and 4e-4. Aggregation seq-mean-token-mean makes the loss the
mean over sequences (sequence_losses.py). Source: arXiv:2507.18071.
"""

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.sequence_losses import gspo
from rl_jax.algorithms.token_losses import TokenLoss


class Gspo(Grpo):
    def loss(self, x: LossInputs) -> TokenLoss:
        s = self.settings
        return gspo(x, clip_low=s.clip_low, clip_high=s.clip_high, dual_clip=s.dual_clip or None)
