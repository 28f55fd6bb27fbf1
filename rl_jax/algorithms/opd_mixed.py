"""On-policy distillation beside the task's reward: GRPO's advantage and the teacher's, each with its coefficient.

A_t = reward_coef (R - mean of G) / std + teacher_coef (log p_teacher - log p), under opd's truncated weight to the
policy that sampled. What the estimator gives (and the metrics show) is the reward's part, one value an episode; the
teacher's follows the policy that trains, so it is the loss's, as in opd.
At teacher_coef 0 no teacher is needed and it is GRPO's advantage alone; at reward_coef 0 it would be opd.
Source: A = A_RL - coef k1, ROLL's use_opd (coefficient 1); AReaL weighs both parts. Differs: k1 is that of the policy
that trains, not of the one at step start, which is the same at the one update of a step.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.distillation import opd_pg
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.opd import trains_unscored
from rl_jax.algorithms.token_losses import TokenLoss, truncated_is
from rl_jax.types import Trajectory


class OpdMixed(Grpo):
    def trains(self, trajectory: Trajectory) -> bool:
        """With a teacher an unscored episode too: its advantage is 0, and the teacher's part pulls."""
        if not self.settings.teacher_coef:
            return super().trains(trajectory)
        return trains_unscored(trajectory, self.settings.overlong_filter)

    def estimate(self, scored: Scored) -> list[np.ndarray]:
        coef = np.float32(self.settings.reward_coef)
        return [coef * advantages for advantages in super().estimate(scored)]

    def loss(self, x: LossInputs) -> TokenLoss:
        cap, coef = self.settings.ratio_max, self.settings.teacher_coef
        rewarded = truncated_is(x, cap=cap)
        if not coef:
            return rewarded
        taught = opd_pg(x, cap=cap)
        return TokenLoss(rewarded.loss + coef * taught.loss, taught.parts)
