"""Reward model: Bradley-Terry on the scalar that a value model gives after the last token of each of a pair.

loss = -log sigmoid(r_chosen - r_rejected) + center_coef (r_chosen + r_rejected)^2, the mean over pairs; the second term
keeps rewards round 0, which the first leaves free. As in dpo.py, the pair's slope is computed on the host from the
rewards at step start and stands on the last tokens as advantages, so that -A r has exactly the pair's gradient wherever
its sequences lie. Needs `rewards`; LossInputs.logprobs are the rewards here (learner/reward_model.py).
Source: arXiv:2203.02155 eq. 1 (one pair a prompt); centring arXiv:2312.09244.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_jax.algorithms.advantages import at_end
from rl_jax.algorithms.preference import (
    PairAlgorithm,
    pair_figures,
    pair_slope,
    pair_value,
    pairs_of,
)
from rl_jax.metrics import Metric
from rl_jax.types import Group


class Rm(PairAlgorithm):
    measured = frozenset({"rewards"})

    def pair_advantages(self, pair, members, extras):
        up, down = (at_end(members[i], extras["rewards"][i]) for i in pair)
        slope = float(pair_slope(up - down, beta=1.0))
        center = 2.0 * (self.settings.center_coef or 0.0) * (up + down)
        return slope - center, -slope - center

    def measure(self, groups: Sequence[Group], extras: Mapping[str, Any]) -> dict[str, Metric]:
        """The loss with its centring, and how far apart and how often in the right order the pairs are."""
        members = [trajectory for group in groups for trajectory in group.trajectories]
        pairs = pairs_of(groups, self.trains)
        rewards = np.array(
            [[at_end(members[i], extras["rewards"][i]) for i in pair] for pair in pairs]
        )
        up, down = rewards.reshape(-1, 2).T
        loss = pair_value(up - down, beta=1.0)
        loss = loss + (self.settings.center_coef or 0.0) * (up + down) ** 2
        return pair_figures(loss, up, down)
