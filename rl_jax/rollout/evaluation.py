"""Plays a fixed set of tasks with one pinned version and reports how many succeed.

Owns: the evaluation's episodes from ISSUED to EVALUATED. Invariants: the same tasks and seeds every time (epoch -1, so
no training episode has them); nothing of it ever reaches the buffer, the scheduler or a curriculum; success is a reward
of exactly 1.0; an episode that failed for good is an error, reported and left out of the mean, never a zero.
It shares the servers' slots with training episodes that are in flight, and goes first. The driver evaluates between two
steps, so no version is published meanwhile; num_mixed counts trajectories in which another version shows up anyway.
uid = run/eval-name-version/i/0. Must not: run off the rollout's loop.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rl_jax.clock import now_s
from rl_jax.ledger import EpisodeRef
from rl_jax.rollout.buffer import ref_of
from rl_jax.rollout.episode import EpisodeRules
from rl_jax.rollout.player import Player, failure_reason
from rl_jax.rollout.slots import Slots
from rl_jax.settings import EvalSettings
from rl_jax.types import Failure, Outcome, Task, Trajectory

LOG = logging.getLogger(__name__)
EVAL_EPOCH = -1


class EvaluationFailed(RuntimeError):
    """Not one episode of an evaluation got a score."""


class EvaluationUnplayable(EvaluationFailed):
    """The same, because of the environment, its scorer or the prompts: no server is to blame."""


@dataclass(frozen=True)
class EvalResult:
    """What one evaluation found."""

    name: str
    version: int  # the pinned one
    trajectories: tuple[Trajectory, ...]  # scored, in the order of the tasks
    num_errors: int  # tasks without a score after max_attempts, or not done in time
    num_mixed: int  # trajectories with a token of another version
    seconds: float

    @property
    def num_episodes(self) -> int:
        """Scored ones."""
        return len(self.trajectories)

    @property
    def success(self) -> float:
        """Share of the scored episodes whose reward is 1.0."""
        return _success(self.trajectories)

    @property
    def mean_reward(self) -> float:
        values = [t.reward.value for t in self.trajectories if t.reward.value is not None]
        return sum(values) / len(values)

    def by_tag(self) -> dict[str, tuple[float, int]]:
        """tag -> (success, scored episodes)."""
        tags = dict.fromkeys(t.tag for t in self.trajectories)
        groups = {tag: [t for t in self.trajectories if t.tag == tag] for tag in tags}
        return {tag: (_success(ts), len(ts)) for tag, ts in groups.items()}


@dataclass
class Evaluation:
    """One evaluation under way. `beat` is told of every episode that ended."""

    player: Player
    slots: Slots
    rules: EpisodeRules  # of training; the evaluation's own sampling replaces that of it
    run_id: str
    max_attempts: int
    beat: Callable[[], None] = lambda: None

    def __post_init__(self):
        self.num_open = 0  # attempts without a terminal record: its part of the ledger's in_flight
        self.num_left = 0
        self.last_failure: Failure | None = None

    async def run(
        self, name: str, tasks: Sequence[Task], sampling: EvalSettings, version: int
    ) -> EvalResult:
        """Raises EvaluationFailed if no task at all got a score within sampling.timeout_s, ValueError without tasks."""
        if not tasks:
            raise ValueError(f"evaluation {name} has no tasks")
        start_s = now_s()
        rules = replace(
            self.rules,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        group = f"{self.run_id}/eval-{name}-{version}"
        self.num_left = len(tasks)
        runners = [
            asyncio.create_task(self._play(f"{group}/{i}", i, task, rules), name=f"{group}/{i}")
            for i, task in enumerate(tasks)
        ]
        try:
            await asyncio.wait(runners, timeout=sampling.timeout_s)
        finally:
            for runner in runners:
                runner.cancel()
            results = await asyncio.gather(*runners, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        scored = tuple(r for r in results if isinstance(r, Trajectory))
        num_late = sum(isinstance(r, asyncio.CancelledError) for r in results)
        if 0 < len(scored) < len(tasks):  # without any, _failed tells
            LOG.warning(
                "evaluation %s of version %d: %d of %d episodes have no score (%d not done within"
                " eval.timeout_s=%g)",
                name,
                version,
                len(tasks) - len(scored),
                len(tasks),
                num_late,
                sampling.timeout_s,
            )
        if not scored:
            raise self._failed(name, len(tasks), num_late, sampling.timeout_s)
        mixed = sum(bool((t.versions[t.loss_mask] != version).any()) for t in scored)
        seconds = now_s() - start_s
        return EvalResult(name, version, scored, len(tasks) - len(scored), mixed, seconds)

    def _failed(self, name: str, num: int, num_late: int, timeout_s: float) -> EvaluationFailed:
        last = self.last_failure
        why = [f"{num_late} were not done within eval.timeout_s={timeout_s:g}"] * (num_late > 0)
        if num > num_late:
            why.append(f"{num - num_late} failed in each of {self.max_attempts} attempts")
        text = f"evaluation {name}: none of {num} episodes got a score: {', '.join(why)}"
        if last is None:
            return EvaluationFailed(f"{text}; see the ledger for reasons")
        kind = EvaluationFailed if last.boundary == "serve" else EvaluationUnplayable
        return kind(f"{text}; the last failure, {failure_reason(last)}: {last.detail}")

    async def _play(
        self, group: str, index: int, task: Task, rules: EpisodeRules
    ) -> Trajectory | None:
        """One task, tried again after a failure; None if it failed for good."""
        num_failed = 0
        try:
            while num_failed < self.max_attempts:
                trajectory = await self._attempt(group, index, task, rules)
                if trajectory.outcome is not Outcome.FAILED:
                    self.player.ledger.write(ref_of(trajectory), "EVALUATED")
                    return trajectory
                if trajectory.failure is None or trajectory.failure.kind != "env_lost":
                    num_failed += 1  # else another's failure cost its worker
                    self.last_failure = trajectory.failure
            return None
        finally:
            self.num_left -= 1
            self.beat()

    async def _attempt(self, group: str, index: int, task: Task, rules: EpisodeRules) -> Trajectory:
        slot = await self.slots.acquire(task.tag)
        episode = None
        try:
            uid = f"{group}/0"
            attempt = self.player.ledger.next_attempt(uid)
            ref = EpisodeRef(uid, attempt, group, EVAL_EPOCH, index, 0, task.tag)
            episode = self.player.issue(ref, task, rules, slot)
            self.num_open += 1
            await self.player.play_turns(episode)
            slot = self._release(slot, task.tag)
            return await self.player.score(episode)
        except asyncio.CancelledError:
            if episode is not None:
                self.player.cancel(episode, "eval_end")
            raise
        finally:
            self._release(slot, task.tag)
            if episode is not None:
                self.num_open -= 1

    def _release(self, slot: str | None, tag: str) -> None:
        if slot is not None:
            self.slots.release(slot, tag)


def _success(trajectories: Sequence[Trajectory]) -> float:
    return sum(t.reward.value == 1.0 for t in trajectories) / len(trajectories)
