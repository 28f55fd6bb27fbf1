"""Scores closed episodes off the loop's path; what cannot be scored has a status and is never a zero.

Owns: the way of an episode to its reward, and the Failure that stands for a missing one (charged to infra, ERRORED in
the ledger). What counts as a reward is decided in rewards/check.py: `scored` is a finite number (0.0 and -0.0 too),
`schema` anything else, `error` an exception, `timeout` no answer; only `scored` has a value.
task.reward "env" is the sum of the environment's step rewards; any other name is a scorer that runs in the pool's
processes, and its reward keeps the environment's sum beside it: parts {"env": sum, name: value}.
Must not: block the event loop, or wait without a deadline.
"""

import asyncio
from dataclasses import replace
from typing import Any

from rl_jax.rewards.check import ENV_SCORER, checked, failed, from_steps
from rl_jax.settings import RewardSettings
from rl_jax.types import EpisodeView, Failure, Reward, Task

SLACK_S = 5.0  # the pool ends a scorer at its deadline and needs a moment to say so


class RewardService:
    """`pool.score(name, task, view)` runs a scorer where it can be killed."""

    def __init__(self, pool: Any, settings: RewardSettings):
        self._pool, self._settings = pool, settings

    async def score(self, task: Task, view: EpisodeView) -> tuple[Reward, Failure | None]:
        """The reward of a closed episode; the Failure says why it has no value."""
        reward = from_steps(view.step_rewards)
        if task.reward != ENV_SCORER:
            reward = await self._scorer_reward(task, view, reward)
        if reward.status == "scored":
            return reward, None
        return reward, Failure("reward", reward.status, "infra", f"{task.reward}: {reward.detail}")

    async def _scorer_reward(self, task: Task, view: EpisodeView, env: Reward) -> Reward:
        name, limit_s = task.reward, self._settings.timeout_s
        try:
            async with asyncio.timeout(limit_s + SLACK_S):
                reward = checked(await self._pool.score(name, task, view))
        except TimeoutError:
            return failed("timeout", f"no score within rewards.timeout_s={limit_s:g}", name)
        if reward.status != "scored":
            return reward
        parts = {**reward.parts, name: reward.value}
        if env.value is not None:
            parts[ENV_SCORER] = env.value
        return replace(reward, parts=parts)
