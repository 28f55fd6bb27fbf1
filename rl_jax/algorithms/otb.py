"""Optimal token baseline: a token's return is compared with the group's at the same place, weighed by gradient energy.

A_t = G_t - sum_i G_it W_it / sum_i W_it, W_it the expected squared norm of the score so far: sum over s <= t of
(1 - 2 p_s + sum_v p_v^2). t counts sampled tokens, so that observations, of whatever length, move nothing. Where one
member is left there is nobody to compare with and the return itself stands; in a group of one it would stand
everywhere, and is 0. Loss: PPO clip. Needs `old_logprobs` and `sum_squares` of the policy at step start.
Source: arXiv:2602.07078.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.group_advantages import informative
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_advantages import optimal_token_baseline


class Otb(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        # Overlong-filtered members train nothing and are still compared with.
        compared = [m.loss_mask & bool(v) for m, v in zip(scored.members, scored.valid)]
        mask = scored.padded(compared)
        order = np.argsort(~mask, axis=1, kind="stable")  # sampled tokens to the left

        def compact(values: np.ndarray) -> np.ndarray:
            return np.take_along_axis(values, order, axis=1)

        rewards = scored.token_rewards(mask)
        policy, squares = (
            compact(scored.padded(scored.extras[name])) for name in ("old_logprobs", "sum_squares")
        )
        values, _ = optimal_token_baseline(
            compact(rewards), compact(mask), policy, squares, scored.groups
        )
        out = np.zeros(mask.shape)
        np.put_along_axis(out, order, values, axis=1)
        return scored.unpadded(np.where(self._differs(scored)[:, None], out, 0.0))

    def _differs(self, scored: Scored) -> np.ndarray:
        """bool[S]: of a group of two or more whose rewards are not all equal."""
        out = np.zeros(len(scored.members), bool)
        for members in informative(*scored.totals):
            out[members] = True
        return out
