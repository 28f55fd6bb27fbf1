"""Environments that make one wait: what trajectory-level rollout and redundant episodes bring, as RollArt asks it.

A turn costs its environment's latency and a fixed time of generation, however many run: servers are no part of the
question. Played are rollout's own dispatcher, policies, slots and buffer.
The workloads are RollArt's (arXiv:2512.22560) where it gives them: a latency a turn of Gaussian(10 s, sigma), and 32
groups of 8 needed of 32, 34 or 36 groups of 8, 10 or 12. It does not give the latency of the latter; PACED's, lognormal
with standard deviations of 0.30 between groups and 0.15 within, is an assumption that reproduces its figures roughly.
Must not: be adjusted to a result.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_jax.metrics import Metric
from rl_jax.rollout.scheduler.batch import BatchScheduler
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.settings import RolloutSettings
from rl_jax.simulate import clock
from rl_jax.simulate.rollout import LOOK_S, SimulatedRollout, Train, sleeping
from rl_jax.simulate.workload import Constant, Gaussian, Lognormal, TaskShape, Uniform
from rl_jax.types import FinishReason, Turn, TurnRequest, VersionSpan

TURN_S = 3.0  # of generation
TURN_TOKENS = 16
CONTEXT = 8192
POLICIES = {"trajectory": TrajectoryScheduler, "batch": BatchScheduler}
# 128 trajectories. Batched: all begin together, and turn k + 1 of any when all have ended turn k.
TRAJECTORIES = RolloutSettings(
    batch_groups=16, group_size=8, max_staleness=0, max_new_tokens=1024, envs_per_worker=4096
)
BATCHED = {"scheduler": "batch", "env_stepping": "batch"}
# Four turns of 25 s and nothing else, so that an episode's time is lognormal as a whole.
PACED = TaskShape(
    "paced", Constant(4), Constant(8), Constant(TURN_TOKENS), step_s=Constant(25.0),
    pace=Lognormal(1.0, 0.15), group_pace=Lognormal(1.0, 0.30), reward=Uniform(0, 1),
)  # fmt: skip
NEEDED = RolloutSettings(
    batch_groups=32, group_size=8, max_staleness=0, max_new_tokens=1024, envs_per_worker=4096
)


def turns_of(sigma: float) -> TaskShape:
    """10 to 30 turns, each followed by a latency of Gaussian(10 s, sigma)."""
    latency = Gaussian(10.0, sigma)
    return TaskShape("turns", Uniform(10, 30), Constant(8), Constant(TURN_TOKENS), step_s=latency)


@dataclass
class TimedSampler:
    """A types.Sampler whose every turn takes turn_s, and gives as many tokens as it is asked for."""

    turn_s: float
    slots: int = 4096
    current: int = 0  # the version that samples
    _seen: dict[str, int] = field(default_factory=dict)  # session -> tokens of its context

    async def generate(self, request: TurnRequest) -> Turn:
        await asyncio.sleep(self.turn_s)
        num, known = request.max_new_tokens, self._seen.get(request.session, 0)
        self._seen[request.session] = len(request.tokens) + num
        return Turn(
            prompt_tokens=request.tokens[known:],
            tokens=np.zeros(num, np.int32),
            logprobs=np.full(num, -1.0, np.float32),
            sampled_logprobs=None,
            spans=(VersionSpan(0, num, self.current),),
            context_mixed=np.zeros(num, bool),
            finish=FinishReason.LENGTH,
            cached_prompt=known,
            server="timed",
            pool="",
            times_s={},
        )

    def abort(self, uid: str, reason: str) -> None:
        pass  # a turn that is not awaited any more is over

    def release(self, session: str) -> None:
        self._seen.pop(session, None)

    def version(self) -> int:
        return self.current

    def capacity(self) -> Mapping[str, int]:
        return {"": self.slots}

    def places(self, tag: str) -> tuple[str, ...]:
        return ("",)

    def commit(self, version: int) -> None:
        self.current = version


@dataclass(frozen=True)
class Played:
    """What num_steps batches took. sizes: of their groups; live: episodes that ran when the last batch was taken."""

    step_s: tuple[float, ...]  # from one batch taken to the next, training between them included
    sizes: Counter[int]
    live: int
    ledger: Counter[str]  # episodes by state
    redundant: dict[str, Metric]


async def played(
    sampler: Any,
    shape: TaskShape,
    settings: RolloutSettings,
    *,
    num_steps: int,
    seed: int,
    train: Train = sleeping(0.0),
    look_s: float = LOOK_S,
) -> Played:
    """num_steps batches under settings.scheduler on the running loop, whose time may be real. sampler: a types.Sampler
    with commit(version)."""
    with tempfile.TemporaryDirectory() as folder:
        rollout = SimulatedRollout(
            sampler,
            (shape,),
            settings,
            Path(folder),
            context=CONTEXT,
            seed=seed,
            policy=POLICIES[settings.scheduler](),
        )
        rollout.look_s = look_s
        taken = await rollout.steps(num_steps, train, commit=sampler.commit)
        await rollout.close()
    at_s = [0.0, *(seconds for seconds, _ in taken)]
    redundancy = rollout.dispatcher.redundancy
    return Played(
        tuple(b - a for a, b in zip(at_s, at_s[1:])),
        Counter(len(group.trajectories) for _, groups in taken for group in groups),
        rollout.live_at_take[-1],
        Counter(rollout.ledger.counts()),
        {} if redundancy is None else redundancy.metrics(),
    )


def play(
    shape: TaskShape,
    settings: RolloutSettings,
    *,
    num_steps: int = 1,
    seed: int = 0,
    turn_s: float = TURN_S,
    train_s: float = 0.0,
) -> Played:
    """played() on a virtual clock of its own; turn_s: of generation."""
    sampler = TimedSampler(turn_s)
    return clock.run(
        played(sampler, shape, settings, num_steps=num_steps, seed=seed, train=sleeping(train_s))
    )
