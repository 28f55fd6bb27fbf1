"""A rollout on a virtual clock: rollout's own dispatcher, player, slots, buffer and policy, and a driver's order.

It is rollout.Rollout without its thread: what that posts to its loop is called here, on the loop of the simulation.
Life of a step, as in driver.py: want -> take (by looking, since nothing may block) -> train -> consumed
-> published. A version that is published is not committed to servers unless `commit` is given.
Invariants: the ledger's law holds at the end of every step, as in a run; an error of a callback ends the next take.
Must not: decide anything.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_jax.ledger import Ledger
from rl_jax.rollout.buffer import SampleBuffer
from rl_jax.rollout.dispatcher import Dispatcher
from rl_jax.rollout.episode import EpisodeRules, EpisodeTools
from rl_jax.rollout.player import Player
from rl_jax.rollout.reward_service import RewardService
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.rollout.slots import Slots
from rl_jax.settings import RewardSettings, RolloutSettings
from rl_jax.simulate.workload import (
    LengthRenderer,
    ScriptedLengths,
    ScriptedPool,
    TaskShape,
    stream_of,
)
from rl_jax.types import Group, Sampler, SchedulerPolicy, Tick

RUN_ID = "simulated"
TICK_S = 1.0  # as rollout.Rollout
LOOK_S = 0.2  # how late a take may be
NUM_TASKS = 2_000  # of each tag: none comes twice
DEADLINE_S = 1e6  # of a turn and an episode: a simulation asks how long things take
Train = Callable[[Sequence[Group]], Awaitable[Any]]  # a batch; over when it is trained


def sleeping(seconds: float) -> Train:
    """Of a learner that takes so long for every batch."""
    return lambda groups: asyncio.sleep(seconds)


class SimulatedRollout:
    """Made and used on the loop of a simulation (clock.run), or on a real one. `directory`: for the ledger."""

    def __init__(
        self,
        sampler: Sampler,
        shapes: Sequence[TaskShape],
        settings: RolloutSettings,
        directory: Path,
        *,
        context: int,
        seed: int = 0,
        policy: SchedulerPolicy | None = None,
    ):
        """sampler: the servers' router. context: tokens of one history. policy: TrajectoryScheduler unless given."""
        loop, tags = asyncio.get_running_loop(), tuple(shape.tag for shape in shapes)
        settings = replace(settings, episode_timeout_s=DEADLINE_S)
        self.settings, self.counts = settings, Counter()
        self.look_s = LOOK_S
        self.live_at_take: list[int] = []  # episodes with a slot when a batch was taken
        self._error: BaseException | None = None
        self.ledger = Ledger(directory / "ledger.jsonl", RUN_ID)
        self.buffer = SampleBuffer(settings, self.ledger, tags, clock=loop.time)
        scripted = ScriptedLengths(sampler, shapes, seed)
        pool, renderer = ScriptedPool(shapes, seed), LengthRenderer()
        tools = EpisodeTools(scripted, pool.open, lambda env: None, renderer, self._count)
        rewards = RewardService(pool, RewardSettings())
        player = Player(tools, rewards, self.ledger, seed, settings.max_env_failures, self._fail)
        workers = settings.env_workers * settings.envs_per_worker
        self.dispatcher = Dispatcher(
            player,
            stream_of(shapes, NUM_TASKS, seed),
            self.buffer,
            policy or TrajectoryScheduler(),
            Slots(scripted.capacity, scripted.places, tags, workers),
            settings,
            EpisodeRules.of(settings, context, DEADLINE_S),
            RUN_ID,
            tags,
            self._fail,
        )
        self._ticker = loop.create_task(self._tick())

    async def steps(
        self,
        num_steps: int,
        train: Train = sleeping(0.0),
        commit: Callable[[int], None] = lambda version: None,
    ) -> list[tuple[float, list[Group]]]:
        """Run so many steps from the first. Returns: of each, how long after the begin its batch was
        taken, and the batch.
        """
        taken, begin_s = [], asyncio.get_running_loop().time()
        self.dispatcher.published(0)
        for step in range(1, num_steps + 1):
            at_s, groups = await self.step(step, num_steps, train, commit)
            taken.append((at_s - begin_s, groups))
        return taken

    async def step(
        self,
        step: int,
        last_step: int | None,
        train: Train,
        commit: Callable[[int], None] = lambda version: None,
    ) -> tuple[float, list[Group]]:
        """Version step - 1 -> step; version 0 is told before. last_step: None = no end is known.

        Returns: when its batch was taken, and the batch.
        """
        self.dispatcher.want(step, self.settings.batch_groups, last_step)
        groups = await self._take(step)
        at_s = asyncio.get_running_loop().time()
        self.live_at_take.append(self.dispatcher.slots.num_live)
        await train(groups)
        self.buffer.consumed(step, groups)
        commit(step)
        self.dispatcher.published(step)
        num_open = self.dispatcher.num_open_episodes() + self.buffer.num_open_episodes()
        self.ledger.check(num_open)
        return at_s, groups

    def set_bound(self, bound: int) -> None:
        """As rollout.Rollout's."""
        self.buffer.set_bound(bound)
        self.dispatcher.set_bound(bound)

    async def close(self) -> None:
        """What still runs is cancelled, with a record."""
        self._ticker.cancel()
        runners = self.dispatcher.stop("run_end")
        await asyncio.gather(*runners, return_exceptions=True)
        self.buffer.clear("run_end")
        self.ledger.close()

    async def _take(self, step: int) -> list[Group]:
        share = self.buffer.share
        while True:
            if self._error is not None:
                raise self._error
            taken = Counter(self.buffer.held())
            if all(taken[tag] >= share for tag in self.buffer.tags):
                return self.buffer.take(step, timeout_s=0.0)
            await asyncio.sleep(self.look_s)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.dispatcher.handle(Tick())

    def _count(self, name: str) -> None:
        self.counts[name] += 1

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self.dispatcher.halt()
