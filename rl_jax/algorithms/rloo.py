"""RLOO: each sequence's baseline is the mean reward of the other members of its group, which it does not bias.

A_i = r_i - mean of r_j, j != i = n / (n - 1) * (r_i - mean_g). Loss: the token-level PPO clip, as
GRPO's.
Source: arXiv:2402.14740. Differs: the paper's policy gradient has no ratio; the clip is idle where
batches are on policy.
"""

from collections.abc import Sequence

from rl_jax.algorithms.advantages import group_rewards, spread, trains_scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import leave_one_out
from rl_jax.algorithms.ppo import clipped_policy_loss
from rl_jax.settings import AlgorithmSettings
from rl_jax.types import Group, Trajectory


class Rloo:
    needs: frozenset[str] = frozenset()
    samples = True

    def __init__(self, settings: AlgorithmSettings):
        self.settings = settings

    def trains(self, trajectory: Trajectory) -> bool:
        return trains_scored(trajectory, self.settings.overlong_filter)

    def select(self, groups: Sequence[Group]):
        return list(groups), []

    def advantages(self, groups: Sequence[Group], extras, state):
        return spread(groups, leave_one_out(*group_rewards(groups))), state

    def token_loss(self, x: LossInputs):
        return clipped_policy_loss(x, self.settings)
