"""PPO with a critic: generalised advantages over the trained tokens, whitened over the step, and the clip.

The reward stands on the last trained token; observations are passed over without a discount; after the last token the
value is 0, also where a limit cut the episode, because its score is final. Needs `values`, the critic's at each
trained token. The critic's own targets are the unwhitened returns (token_advantages.gae), its loss value.py.
Source: arXiv:1707.06347, arXiv:1506.02438.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_advantages import gae, whiten


class Ppo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        s, mask = self.settings, scored.mask
        values = scored.padded(scored.extras["values"])
        advantages, _ = gae(scored.token_rewards(), values, mask, gamma=s.gamma, lam=s.lam)
        return scored.unpadded(whiten(advantages, mask))
