"""GRPO: advantages centred and scaled in the group, PPO clip (with clip-higher), entropy bonus.

A_i = (r_i - mean_g) / (std_g + std_eps), std with ddof 1; the value stands on every trained token
of the sequence.
Source: arXiv:2402.03300. Differs: no KL to a reference model, token-mean by default, the clip
bounds against the policy that sampled (ppo.py says why).
"""

from collections.abc import Sequence

from rl_jax.algorithms.advantages import group_rewards, spread, trains_scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.ppo import clipped_policy_loss
from rl_jax.settings import AlgorithmSettings
from rl_jax.types import Group, Trajectory


class Grpo:
    needs: frozenset[str] = frozenset()
    samples = True

    def __init__(self, settings: AlgorithmSettings):
        self.settings = settings

    def trains(self, trajectory: Trajectory) -> bool:
        return trains_scored(trajectory, self.settings.overlong_filter)

    def select(self, groups: Sequence[Group]):
        return list(groups), []

    def advantages(self, groups: Sequence[Group], extras, state):
        values = group_normalised(*group_rewards(groups), eps=self.settings.std_eps)
        return spread(groups, values), state

    def token_loss(self, x: LossInputs):
        return clipped_policy_loss(x, self.settings)
