"""DPO and IPO: in each group the best-rewarded trajectory is preferred to the worst; a pair is two sequences.

The pair's slope is computed on the host from log-probs at step start and stands on its tokens as an advantage, so that
-A log p has exactly the pair's gradient wherever the two sequences lie (preference.py). The other members get 0, and
the factor S / pairs undoes what they add to the count of sequences, so the loss is the mean over pairs. Rewards 1 and 0
make pairs of saved or scripted episodes. Needs `old_logprobs` and `reference_logprobs`.
Source: arXiv:2305.18290, arXiv:2310.12036. The loss that is logged is the surrogate, not the pair's.
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


class Dpo:
    samples = False  # a pair need not come from the policy
    measured = frozenset({"old_logprobs", "reference_logprobs"})
    loss_name = "preference/loss"

    def __init__(self, settings: AlgorithmSettings):
        self.settings = options.resolved(settings)
        self.needs = options.needs(settings)

    def trains(self, trajectory: Trajectory) -> bool:
        return trains_scored(trajectory, self.settings.overlong_filter)

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

    def measure(self, groups: Sequence[Group], extras: Mapping[str, Any]) -> dict[str, Metric]:
        """The pairs' own loss; a reward is beta times the sum of a sequence's log-ratios."""
        members = [trajectory for group in groups for trajectory in group.trajectories]
        s, pairs = self.settings, pairs_of(groups, self.trains)
        ratios = np.array([[self._ratio(i, members, extras) for i in pair] for pair in pairs])
        ratios = ratios.reshape(-1, 2, 2)  # pair, side, (log-ratio, its step)
        x = ratios[:, 0, 0] - ratios[:, 1, 0]
        loss = pair_value(x, beta=s.beta, kind=s.preference, label_smoothing=s.label_smoothing)
        sums = s.beta * ratios[..., 0] / ratios[..., 1]
        return pair_figures(loss, sums[:, 0], sums[:, 1])

    def _ratio(self, i: int, members: Sequence[Trajectory], extras) -> tuple[float, float]:
        """(log-ratio to the reference as the loss takes it, d of it / d of a token's log-prob)."""
        mask = members[i].loss_mask
        policy = np.asarray(extras["old_logprobs"][i], np.float64)[mask]
        d = policy - np.asarray(extras["reference_logprobs"][i], np.float64)[mask]
        step = 1.0 / len(d) if self.settings.preference == "ipo" else 1.0
        return float(d.sum() * step), step
