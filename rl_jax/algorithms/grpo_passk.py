"""GRPO for pass@k: only the best of a group is credited, with what it adds to the second best.

A = (best - second) / (std of G + std_eps) for the group's best, 0 for all others and where two share the best: the
gradient of the expected maximum of the group, not of its mean. `normalize` false: no std. Loss: PPO clip.
Source: arXiv:2503.19595; verl's grpo_passk.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.group_advantages import best_of_group
from rl_jax.algorithms.policy import PolicyAlgorithm


class GrpoPassk(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        s = self.settings
        return scored.spread(
            best_of_group(*scored.totals, normalize=bool(s.normalize), eps=s.std_eps)
        )
