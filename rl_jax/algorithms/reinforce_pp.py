"""REINFORCE++: discounted returns of token rewards, whitened over all trained tokens of the step; no group.

The reward stands on the last trained token, the KL to a reference (kl.where=reward) on each. Needs no group, so
rollout.group_size may be 1. Source: arXiv:2501.03262. Loss: PPO clip.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_advantages import discounted_returns, whiten


class ReinforcePp(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        mask = scored.mask
        returns = discounted_returns(scored.token_rewards(), mask, self.settings.gamma)
        return scored.unpadded(whiten(returns, mask))
