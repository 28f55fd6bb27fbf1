"""Scores episodes off the loop's path; what cannot be scored has a status and is never a zero.

Owns: the way of an episode to its reward, and the Failure that stands for a missing one (charged to infra, ERRORED in
the ledger). What counts as a reward is decided in rewards/check.py: `scored` is a finite number (0.0 and -0.0 too),
`schema` anything else, `error` an exception, `timeout` no answer; only `scored` has a value.

    task.reward   value                                       parts
    "env"         sum of the environment's step rewards       env, and info["reward/ROLE"] as each ROLE's
    a scorer      the scorer's                                the scorer's own, NAME: value, env: sum if it has one
    "composite"   sum of weight x value over source.parts     NAME: value of each, without its weight

Beside the value an episode may have shaping: source.shaping's scorers, and the values of source.turn_reward, each by
its weight. Their sum is the part SHAPING (the turns' own, unweighted, is TURNS), which algorithms add to what they
train on; whatever reads the value (filters, curricula, figures of success, pass@k) never sees it.

Invariants
    Where one scorer of an episode has no score, the whole reward has its status: no part is left out, none is 0.
    A scorer of turns is asked when a turn is over, while the episode goes on; its values become the reward's
    turn_values, in place of the environment's. All turns of an episode are scored by one version: where it changed
    meanwhile, the turns that the older one scored are scored again, once; then the reward is an "error".
    scorer_version names every scorer's, joined by "+": NAME of those that have none.

Must not: block the event loop, or wait without a deadline.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rl_jax.rewards.check import ENV_SCORER, checked, failed, from_steps, with_roles
from rl_jax.rollout.adaptive import AdaptiveTimeout
from rl_jax.rollout.scorer_pool import Scorers
from rl_jax.settings import RewardSettings, RolloutSettings, TaskSource
from rl_jax.timeline import OFF, Track
from rl_jax.types import SHAPING, EpisodeView, Failure, Reward, Task

COMPOSITE = "composite"
TURNS = "turns"  # the part that is the sum of the turns' scores, without their weight


class TurnScores:
    """The scores of one episode's turns, asked for as they end. Of one loop."""

    def __init__(self, service: "RewardService", task: Task, name: str):
        self._service, self._task, self._name = service, task, name
        self._views: list[EpisodeView] = []  # what was known when each was over
        self._calls: list[asyncio.Task[Reward]] = []

    def ended(self, view: EpisodeView) -> None:
        """The last turn of `view` is over, and the environment has answered it; returns at once."""
        self._views.append(view)
        self._calls.append(asyncio.get_running_loop().create_task(self._ask(len(self._views) - 1)))

    def cancel(self) -> None:
        """The episode has no score: nothing of it is awaited any more."""
        for call in self._calls:
            call.cancel()

    async def collect(self) -> Reward:
        """turn_values of all turns, by one version; value: their sum."""
        rewards = list(await asyncio.gather(*self._calls))
        version = rewards[-1].scorer_version if rewards else self._name
        for turn, reward in enumerate(rewards):
            if reward.status == "scored" and reward.scorer_version != version:
                self._service.num_rescored += 1
                rewards[turn] = await self._ask(turn)
        for turn, reward in enumerate(rewards):
            if reward.status != "scored":
                return replace(reward, detail=f"turn {turn}: {reward.detail}")
            if reward.scorer_version != version:
                said = f"turn {turn} was scored by {reward.scorer_version}, others by {version}, and again so"
                return failed("error", said, version)
        values = tuple(reward.value for reward in rewards)
        return Reward(math.fsum(filter(None, values)), {}, values, "scored", version)

    async def _ask(self, turn: int) -> Reward:
        return await self._service.ask(self._name, self._task, self._views[turn], turn)


