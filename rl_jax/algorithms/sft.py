"""Supervised warm start: -logprob on every token of loss_mask, all assistant turns of a multi-turn episode.

No reward is read: a scripted episode trains whether or not it was scored or solved. Advantages are
1 and unused; the clip, the overlong filter and the entropy bonus of the settings do not apply.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from rl_jax.algorithms import options
from rl_jax.algorithms.advantages import is_closed, spread
from rl_jax.algorithms.algorithm import LossInputs, Sums
from rl_jax.settings import AlgorithmSettings
from rl_jax.types import Group, Trajectory


class Sft:
    samples = False

    def __init__(self, settings: AlgorithmSettings):
        self.settings = options.resolved(settings)
        self.needs = options.needs(settings)

    def trains(self, trajectory: Trajectory) -> bool:
        return is_closed(trajectory)

    def select(self, groups: Sequence[Group]):
        return list(groups), []

    def advantages(self, groups: Sequence[Group], extras, state):
        num_members = sum(len(group.trajectories) for group in groups)
        return spread(groups, np.ones(num_members)), state

    def token_loss(self, x: LossInputs):
        sums: Sums = {}
        return -jnp.where(x.mask, x.logprobs, 0.0), sums
