"""Role baselines: a role's reward less its own running mean, for games in which a group's mean says nothing.

A = reward - b, then b = decay b + (1 - decay) reward; one b for each role of each tag, from 0, over the episodes in the
order of their tasks and samples, not of their completion. What a role earned is told by roles.py; an episode without
roles is of one. The baselines are state that a checkpoint keeps: {"role_baselines": {"tag/role": b}}. Loss: PPO clip.
Source: RAE, SPIRAL arXiv:2506.24119. Differs: the baselines survive a resume (prime-rl loses them).
"""

from typing import Any

import numpy as np

from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.agent_advantages import role_baselined
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.roles import on_tokens, played

BASELINES = "role_baselines"


class RoleEma(PolicyAlgorithm):
    def estimate(self, scored: Scored) -> list[np.ndarray]:
        return self.estimate_next(scored, None)[0]

    def estimate_next(self, scored: Scored, state: Any) -> tuple[list[np.ndarray], Any]:
        def place(run):
            member = scored.members[run.member]
            return member.epoch, member.tag, member.index, member.sample, run.turns

        runs = sorted(played(scored), key=place)
        advantages, baselines = role_baselined(
            np.array([run.reward for run in runs], np.float64),
            [f"{scored.members[run.member].tag}/{run.role}" for run in runs],
            (state or {}).get(BASELINES, {}),
            decay=float(self.settings.decay or 0.0),
        )
        return on_tokens(scored, runs, advantages), {**(state or {}), BASELINES: baselines}