class RewardService:
    """`scorers.score(name, task, view)` runs a scorer where it can be killed, within rewards.timeout_s of its own."""

    def __init__(
        self,
        scorers: Scorers,
        settings: RewardSettings,
        patience_s: float = RolloutSettings.episode_timeout_s,
        sources: Iterable[TaskSource] = (),
    ):
        """patience_s: for the whole scoring of an episode, the wait for a scorer that is free with it."""
        self._scorers, self._settings, self._patience_s = scorers, settings, patience_s
        self._sources = {source.tag: source for source in sources}
        self._adaptive = AdaptiveTimeout(settings.timeout_s) if settings.adaptive_timeout else None
        self.track: Track = OFF
        self.num_rescored = 0  # turns, as their scorer's version changed during the episode

    def turns_of(self, task: Task) -> TurnScores | None:
        """Of an episode that begins; None where its turns have no scorer."""
        source = self._sources.get(task.tag)
        if source is None or not source.turn_reward:
            return None
        return TurnScores(self, task, source.turn_reward)

    async def score(
        self,
        task: Task,
        view: EpisodeView,
        turns: TurnScores | None = None,
        with_shaping: bool = True,
    ) -> tuple[Reward, Failure | None]:
        """The reward of a closed episode; the Failure says why it has no value.

        with_shaping: False where nothing is trained, so that what is only added to training costs no calls.
        """
        source = self._sources.get(task.tag)
        shaping = dict(source.shaping) if source is not None and with_shaping else {}
        try:
            async with asyncio.timeout(self._patience_s):
                reward = await self._reward(task, view, turns, shaping)
        except TimeoutError:
            said = (
                f"no score within rollout.episode_timeout_s={self._patience_s:g}, the wait for one of"
                f" rewards.workers={self._settings.workers} with it; raise either"
            )
            reward = failed("timeout", said, task.reward)
        finally:
            if turns is not None:
                turns.cancel()
        if reward.status == "scored":
            return reward, None
        return reward, Failure("reward", reward.status, "infra", f"{task.reward}: {reward.detail}")

    async def ask(
        self, name: str, task: Task, view: EpisodeView, turn: int | None = None
    ) -> Reward:
        """One scorer's reward, checked. Raises nothing but what cancels it."""
        limit_s, key = None, f"{name}/{task.id}"
        if self._adaptive is not None:
            limit_s = self._adaptive.limit_s(key)
        start_s = time.monotonic()
        answer = await self._scorers.score(name, task, view, turn=turn, limit_s=limit_s)
        self.track.add(name, start_s, time.monotonic(), of=task.id, own_s=round(answer.seconds, 6))
        reward = checked(answer.reward)
        if self._adaptive is not None:
            self._adaptive.saw(key, reward.value, answer.seconds)
        return reward

    async def _reward(
        self,
        task: Task,
        view: EpisodeView,
        turns: TurnScores | None,
        shaping: Mapping[str, float],
    ) -> Reward:
        """All that an episode's source asks for, at once."""
        source = self._sources.get(task.tag)
        env = with_roles(from_steps(view.step_rewards), view.info)
        weights = {task.reward: 1.0}
        if task.reward == COMPOSITE and source is not None:
            weights = dict(source.parts)
        names = sorted((weights.keys() | shaping.keys()) - {ENV_SCORER})
        calls = [self.ask(name, task, view) for name in names]
        if turns is not None:
            calls.append(turns.collect())
        said = await asyncio.gather(*calls)
        process = said.pop() if turns is not None else None
        rewards = dict(zip(names, said, strict=True))
        if ENV_SCORER in weights.keys() | shaping.keys():
            rewards[ENV_SCORER] = env
        for name, reward in rewards.items():
            if reward.status != "scored":
                return reward if len(rewards) == 1 else named(reward, name)
        if process is not None and process.status != "scored":
            return replace(process, detail=f"a turn's score: {process.detail}")
        if weights == {ENV_SCORER: 1.0} and not shaping and process is None:
            return env
        reward = _joined(task.reward, weights, rewards)
        if env.value is not None:
            reward = replace(reward, parts={**reward.parts, ENV_SCORER: env.value})
        return _shaped(reward, shaping, rewards, process, source)


def value_of(reward: Reward) -> float:
    """Of a reward that is scored."""
    assert reward.value is not None, f"status {reward.status}"
    return reward.value


def named(reward: Reward, name: str) -> Reward:
    return replace(reward, detail=f"part {name}: {reward.detail}")


def _joined(kind: str, weights: Mapping[str, float], rewards: Mapping[str, Reward]) -> Reward:
    """The weighted sum of rewards that are all scored; its parts are the scorers' own and, above them, their values."""
    parts: dict[str, float] = {}
    for name in weights:
        parts |= rewards[name].parts
    parts |= {name: value_of(rewards[name]) for name in weights}
    if kind != COMPOSITE:
        (only,) = (rewards[name] for name in weights)
        return replace(only, parts=parts)
    value = math.fsum(weight * parts[name] for name, weight in weights.items())
    version = "+".join(rewards[name].scorer_version or name for name in weights)
    return Reward(value, parts, (), "scored", version)


def _shaped(
    reward: Reward,
    shaping: Mapping[str, float],
    rewards: Mapping[str, Reward],
    process: Reward | None,
    source: TaskSource | None,
) -> Reward:
    """The reward with the part SHAPING, where there is any, and the turns' values by their weight."""
    if not shaping and process is None:
        return reward
    parts, turn_values = dict(reward.parts), reward.turn_values
    parts |= {name: value_of(rewards[name]) for name in shaping}
    total = math.fsum(weight * parts[name] for name, weight in shaping.items())
    versions = [reward.scorer_version, *(rewards[name].scorer_version or name for name in shaping)]
    if process is not None and source is not None:
        weight = source.turn_weight
        turn_values = tuple(None if v is None else weight * v for v in process.turn_values)
        parts[TURNS] = value_of(process)
        total += math.fsum(filter(None, turn_values))
        versions.append(process.scorer_version)
    parts[SHAPING] = total
    return replace(reward, parts=parts, turn_values=turn_values, scorer_version="+".join(versions))
