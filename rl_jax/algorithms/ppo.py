"""PPO with a critic: generalised advantages over the trained tokens, whitened over the step, and the clip.

The reward stands on the last trained token; observations are passed over without a discount; after the last token the
value is 0, also where a limit cut the episode, because its score is final. With `bootstrap` it is, where a limit cut
the episode, that of its last token: what might still have come counts. Needs `values`, the critic's at each
trained token. The critic's own targets are the unwhitened returns (token_advantages.gae), its loss value.py.
Source: arXiv:1707.06347, arXiv:1506.02438.

VAPO's options (arXiv:2504.05118), all off: `critic_lam`, the lambda of the critic's targets alone; `lam_alpha`, for the
advantages of a sequence of n trained tokens lambda = 1 - 1 / (lam_alpha n), at least 0; `nll_coef`, which adds so much
of -log p on the tokens of successes (task reward 1), by the loss weights of all tokens.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_advantages import gae, whiten
from rl_jax.algorithms.token_losses import TokenLoss
from rl_jax.types import Group, Outcome, Trajectory


class Ppo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        lam, alpha = self.settings.lam, self.settings.lam_alpha
        if alpha:
            lengths = np.maximum(scored.mask.sum(axis=1), 1)
            lam = np.maximum(1.0 - 1.0 / (alpha * lengths), 0.0)
        return scored.unpadded(whiten(self._gae(scored, lam)[0], scored.mask))

    def targets(self, groups: Sequence[Group], extras, state) -> list[np.ndarray]:
        scored, _ = self._scored(groups, extras, state)
        s = self.settings
        lam = s.lam if s.critic_lam is None else s.critic_lam
        return scored.unpadded(self._gae(scored, lam)[1])

    def token_inputs(self, groups: Sequence[Group], advantages, extras, state):
        told = super().token_inputs(groups, advantages, extras, state)
        if not self.settings.nll_coef:
            return told
        members = [trajectory for group in groups for trajectory in group.trajectories]
        return {**told, "selected": [m.loss_mask * np.float32(is_success(m)) for m in members]}

    def loss(self, x: LossInputs) -> TokenLoss:
        out, coef = super().loss(x), self.settings.nll_coef
        if not coef:
            return out
        assert x.selected is not None
        nll = jnp.where(x.mask & (x.selected > 0), -x.logprobs, 0.0)
        return out._replace(loss=out.loss + coef * nll)

    def _gae(self, scored: Scored, lam) -> tuple[np.ndarray, np.ndarray]:
        own = scored.extras["values"]
        values, after = scored.padded(own), None
        if self.settings.bootstrap:
            is_cut = [member.outcome is Outcome.TRUNCATED for member in scored.members]
            after = np.where(is_cut, scored.at_end(own), 0.0)
        gamma = self.settings.gamma
        return gae(scored.token_rewards(), values, scored.mask, after, gamma=gamma, lam=lam)


def is_success(trajectory: Trajectory) -> bool:
    """As metrics count it."""
    return trajectory.reward.status == "scored" and trajectory.reward.value == 1.0
