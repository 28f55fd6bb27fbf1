"""DPO and IPO: in each group the best-rewarded trajectory is preferred to the worst; a pair is two sequences.

The pair's slope is computed on the host from log-probs at step start and stands on its tokens as an advantage, so that
-A log p has exactly the pair's gradient wherever the two sequences lie (preference.py). Rewards 1 and 0 make pairs of
saved or scripted episodes. Needs `old_logprobs` and `reference_logprobs`.
Source: arXiv:2305.18290, arXiv:2310.12036. The loss that is logged is the surrogate, not the pair's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_jax.algorithms.advantages import trains_scored
from rl_jax.algorithms.preference import (
    PairAlgorithm,
    pair_figures,
    pair_slope,
    pair_value,
    pairs_of,
)
from rl_jax.metrics import Metric
from rl_jax.types import Group, Trajectory


class Dpo(PairAlgorithm):
    measured = frozenset({"old_logprobs", "reference_logprobs"})

    def trains(self, trajectory: Trajectory) -> bool:
        return trains_scored(trajectory, bool(self.settings.overlong_filter))

    def pair_advantages(self, pair, members, extras):
        (x_up, step_up), (x_down, step_down) = (self._ratio(i, members, extras) for i in pair)
        s = self.settings
        slope = float(
            pair_slope(
                x_up - x_down, beta=s.beta, kind=s.preference, label_smoothing=s.label_smoothing
            )
        )
        return slope * step_up, -slope * step_down

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
