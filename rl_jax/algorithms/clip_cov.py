"""Clip-Cov: GRPO's advantages and the PPO clip; a few tokens whose advantage and log-prob covary much train nothing.

A number of tokens, the share `cov_share` of the step's (at least one), is drawn of those whose covariance lies in
(`cov_low`, `cov_high`) and that the clip does not hold already; their advantage becomes 0, which is the loss without
them, and they stay in the denominator. The draw depends on uids and places alone. Needs `old_logprobs`: the covariance
is that of the policy at step start.
Source: arXiv:2505.22617. Differs: nothing is drawn where no token's covariance is in the band, as in verl.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.covariance import covariances, drawn_covarying
from rl_jax.algorithms.grpo import Grpo


class ClipCov(Grpo):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        s, mask = self.settings, scored.mask
        values = scored.padded(super().estimate(scored))
        policy = scored.padded(scored.extras["old_logprobs"])
        held = self._is_clipped(scored, values, policy)
        drawn = drawn_covarying(
            covariances(values, policy, mask),
            mask & ~held,
            max(int(s.cov_share * mask.sum()), 1),
            [member.uid for member in scored.members],
            s.cov_low,
            s.cov_high,
        )
        return scored.unpadded(np.where(drawn, 0.0, values))

    def _is_clipped(self, scored: Scored, values: np.ndarray, policy: np.ndarray) -> np.ndarray:
        """Where the clip is active at step start; nowhere if ratios are 1 there."""
        s = self.settings
        if s.old_policy != "behaviour":
            return np.zeros(values.shape, bool)
        behaviour = scored.padded([member.logprobs for member in scored.members])
        d = np.where(scored.mask, policy - behaviour, 0.0)
        up, down = np.log1p(s.clip_high or 0.0), np.log1p(-(s.clip_low or 0.0))
        return np.where(values > 0, d > up, (values < 0) & (d < down))
