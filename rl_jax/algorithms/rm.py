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

from rl_jax.algorithms import options
from rl_jax.algorithms.advantages import trains_scored
from rl_jax.algorithms.algorithm import LossInputs, Sums
from rl_jax.algorithms.preference import pair_figures, pair_slope, pair_value, pairs_of
from rl_jax.algorithms.token_losses import reinforce
from rl_jax.metrics import Metric
from rl_jax.settings import AlgorithmSettings
from rl_jax.types import Group, Trajectory


class Rm:
    samples = False
    measured, loss_name = frozenset({"rewards"}), "preference/loss"

    def __init__(self, settings: AlgorithmSettings):
        self.settings = options.resolved(settings)
        self.needs = options.needs(settings)

    def trains(self, trajectory: Trajectory) -> bool:
        return trains_scored(trajectory, overlong_filter=False)

    def select(self, groups: Sequence[Group]):
        kept = [group for group in groups if pairs_of([group], self.trains)]
        uids = {group.uid for group in kept}
        return kept, [(group.uid, "no_pair") for group in groups if group.uid not in uids]

    def advantages(self, groups: Sequence[Group], extras, state):
        members = [trajectory for group in groups for trajectory in group.trajectories]
        out = [np.zeros(len(member.tokens), np.float32) for member in members]
        pairs = pairs_of(groups, self.trains)
        num_trained = sum(bool(self.trains(m) and m.loss_mask.any()) for m in members)
        scale = num_trained / len(pairs) if pairs else 0.0
        rewards = _at_end(members, extras)
        for up, down in pairs:
            slope = float(pair_slope(rewards[up] - rewards[down], beta=1.0))
            center = 2.0 * (self.settings.center_coef or 0.0) * (rewards[up] + rewards[down])
            for i, value in ((up, slope - center), (down, -slope - center)):
                out[i] = np.where(members[i].loss_mask, scale * value, 0.0).astype(np.float32)
        return out, state

    def token_loss(self, x: LossInputs):
        sums: Sums = {}
        return reinforce(x).loss, sums

    def measure(self, groups: Sequence[Group], extras: Mapping[str, Any]) -> dict[str, Metric]:
        """The loss with its centring, and how far apart and how often in the right order the pairs are."""
        members = [trajectory for group in groups for trajectory in group.trajectories]
        rewards = _at_end(members, extras)
        pairs = np.array(pairs_of(groups, self.trains), np.int64).reshape(-1, 2)
        up, down = rewards[pairs[:, 0]], rewards[pairs[:, 1]]
        loss = pair_value(up - down, beta=1.0)
        loss = loss + (self.settings.center_coef or 0.0) * (up + down) ** 2
        return pair_figures(loss, up, down)


def _at_end(members: Sequence[Trajectory], extras: Mapping[str, Any]) -> np.ndarray:
    """f64[S] the reward of each member, 0 of one that trains nothing."""
    return np.array(
        [
            float(values[member.loss_mask][-1]) if member.loss_mask.any() else 0.0
            for member, values in zip(members, extras["rewards"], strict=True)
        ],
        np.float64,
    )
