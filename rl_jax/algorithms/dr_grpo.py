"""Dr.GRPO: advantages centred in the group and not divided by its std, so hard and easy tasks keep their scale.

A_i = r_i - mean_g. The paper's other half is the divisor: algorithm.aggregation =
seq-mean-token-sum-norm, whose constant L is algorithm.max_response_tokens, so that long wrong
answers are not diluted. Any other aggregation is allowed.
Source: arXiv:2503.20783.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm


class DrGrpo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.spread(group_normalised(*scored.totals, std_scope="none"))
