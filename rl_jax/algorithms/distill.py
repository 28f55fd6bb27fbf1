"""Distillation from a teacher's whole distribution, on the student's own samples: every id of the vocabulary teaches.

loss = a token's divergence of the student's distribution from the teacher's, at the temperature of sampling. With
M = jsd_beta T + (1 - jsd_beta) S it is jsd_beta KL(T || M) + (1 - jsd_beta) KL(S || M), whose ends are by definition
forward KL(T || S) at 0 and reverse KL(S || T) at 1. No reward is read, and an unscored episode trains as well. Needs
`teacher_divergence`: the learner runs the teacher beside the policy and asks `divergence` a chunk of tokens at a time
(learner/divergence.py). The advantages say which tokens train (1) and nothing else.
Source: GKD arXiv:2306.13649. Differs: no weight for staleness, since the divergence at a prefix is no sample's.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.distillation import generalised_jsd
from rl_jax.algorithms.opd import trains_unscored
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_losses import TokenLoss
from rl_jax.types import Trajectory


class Distill(PolicyAlgorithm):
    def trains(self, trajectory: Trajectory) -> bool:
        return trains_unscored(trajectory, self.settings.overlong_filter)

    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return [member.loss_mask.astype(np.float32) for member in scored.members]

    def divergence(self, student: jax.Array, teacher: jax.Array) -> jax.Array:
        """From logits [..., V] at the temperature of sampling, float32; [...]."""
        return generalised_jsd(student, teacher, float(self.settings.jsd_beta or 0.0))

    def loss(self, x: LossInputs) -> TokenLoss:
        assert x.teacher_divergence is not None, "distill needs teacher_divergence"
        divergence = jnp.where(x.mask, x.teacher_divergence, 0.0)
        return TokenLoss(divergence, {"divergence": divergence})
