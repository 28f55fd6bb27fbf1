"""GiGPO: an episode's advantage in its group, plus each turn's among the turns that began in the same state.

Turn rewards are the environment's; their discounted sum is compared where the record's state keys are equal, within
the task. A state met once adds nothing. Source: arXiv:2505.10978. Loss: PPO clip.
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored, num_turns
from rl_jax.algorithms.agent_advantages import group_in_group, on_turns, turn_returns
from rl_jax.algorithms.policy import PolicyAlgorithm


class Gigpo(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        s = self.settings
        rewards, groups, valid = scored.totals
        counts = [num_turns(member) for member in scored.members]
        returns = [turn_returns(own, s.gamma) for own in scored.turn_rewards()]
        states = [
            member.state_keys[k] if k < len(member.state_keys) else ""
            for member, count in zip(scored.members, counts)
            for k in range(count)
        ]
        advantages, _, _ = group_in_group(
            np.repeat(np.arange(len(counts)), counts),
            np.repeat(groups, counts),
            states,
            np.concatenate([*returns, np.zeros(0)]),
            np.repeat(rewards, counts),
            omega=s.omega,
            std_scope=str(s.std_scope),
            eps=s.std_eps,
            valid=np.repeat(valid, counts),
        )
        ends = np.cumsum(counts)
        return [
            on_turns(advantages[end - n : end], m.turn_ids, m.loss_mask).astype(np.float32)
            for m, n, end in zip(scored.members, counts, ends)
        ]
