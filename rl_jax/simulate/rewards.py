"""Scorers on the virtual clock, some of whose calls hang: what the adaptive timeout saves, and what it cuts.

The rollout's own RewardService scores groups, batch after batch, at scorers that take the time that a workload has
drawn: a task has its own pace, its answers spread round it, and a share of all calls would never end. Nothing is drawn
while it runs, so every timeout meets the same calls.
Must not: know a score that the workload does not say.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rl_jax.clock import now_s
from rl_jax.rewards.check import failed
from rl_jax.rollout.reward_service import RewardService
from rl_jax.rollout.scorer_pool import Answer
from rl_jax.settings import RewardSettings
from rl_jax.simulate import clock
from rl_jax.types import EpisodeView, Reward, Task


@dataclass(frozen=True)
class Workload:
    tasks: int = 64
    members: int = 8  # answers of a task at each visit
    visits: int = 3  # of each task
    batch: int = 16  # groups that are scored together; the next batch begins when all are
    workers: int = 16
    hangs: float = 0.05  # share of the calls
    right: float = 0.5  # share of the others' answers with value 1
    pace_s: float = 0.4  # median of the tasks'
    pace_sigma: float = 1.0  # of their logarithm
    spread: float = 0.2  # an answer takes its task's pace times 1 - spread to 1 + spread
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """wall_s: all batches. calls, hung, right: of the workload. cut: right answers that were not scored."""

    wall_s: float
    calls: int
    hung: int
    right: int
    cut: int


class SimulatedScorers:
    """Scorers of scorer_pool; payload says {"seconds": None for ever, "value"}."""

    def __init__(self, workers: int, timeout_s: float):
        """timeout_s: of a call that has no limit of its own."""
        self.counts: Counter[str] = Counter()
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(workers)

    async def score(
        self,
        name: str,
        task: Task,
        view: EpisodeView,
        *,
        turn: int | None = None,
        limit_s: float | None = None,
    ) -> Answer:
        limit_s = self._timeout_s if limit_s is None else limit_s
        seconds, value = task.payload["seconds"], task.payload["value"]
        async with self._free:
            if seconds is None or seconds > limit_s:
                await asyncio.sleep(limit_s)
                return Answer(failed("timeout", f"{limit_s:g} s", name), limit_s)
            await asyncio.sleep(seconds)
            return Answer(Reward(value, {}, (), "scored", "simulated/1"), seconds)


def draw(w: Workload) -> list[list[Task]]:
    """Batches of calls; the members of a group lie side by side."""
    rng = random.Random(w.seed)
    paces = [w.pace_s * rng.lognormvariate(0.0, w.pace_sigma) for _ in range(w.tasks)]

    def call(i: int) -> Task:
        payload: dict[str, Any] = {"seconds": None, "value": 0.0}
        if rng.random() >= w.hangs:
            factor = 1.0 + w.spread * rng.uniform(-1.0, 1.0)
            payload = {"seconds": paces[i] * factor, "value": float(rng.random() < w.right)}
        return Task(f"task-{i}", "e", "e", (), payload, "simulated", 1)

    order = [i for _ in range(w.visits) for i in rng.sample(range(w.tasks), w.tasks)]
    groups = [[call(i) for _ in range(w.members)] for i in order]
    return [sum(groups[i : i + w.batch], []) for i in range(0, len(groups), w.batch)]


def measure(w: Workload, cap_s: float, adaptive: bool) -> Outcome:
    """One way of timing out, over all of the workload."""
    batches = draw(w)
    calls = [call for batch in batches for call in batch]

    async def main() -> tuple[float, int]:
        settings = RewardSettings(timeout_s=cap_s, adaptive_timeout=adaptive)
        service = RewardService(SimulatedScorers(w.workers, cap_s), settings, patience_s=1e9)
        view, start_s, cut = EpisodeView((), (), {}, ()), now_s(), 0
        for batch in batches:
            rewards = await asyncio.gather(
                *(service.ask("simulated", task, view) for task in batch)
            )
            cut += sum(
                t.payload["value"] > 0 and r.status != "scored" for t, r in zip(batch, rewards)
            )
        return now_s() - start_s, cut

    wall_s, cut = clock.run(main())
    hung = sum(call.payload["seconds"] is None for call in calls)
    right = sum(call.payload["value"] > 0 for call in calls)
    return Outcome(wall_s, len(calls), hung, right, cut)
