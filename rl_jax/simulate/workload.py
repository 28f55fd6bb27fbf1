"""What is played in a simulation: episodes of drawn lengths and waits, through the same protocols as real ones.

A TaskShape says how many turns an episode of a tag has, how many tokens prompts, answers and observations, and how long
its environment takes. ScriptedPool opens such environments, LengthRenderer turns "NUM SEED" into that many tokens, and
ScriptedLengths stands before the router and asks for answers of the drawn length.
Invariants: what is drawn depends on the seed, the episode's uid and the turn only, not on who serves it or when, so two
runs of one seed play the same episodes; an episode that reaches a limit of
the rollout's settings is cut as a real one.
Must not: depend on a policy's decisions beyond the turns that it was asked for.
"""

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from rl_jax.rollout.tasks import TaskStream
from rl_jax.simulate.cost_engine import VOCAB_SIZE
from rl_jax.types import (
    Action,
    FinishReason,
    Message,
    Sampler,
    StepResult,
    Task,
    Turn,
    TurnRequest,
)

Draw = Callable[[np.random.Generator], float]


@dataclass(frozen=True)
class Constant:
    value: float

    def __call__(self, rng: np.random.Generator) -> float:
        return self.value


@dataclass(frozen=True)
class Uniform:
    """Whole numbers, both ends included."""

    least: int
    most: int

    def __call__(self, rng: np.random.Generator) -> float:
        return int(rng.integers(self.least, self.most + 1))


@dataclass(frozen=True)
class Lognormal:
    median: float
    sigma: float  # of the logarithm

    def __call__(self, rng: np.random.Generator) -> float:
        return float(self.median * np.exp(self.sigma * rng.standard_normal()))


@dataclass(frozen=True)
class Gaussian:
    """At least 0: what is drawn below counts as 0."""

    mean: float
    sigma: float

    def __call__(self, rng: np.random.Generator) -> float:
        return max(0.0, self.mean + self.sigma * float(rng.standard_normal()))


@dataclass(frozen=True)
class TaskShape:
    """Lengths are in tokens, and at least 1. A step of an episode's environment takes step_s * group_pace * pace."""

    tag: str
    turns: Draw
    prompt: Draw
    answer: Draw
    observation: Draw = Constant(1)
    reset_s: Draw = Constant(0.0)
    step_s: Draw = Constant(0.0)
    pace: Draw = Constant(1.0)  # of each episode, once
    group_pace: Draw = Constant(1.0)  # of each group, once
    reward: Draw = Constant(0.0)  # at the end of an episode
    # False: no turn's context begins as the one before did, so servers find nothing of it again (a chat template that
    # rewrites what was said, or servers without a prefix cache)
    keeps_history: bool = True
    shares_prompt: bool = True  # the members of a group, which is what GRPO does


def rng_of(*key: Any) -> np.random.Generator:
    """The same for the same key, in any process."""
    return np.random.default_rng(zlib.crc32("/".join(map(str, key)).encode()))


def stream_of(shapes: Sequence[TaskShape], num_tasks: int, seed: int) -> TaskStream:
    """num_tasks of each tag, again and again."""
    tasks = {
        shape.tag: [
            Task(f"{shape.tag}/{i}", "scripted", shape.tag, (), {}, "env", max_turns=2**30)
            for i in range(num_tasks)
        ]
        for shape in shapes
    }
    return TaskStream(tasks, seed)


class ScriptedPool:
    """rollout's environments, without processes."""

    def __init__(self, shapes: Sequence[TaskShape], seed: int):
        self._shapes, self._seed = {shape.tag: shape for shape in shapes}, seed

    async def open(self, task: Task, uid: str, seed: int) -> "ScriptedEnv":
        shape = self._shapes[task.tag]
        pace = shape.pace(rng_of(self._seed, "pace", uid))
        pace *= shape.group_pace(rng_of(self._seed, "group pace", uid.rpartition("/")[0]))
        return ScriptedEnv(shape, rng_of(self._seed, "env", uid), seed, pace)


class ScriptedEnv:
    def __init__(
        self, shape: TaskShape, rng: np.random.Generator, group_seed: int, pace: float = 1.0
    ):
        self._shape, self._rng, self._group_seed, self._pace = shape, rng, group_seed, pace
        self._left = max(1, int(shape.turns(rng)))

    async def reset(self) -> StepResult:
        await asyncio.sleep(self._shape.reset_s(self._rng))
        rng = rng_of("prompt", self._group_seed) if self._shape.shares_prompt else self._rng
        return StepResult((self._says(self._shape.prompt(rng), rng),))

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(self._pace * self._shape.step_s(self._rng))
        self._left -= 1
        said = self._says(self._shape.observation(self._rng), self._rng)
        reward = self._shape.reward(self._rng) if self._left == 0 else 0.0
        return StepResult((said,), reward=reward, done=self._left == 0)

    async def close(self) -> None:
        pass

    @staticmethod
    def _says(num_tokens: float, rng: np.random.Generator) -> Message:
        return Message("user", f"{max(1, int(num_tokens))} {rng.integers(2**32)}")


class LengthRenderer:
    """tokens.Renderer as far as episodes use it: messages of ScriptedEnv -> so many tokens."""

    tokenizer = SimpleNamespace(vocab_size=VOCAB_SIZE)
    template_sha256 = ""
    stop_token_ids = ()

    def first(self, messages: Sequence[Message], tools: Any = ()) -> np.ndarray:
        return np.concatenate([self._tokens(message) for message in messages])

    def next(self, messages: Sequence[Message], *, closed: bool, calls: Any = ()) -> np.ndarray:
        return self.first(messages)

    def text(self, tokens: np.ndarray) -> str:
        return ""

    def is_closed(self, tokens: np.ndarray) -> bool:
        return True

    def parse(self, tokens: np.ndarray, tools: Any = ()) -> Action:
        return Action("")

    @staticmethod
    def _tokens(message: Message) -> np.ndarray:
        num, seed = map(int, message.content.split())
        return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num, np.int32)


class ScriptedLengths:
    """A Sampler before another one: answers are as long as drawn, or as the request allows."""

    def __init__(self, sampler: Sampler, shapes: Sequence[TaskShape], seed: int):
        self._sampler, self._seed = sampler, seed
        self._shapes = {shape.tag: shape for shape in shapes}

    async def generate(self, request: TurnRequest) -> Turn:
        rng, shape = (
            rng_of(self._seed, "answer", request.uid, request.turn),
            self._shapes[request.tag],
        )
        drawn = max(1, int(shape.answer(rng))) - request.token_index
        num, tokens = max(1, min(drawn, request.max_new_tokens)), request.tokens
        if not shape.keeps_history:
            tokens = tokens.copy()
            tokens[0] = request.turn
        turn = await self._sampler.generate(replace(request, tokens=tokens, max_new_tokens=num))
        if turn.finish is FinishReason.LENGTH and num == drawn:
            turn = replace(turn, finish=FinishReason.EOS)
        return turn

    def abort(self, uid: str, reason: str) -> None:
        self._sampler.abort(uid, reason)

    def release(self, session: str) -> None:
        self._sampler.release(session)

    def version(self) -> int:
        return self._sampler.version()

    def capacity(self) -> Mapping[str, int]:
        return self._sampler.capacity()

    def places(self, tag: str) -> tuple[str, ...]:
        return self._sampler.places(tag)
