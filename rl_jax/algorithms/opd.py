"""On-policy distillation: on the student's own samples, each token is pulled towards the teacher's log-prob.

A_t = log p_teacher - log p, a token at a time; no reward is read, and an unscored episode trains as well. Needs
`teacher_logprobs`. Source: distillation.py.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored, is_closed
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.distillation import opd_pg
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_losses import TokenLoss
from rl_jax.types import Outcome, Trajectory


def trains_unscored(trajectory: Trajectory, overlong_filter: bool) -> bool:
    """Rule where a teacher gives the signal: closed, and not truncated where the overlong filter is on."""
    cut = overlong_filter and trajectory.outcome is Outcome.TRUNCATED
    return is_closed(trajectory) and not cut


class Opd(PolicyAlgorithm):
    def trains(self, trajectory: Trajectory) -> bool:
        return trains_unscored(trajectory, self.settings.overlong_filter)

    def estimate(self, scored: Scored) -> list[np.ndarray]:
        """What the metrics show; the loss takes the current policy's."""
        teacher = scored.extras["teacher_logprobs"]
        return [
            np.where(m.loss_mask, t - m.logprobs, 0.0).astype(np.float32)
            if len(t) == len(m.tokens)
            else np.zeros(len(m.tokens), np.float32)
            for m, t in zip(scored.members, teacher, strict=True)
        ]

    def loss(self, x: LossInputs) -> TokenLoss:
        return opd_pg(x, cap=self.settings.ratio_max)
