"""Turn-level REINFORCE: a turn's return, normalised among the turns of the same number of the same task.

G_k = r_k + gamma G_{k+1} over the environment's turn rewards; the group of a turn is (task, turn number).
Source: ROLL's agentic REINFORCE; PipelineRL keys groups by step. Loss: PPO clip.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored, num_turns
from rl_jax.algorithms.agent_advantages import dense_ids, on_turns, turn_returns
from rl_jax.algorithms.group_advantages import group_normalised
from rl_jax.algorithms.policy import PolicyAlgorithm


class TurnReinforce(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        counts = [num_turns(member) for member in scored.members]
        returns = [turn_returns(own, self.settings.gamma) for own in scored.turn_rewards()]
        if scored.penalties is not None:  # a turn pays for its own tokens and those after it
            returns = [
                g + np.cumsum(own[::-1])[::-1] for g, own in zip(returns, scored.turn_penalties())
            ]
        keys = [
            (group, k) for group, count in zip(scored.groups.tolist(), counts) for k in range(count)
        ]
        values = group_normalised(
            np.concatenate([*returns, np.zeros(0)]),
            dense_ids(keys),
            np.repeat(scored.valid, counts),
            std_scope=str(self.settings.std_scope),
            eps=self.settings.std_eps,
        )
        ends = np.cumsum(counts)
        return [
            on_turns(values[end - n : end], m.turn_ids, m.loss_mask).astype(np.float32)
            for m, n, end in zip(scored.members, counts, ends)
        ]
