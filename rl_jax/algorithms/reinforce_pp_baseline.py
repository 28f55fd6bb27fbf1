"""REINFORCE++-baseline: rewards centred in the group, then whitened over all trained tokens of the step.

Long answers weigh more in the statistics, as they do in the loss. Source: arXiv:2501.03262. Loss: PPO clip.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_advantages import whiten


class ReinforcePpBaseline(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        mask = scored.mask
        centred = group_normalised(*scored.totals, std_scope="none")
        return scored.unpadded(whiten(np.where(mask, centred[:, None], 0.0), mask))
