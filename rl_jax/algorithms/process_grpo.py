"""GRPO of process rewards: every rewarded turn is normalised among all of its group's, and credits what led to it.

z = (turn reward - mean) / (std + std_eps) over all rewarded turns of the group's scored episodes; a token's advantage
is the sum of z over the turns that end at or after it. Turn rewards are the environment's; a turn that it gave none
(None, not 0.0) is no step, unless a reward model scores turns (reward_model_at). What a scorer or shaping adds to the
episode's reward stands on the last turn, KL in the reward on the turn of its token. Loss: PPO clip.
Source: DeepSeekMath arXiv:2402.03300, section 4.1.3. Differs: steps are turns and not pieces of one answer.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.token_advantages import process_normalised
from rl_jax.types import Trajectory


class ProcessGrpo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        rewards, ends = [], []
        turns = zip(
            scored.members,
            scored.turn_rewards(),
            scored.turn_penalties(),
            scored.valid,
            strict=True,
        )
        for member, of_turns, penalties, valid in turns:
            steps = self._steps(member, of_turns) if valid else []
            rewards.append([of_turns[k] + penalties[k] for k in steps])
            ends.append([last_token(member, k) for k in steps])
        mask = scored.padded([member.loss_mask for member in scored.members])
        values = process_normalised(rewards, ends, scored.groups, mask, eps=self.settings.std_eps)
        return scored.unpadded(values)

    def _steps(self, member: Trajectory, of_turns: np.ndarray) -> list[int]:
        """The turns that have a reward; each that was sampled, where a reward model scores turns."""
        if self.settings.reward_model_coef and self.settings.reward_model_at == "turns":
            return np.unique(member.turn_ids[member.loss_mask]).tolist()
        return rewarded(member, of_turns)


def rewarded(member: Trajectory, of_turns: np.ndarray) -> list[int]:
    """The turns that have a reward: given by the environment, and the last where it holds the rest of the episode's.

    of_turns: Scored.turn_rewards of the member.
    """
    given = np.zeros(len(of_turns), bool)
    named = np.isfinite(member.turn_rewards[: len(given)])
    given[: len(named)] = named
    if len(given) and (of_turns[-1] or not given.any()):
        given[-1] = True
    return np.flatnonzero(given).tolist()


def last_token(member: Trajectory, turn: int) -> int:
    """Index of the turn's last token; of the one before it, if the turn has none."""
    return int(np.flatnonzero(member.turn_ids <= turn)[-1])
