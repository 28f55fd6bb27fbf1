"""OPO: the group's baseline weighs each reward by its response's length, which minimises the variance on policy.

A_i = r_i - sum(n r) / sum(n). Source: arXiv:2505.23585. Differs: PPO clip as GRPO's, idle on policy.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored, num_sampled
from rl_jax.algorithms.group_advantages import length_weighted
from rl_jax.algorithms.policy import PolicyAlgorithm


class Opo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        rewards, groups, valid = scored.totals
        lengths = np.array([num_sampled(member) for member in scored.members])
        return scored.spread(length_weighted(rewards, groups, lengths, valid))
