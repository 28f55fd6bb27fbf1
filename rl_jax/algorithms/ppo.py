"""PPO with a critic: generalised advantages over the trained tokens, whitened over the step, and the clip.

The reward stands on the last trained token; observations are passed over without a discount; after the last token the
value is 0, also where a limit cut the episode, because its score is final. With `bootstrap` it is, where a limit cut
the episode, that of its last token: what might still have come counts. Needs `values`, the critic's at each
trained token. The critic's own targets are the unwhitened returns (token_advantages.gae), its loss value.py.
Source: arXiv:1707.06347, arXiv:1506.02438.
"""

from collections.abc import Sequence

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_advantages import gae, whiten
from rl_jax.types import Group, Outcome


class Ppo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return scored.unpadded(whiten(self._gae(scored)[0], scored.mask))

    def targets(self, groups: Sequence[Group], extras, state) -> list[np.ndarray]:
        scored, _ = self._scored(groups, extras, state)
        return scored.unpadded(self._gae(scored)[1])

    def _gae(self, scored: Scored) -> tuple[np.ndarray, np.ndarray]:
        s, own = self.settings, scored.extras["values"]
        values, after = scored.padded(own), None
        if s.bootstrap:
            is_cut = [member.outcome is Outcome.TRUNCATED for member in scored.members]
            after = np.where(is_cut, scored.at_end(own), 0.0)
        return gae(scored.token_rewards(), values, scored.mask, after, gamma=s.gamma, lam=s.lam)
