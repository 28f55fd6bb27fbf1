"""GRPO: advantages centred and scaled in the group, PPO clip (with clip-higher).

A_i = (r_i - mean_g) / (std + std_eps), std with ddof 1, of the group (`std_scope`); the value stands on every trained
token of the sequence.
Source: arXiv:2402.03300. Differs: no KL to a reference model unless asked for, token-mean by default, the clip
bounds against the policy that sampled (policy.py says why).
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm


class Grpo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        s = self.settings
        return scored.spread(
            group_normalised(*scored.totals, std_scope=str(s.std_scope), eps=s.std_eps)
        )
