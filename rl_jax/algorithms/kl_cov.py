"""KL-Cov: GRPO's advantages, no clip; the few tokens whose advantage and log-prob covary most are pulled back.

Loss: -A r, and on the share `cov_share` of the step's tokens (at least one) + cov_coef |log r|. The covariance is that
of the policy at step start, so it needs `old_logprobs`, whatever the ratio is taken against; the pull is towards what
the ratio is taken against, so that must be the policy that sampled, and older than the one that trains.
Source: arXiv:2505.22617. Differs: one update a step, so the pull undoes what staleness did.
"""

from collections.abc import Sequence

import numpy as np

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.covariance import most_covarying
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.token_losses import TokenLoss, kl_cov


class KlCov(Grpo):
    def token_inputs(self, groups, advantages: Sequence[np.ndarray], extras, state):
        scored = self._plain(groups, extras)
        selected = most_covarying(
            scored.padded(advantages),
            scored.padded(scored.extras["old_logprobs"]),
            scored.mask,
            self.settings.cov_share,
        )
        more = super().token_inputs(groups, advantages, extras, state)
        return {**more, "selected": scored.unpadded(selected)}

    def loss(self, x: LossInputs) -> TokenLoss:
        return kl_cov(x, coef=self.settings.cov_coef)
