"""An EnvPool without processes and a task stream without grain: rollouts in one process, for tests.

Environments run in the loop's own thread, so they must be quick; `latency` says how long a call seems to take, `fail`
which calls raise. Interfaces as rollout/worker.py and rollout/tasks.py. Must not: hide an error of an environment.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_jax.rollout.scorer_pool import Answer
from rl_jax.rollout.worker import EnvError
from rl_jax.types import Action, EpisodeView, Message, StepResult, Task
from rl_jax.waits import Wait


@dataclass
class FakePool:
    """`envs`: task.env -> Environment class; `scorers`: task.reward -> a function of (task, view) -> Reward,
    and of (task, view, turn) where it scores turns."""

    envs: Mapping[str, type]
    scorers: Mapping[str, Callable[[Task, EpisodeView], Any]] = field(default_factory=dict)
    latency: Callable[[str, str], float] = lambda verb, uid: 0.0  # seconds
    fail: Callable[[str, str], EnvError | None] = lambda verb, uid: None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    limits: Mapping[str, int] = field(default_factory=dict)  # by tag, as tasks.sources[..].max_live
    start_limit_s: float = 60.0
    # What happened, for assertions:
    counts: Counter[str] = field(default_factory=Counter)
    num_opened: int = 0
    num_closed: int = 0
    peak_live: int = 0
    is_started: bool = False

    @property
    def num_live(self) -> int:
        return self.num_opened - self.num_closed

    async def start(self) -> None:
        self.is_started = True

    async def close(self) -> None:
        self.is_started = False

    def waits(self) -> list[Wait]:
        return []

    async def open(self, task: Task, uid: str, seed: int) -> "FakeHandle":
        await self.call("open", uid)
        self.num_opened += 1
        self.peak_live = max(self.peak_live, self.num_live)
        return FakeHandle(self, self.envs[task.env](), task, uid, seed)

    async def score(
        self, name: str, task: Task, view: EpisodeView, *, turn: int | None = None, **asked: Any
    ) -> Answer:
        await self.call("score", task.id)
        of_turn = () if turn is None else (turn,)
        return Answer(self.scorers[name](task, view, *of_turn), 0.0)

    async def call(self, verb: str, uid: str) -> None:
        await self.sleep(self.latency(verb, uid))
        error = self.fail(verb, uid)
        if error is not None:
            self.counts[error.kind] += 1
            raise error


@dataclass
class FakeHandle:
    pool: FakePool
    env: Any
    task: Task
    uid: str
    seed: int

    def __post_init__(self):
        self._script: random.Random | None = None

    async def reset(self) -> StepResult:
        await self.pool.call("reset", self.uid)
        return self.env.reset(self.task, self.seed)

    async def step(self, action: Action) -> StepResult:
        await self.pool.call("step", self.uid)
        return self.env.step(action)

    async def script(self, seed: int, skill: float) -> Message:
        await self.pool.call("script", self.uid)
        self._script = self._script or random.Random(seed)
        said = self.env.script(self._script, skill)
        return Message("assistant", said) if isinstance(said, str) else said

    async def close(self) -> None:
        self.pool.num_closed += 1
        self.env.close()


@dataclass(frozen=True)
class FakeIssuedTask:
    task: Task
    epoch: int
    index: int


class FakeStream:
    """The tasks of each tag in order, again and again; index counts over all tags within an epoch of each."""

    curriculum = None

    def __init__(self, tasks: Mapping[str, Sequence[Task]]):
        self._tasks = {tag: list(of_tag) for tag, of_tag in tasks.items()}
        self._offsets: dict[str, int] = {}
        for tag in tasks:
            self._offsets[tag] = sum(len(self._tasks[other]) for other in self._offsets)
        self._next = dict.fromkeys(tasks, 0)
        self.issued: list[FakeIssuedTask] = []

    def next(self, tag: str) -> FakeIssuedTask:
        epoch, i = divmod(self._next[tag], len(self._tasks[tag]))
        self._next[tag] += 1
        self.issued.append(FakeIssuedTask(self._tasks[tag][i], epoch, self._offsets[tag] + i))
        return self.issued[-1]
