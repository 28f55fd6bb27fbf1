"""Supervised learning: -logprob on every token of loss_mask, of rows (data/) and of scripted or saved episodes.

No reward is read: a scripted episode trains whether or not it was scored or solved. Advantages are
1 and unused; the clip, the overlong filter and the entropy bonus of the settings do not apply.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_jax.algorithms import options
from rl_jax.algorithms.advantages import is_closed, spread
from rl_jax.algorithms.algorithm import Base, LossInputs, Sums
from rl_jax.algorithms.token_losses import nll
from rl_jax.metrics import Metric
from rl_jax.settings import AlgorithmSettings
from rl_jax.types import Group, Trajectory


class Sft(Base):
    samples = False
    measured, loss_name = frozenset({"old_logprobs"}), "sft/loss"

    def __init__(self, settings: AlgorithmSettings):
        self.settings = options.resolved(settings)
        self.needs = self.needs | options.needs(settings)

    def trains(self, trajectory: Trajectory) -> bool:
        return is_closed(trajectory)

    def advantages(self, groups: Sequence[Group], extras, state):
        num_members = sum(len(group.trajectories) for group in groups)
        return spread(groups, np.ones(num_members)), state

    def token_loss(self, x: LossInputs):
        sums: Sums = {}
        return nll(x).loss, sums

    def measure(self, groups: Sequence[Group], extras: Mapping[str, Any]) -> dict[str, Metric]:
        """The mean over tokens, whatever `aggregation` trains: a held-out loss is compared between runs."""
        members = [trajectory for group in groups for trajectory in group.trajectories]
        found = [
            np.asarray(logprobs, np.float64)[member.loss_mask]
            for member, logprobs in zip(members, extras["old_logprobs"], strict=True)
        ]
        return {"sft/loss": Metric(-sum(float(x.sum()) for x in found), sum(map(len, found)))}
