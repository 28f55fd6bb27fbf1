"""GDPO: each part of the reward is normalised in the group by itself, so that no part drowns the others by its scale.

A = weighted sum of the parts' GRPO advantages, then normalised over the step's episodes. The parts are those that the
scorer gives (types.Reward.parts) and `reward_weights` names; with none named there is one, the reward. A group none of
whose members has a part (another task's scorer) does without it. What shaping adds to an episode (overlong penalty, KL
in the reward, a reward model's score) is centred in the group and added after both normalisations, which would undo its
coefficient: 0.1 moves an advantage, whose spread is 1, by 0.1. Loss: PPO clip. Source: arXiv:2601.05242.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import RewardPartError
from rl_jax.algorithms.group_advantages import group_normalised, multi_reward
from rl_jax.algorithms.policy import PolicyAlgorithm


class Gdpo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        totals, groups, valid = scored.totals
        weights = dict(self.settings.reward_weights or {})
        task = np.array([m.reward.value if v else 0.0 for m, v in zip(scored.members, valid)])
        columns = [part(scored, name) for name in weights] if weights else [task]
        scale = list(weights.values()) if weights else [1.0]
        advantages = multi_reward(
            np.stack(columns, axis=1), groups, valid, weights=scale, eps=self.settings.std_eps
        )
        advantages += group_normalised(totals - task, groups, valid, std_scope="none")
        return scored.spread(np.where(valid, advantages, 0.0))


def part(scored: Scored, name: str) -> np.ndarray:
    """f64[S]: the part of each scored member's reward; 0 in groups that have none.

    Raises: RewardPartError if no member has it, or some of a group have it and others do not.
    """
    has = np.array([name in m.reward.parts for m in scored.members])
    given = sorted({p for m in scored.members for p in m.reward.parts})
    if scored.valid.any() and not (has & scored.valid).any():
        raise RewardPartError(
            f"algorithm.reward_weights names {name}, which no reward of the step has as a part; parts are"
            f" {', '.join(given) or 'none'}"
        )
    for group in np.unique(scored.groups[scored.valid]):
        members = np.flatnonzero((scored.groups == group) & scored.valid)
        if has[members].any() and not has[members].all():
            without = scored.members[members[~has[members]][0]]
            raise RewardPartError(
                f"{without.uid}: its reward lacks part {name}, which others of its group have; a scorer must give the"
                " same parts for every episode of a task"
            )
    values = [m.reward.parts.get(name, 0.0) for m in scored.members]
    return np.where(scored.valid, np.array(values, np.float64), 0.0)
