"""Role groups: each role that the policy plays is compared with its peers, of the group or of its own episode.

A = reward - mean over peers, no std. A role's reward of an episode (roles.py) is compared with that of the same role in
the group's other episodes. Roles of `episode_roles` try several times at what an earlier turn of the same episode set
(a solver after a proposer): each of their turns is a try with its own reward, compared with the other turns of the role
in that episode. One try, or equal rewards: 0. Episodes without roles: R - mean of the group. Loss: PPO clip.
Source: prime-rl's hierarchical GRPO. Differs: roles take turns in one conversation (there, each has its own).
"""

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.agent_advantages import role_centred
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.roles import by_turn, on_tokens, played


class RoleGroups(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        alone = self.settings.episode_roles or ()
        runs = [
            run
            for one in played(scored)
            for run in (by_turn(scored, one) if one.role in alone else [one])
        ]
        advantages = role_centred(
            np.array([run.reward for run in runs], np.float64),
            [run.role for run in runs],
            [run.member for run in runs],
            scored.groups[[run.member for run in runs]],
            episode_roles=alone,
        )
        return on_tokens(scored, runs, advantages)
