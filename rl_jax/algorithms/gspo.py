"""GSPO: GRPO's advantages, and the clip on one ratio a sequence, the geometric mean of its tokens' ratios.

The clip range is that of a mean of many log-ratios: 3e-4 and 4e-4. Aggregation seq-mean-token-mean makes the loss the
mean over sequences (sequence_losses.py). Source: arXiv:2507.18071.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.sequence_losses import gspo
from rl_jax.algorithms.token_losses import TokenLoss


class Gspo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.spread(group_normalised(*scored.totals, eps=self.settings.std_eps))

    def loss(self, x: LossInputs) -> TokenLoss:
        s = self.settings
        return gspo(x, clip_low=s.clip_low, clip_high=s.clip_high, dual_clip=s.dual_clip or None)
