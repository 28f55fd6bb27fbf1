"""Dr.GRPO: advantages centred in the group and not divided by its std, so hard and easy tasks keep their scale.

A_i = r_i - mean_g. The paper's other half is the divisor: algorithm.aggregation =
seq-mean-token-sum-norm, whose constant L is algorithm.max_response_tokens, so that long wrong
answers are not diluted. Any other aggregation is allowed.
Source: arXiv:2503.20783.
"""

from collections.abc import Sequence

from rl_jax.algorithms.advantages import group_rewards, spread, trains_scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.ppo import clipped_policy_loss
from rl_jax.settings import AlgorithmSettings
from rl_jax.types import Group, Trajectory


class DrGrpo:
    needs: frozenset[str] = frozenset()
    samples = True

    def __init__(self, settings: AlgorithmSettings):
        self.settings = settings

    def trains(self, trajectory: Trajectory) -> bool:
        return trains_scored(trajectory, self.settings.overlong_filter)

    def select(self, groups: Sequence[Group]):
        return list(groups), []

    def advantages(self, groups: Sequence[Group], extras, state):
        return spread(groups, group_normalised(*group_rewards(groups), std_scope="none")), state

    def token_loss(self, x: LossInputs):
        return clipped_policy_loss(x, self.settings)
