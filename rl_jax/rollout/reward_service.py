"""Scores closed episodes off the loop's path; what cannot be scored has a status and is never a zero.

Owns: the way of an episode to its reward, and the Failure that stands for a missing one (charged to infra, ERRORED in
the ledger). What counts as a reward is decided in rewards/check.py: `scored` is a finite number (0.0 and -0.0 too),
`schema` anything else, `error` an exception, `timeout` no answer; only `scored` has a value.
task.reward "env" is the sum of the environment's step rewards, with what info["reward/ROLE"] says as the roles' parts;
any other name is a scorer that runs in the pool's processes, and its reward keeps the environment's sum beside it:
parts {"env": sum, name: value}.
Must not: block the event loop, or wait without a deadline.
"""

import asyncio
from dataclasses import replace
from typing import Any

from rl_jax.rewards.check import ENV_SCORER, checked, failed, from_steps, with_roles
from rl_jax.settings import RewardSettings, RolloutSettings
from rl_jax.types import EpisodeView, Failure, Reward, Task


class RewardService:
    """`pool.score(name, task, view)` runs a scorer where it can be killed, within rewards.timeout_s of its own."""

    def __init__(
        self,
        pool: Any,
        settings: RewardSettings,
        patience_s: float = RolloutSettings.episode_timeout_s,
    ):
        """patience_s: for the whole scoring of an episode, the wait for a scorer that is free with it."""
        self._pool, self._settings, self._patience_s = pool, settings, patience_s

    async def score(self, task: Task, view: EpisodeView) -> tuple[Reward, Failure | None]:
        """The reward of a closed episode; the Failure says why it has no value."""
        reward = with_roles(from_steps(view.step_rewards), view.info)
        if task.reward != ENV_SCORER:
            reward = await self._scorer_reward(task, view, reward)
        if reward.status == "scored":
            return reward, None
        return reward, Failure("reward", reward.status, "infra", f"{task.reward}: {reward.detail}")

    async def _scorer_reward(self, task: Task, view: EpisodeView, env: Reward) -> Reward:
        name, limit_s = task.reward, self._patience_s
        try:
            async with asyncio.timeout(limit_s):
                reward = checked(await self._pool.score(name, task, view))
        except TimeoutError:
            said = (
                f"no score within rollout.episode_timeout_s={limit_s:g}, the wait for one of"
                f" rewards.workers={self._settings.workers} with it; raise either"
            )
            return failed("timeout", said, name)
        if reward.status != "scored":
            return reward
        parts = {**reward.parts, name: reward.value}
        if env.value is not None:
            parts[ENV_SCORER] = env.value
        return replace(reward, parts=parts)
