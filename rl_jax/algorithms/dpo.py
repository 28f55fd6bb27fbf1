"""DPO and IPO: in each group the best-rewarded trajectory is preferred to the worst; a pair is two sequences.

The pair's slope is computed on the host from log-probs at step start and stands on its tokens as an advantage, so that
-A log p has exactly the pair's gradient wherever the two sequences lie (preference.py). The other members get 0, and
the factor S / pairs undoes what they add to the count of sequences, so the loss is the mean over pairs. Rewards 1 and 0
make pairs of saved or scripted episodes. Needs `old_logprobs` and `reference_logprobs`.
Source: arXiv:2305.18290, arXiv:2310.12036. The loss that is logged is the surrogate, not the pair's.
"""

from collections.abc import Sequence

import numpy as np

from rl_jax.algorithms import options
from rl_jax.algorithms.advantages import group_rewards, trains_scored
from rl_jax.algorithms.algorithm import LossInputs, Sums
from rl_jax.algorithms.preference import pair_slope
from rl_jax.algorithms.token_losses import reinforce
from rl_jax.settings import AlgorithmSettings
from rl_jax.types import Group, Trajectory


class Dpo:
    samples = False  # a pair need not come from the policy

    def __init__(self, settings: AlgorithmSettings):
        self.settings = options.resolved(settings)
        self.needs = options.needs(settings)

    def trains(self, trajectory: Trajectory) -> bool:
        return trains_scored(trajectory, self.settings.overlong_filter)

    def select(self, groups: Sequence[Group]):
        kept = [group for group in groups if self._pair(group) is not None]
        uids = {group.uid for group in kept}
        return kept, [(group.uid, "no_pair") for group in groups if group.uid not in uids]

    def advantages(self, groups: Sequence[Group], extras, state):
        members = [trajectory for group in groups for trajectory in group.trajectories]
        out = [np.zeros(len(member.tokens), np.float32) for member in members]
        pairs, first = [], 0
        for group in groups:
            if (pair := self._pair(group)) is not None:
                pairs.append((first + pair[0], first + pair[1]))
            first += len(group.trajectories)
        num_trained = sum(bool(self.trains(m) and m.loss_mask.any()) for m in members)
        scale = num_trained / len(pairs) if pairs else 0.0
        for up, down in pairs:
            (x_up, step_up), (x_down, step_down) = (
                self._ratio(i, members, extras) for i in (up, down)
            )
            s = self.settings
            slope = scale * pair_slope(
                x_up - x_down, beta=s.beta, kind=s.preference, label_smoothing=s.label_smoothing
            )  # fmt: skip
            out[up] = np.where(members[up].loss_mask, slope * step_up, 0.0).astype(np.float32)
            out[down] = np.where(members[down].loss_mask, -slope * step_down, 0.0).astype(
                np.float32
            )
        return out, state

    def token_loss(self, x: LossInputs):
        sums: Sums = {}
        return reinforce(x).loss, sums

    def _pair(self, group: Group) -> tuple[int, int] | None:
        """(index of the best, of the worst) of the members that train; None if they are equal."""
        rewards, _, valid = group_rewards([group])
        open_ = [
            i
            for i, m in enumerate(group.trajectories)
            if valid[i] and self.trains(m) and m.loss_mask.any()
        ]
        if not open_:
            return None
        order = sorted(open_, key=lambda i: (rewards[i], group.trajectories[i].uid))  # ties: by uid
        up, down = order[-1], order[0]
        return (up, down) if rewards[up] > rewards[down] else None

    def _ratio(self, i: int, members: Sequence[Trajectory], extras) -> tuple[float, float]:
        """(log-ratio to the reference as the loss takes it, d of it / d of a token's log-prob)."""
        mask = members[i].loss_mask
        policy = np.asarray(extras["old_logprobs"][i], np.float64)[mask]
        d = policy - np.asarray(extras["reference_logprobs"][i], np.float64)[mask]
        step = 1.0 / len(d) if self.settings.preference == "ipo" else 1.0
        return float(d.sum() * step), step
