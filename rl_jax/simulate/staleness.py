"""Three workloads under every fixed staleness bound and under staleness_policy=adaptive: the time to a sum of worth.

Source: turns and their kinds are RollArt's (arXiv:2512.22560): math under 5 turns, games 20 to 100, software 30 to 50
with environments that are slow now and then. It gives no lengths; prompts, observations, answers and waits are assumed.
An eighth of its profile's scale: 16 episodes a batch on 4 H800 that generate, and one that trains, which takes six
operations a weight and token at 0.41 of its peak (benchmarks/README.md, A step on two cards).
Worth of a batch: the effective sample size of its importance weights over its tokens, as is/ess measures it. Assumed:
weights of mean 1 whose mean square at a lag of l versions is exp(DRIFT * l**2), log-ratios that drift in one direction;
`walk` is the other extreme, exp(WALK * l). Both constants from the one published figure: in RollArt a bound of 2 took
1.14 to 1.22 times fewer seconds a step than 1 and 1.08 to 1.15 times more hours to a score, so 0.71 to 0.81 of the
worth a step; the middle, 0.76, is taken to be that of lag 2 over lag 1.
Must not: be adjusted to a result.
"""

import asyncio
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rl_jax.mesh import MeshPlan
from rl_jax.rollout.bound import Bound, Limits, Seen, fresher
from rl_jax.settings import (
    MeshSettings,
    PoolSettings,
    RolloutSettings,
    ServeSettings,
)
from rl_jax.simulate import clock
from rl_jax.simulate.costs import H800, QWEN3_8B
from rl_jax.simulate.rollout import DEADLINE_S, SimulatedRollout
from rl_jax.simulate.servers import Servers, engine_settings
from rl_jax.simulate.workload import Constant, Lognormal, TaskShape, Uniform
from rl_jax.types import Group

MATH = TaskShape(
    "math", Uniform(1, 5), Lognormal(300, 0.3), Lognormal(1500, 0.8), Lognormal(50, 0.3),
    step_s=Constant(0.1),
)  # fmt: skip
GAME = TaskShape(
    "game", Uniform(20, 100), Lognormal(1000, 0.3), Lognormal(30, 0.5), Lognormal(300, 0.3),
    step_s=Constant(0.05),
)  # fmt: skip
SOFTWARE = TaskShape(
    "software", Uniform(30, 50), Lognormal(2000, 0.3), Lognormal(200, 0.5), Lognormal(500, 0.8),
    reset_s=Lognormal(20, 1.0), step_s=Lognormal(5, 1.5),
)  # fmt: skip
WORKLOADS = (MATH, GAME, SOFTWARE)
CONTEXT = 65_536
NUM_SERVERS = 4
# The host's work goes by pages, and the costs hardly.
ENGINE = replace(engine_settings(CONTEXT), page_size=512)
MOST = 4  # rollout.max_staleness of the adaptive bound
BATCH = RolloutSettings(
    batch_groups=4, group_size=4, max_new_tokens=CONTEXT, envs_per_worker=4096, max_attempts=100
)
TRAIN_TOKEN_S = 6 * (QWEN3_8B.body_params + QWEN3_8B.head_params) / (0.41 * H800.flops_s)
DRIFT = math.log(1 / 0.76) / 3
WALK = math.log(1 / 0.76)
PLAN = MeshPlan.from_settings(
    MeshSettings(
        pools=(
            PoolSettings("decode", "decode", NUM_SERVERS, NUM_SERVERS, hardware=H800.name),
            PoolSettings("train", "train"),
        )
    )
)
Squares = Callable[[int], float]  # lag -> the mean square of the importance weights


def drift(lag: int) -> float:
    return math.exp(DRIFT * lag**2)


def walk(lag: int) -> float:
    return math.exp(WALK * lag)


@dataclass(frozen=True)
class Step:
    """One training step. Times in virtual seconds; end_s after the begin. lags: tokens of the batch by lag."""

    bound: int
    end_s: float
    wait_s: float
    lags: Counter[int]
    worth: float  # effective sample size of the batch over its size


@dataclass(frozen=True)
class Played:
    steps: tuple[Step, ...]
    dropped: int  # episodes, as stale
    recomputed: int  # tokens whose KV was built again after a commit

    @property
    def seconds(self) -> float:
        return self.steps[-1].end_s

    def time_to(self, worth: float) -> float:
        """Seconds until the sum of the batches' worth is so much, within a step in proportion. Raises: ValueError."""
        before, begin_s = 0.0, 0.0
        for step in self.steps:
            if before + step.worth >= worth:
                return begin_s + (step.end_s - begin_s) * (worth - before) / step.worth
            before, begin_s = before + step.worth, step.end_s
        raise ValueError(f"{len(self.steps)} steps are worth {before:g}, less than {worth:g}")


def play(
    shape: TaskShape,
    bound: int | None,
    worth: float,
    seed: int,
    squares: Squares = drift,
    kv: str = "keep",
) -> Played:
    """Steps until their batches are worth so many. bound: rollout.max_staleness; None = adaptive, up to MOST."""
    limits = Limits(MOST)
    settings = RolloutSettings(**{**vars(BATCH), "max_staleness": bound or MOST})

    async def main() -> Played:
        servers = Servers(PLAN, QWEN3_8B, ENGINE, ServeSettings(progress_timeout_s=DEADLINE_S))
        state = Bound.first(limits) if bound is None else None
        steps: list[Step] = []
        with tempfile.TemporaryDirectory() as folder:
            rollout = SimulatedRollout(
                servers.router, (shape,), settings, Path(folder), context=CONTEXT, seed=seed
            )
            begin_s = at_s = clock.START_S
            if state is not None:
                rollout.set_bound(state.now)
            rollout.dispatcher.published(0)
            idle_s, done = 0.0, 0.0
            while done < worth:
                number = len(steps) + 1
                taken_s, groups = await rollout.step(
                    number, None, train, lambda version: servers.commit(version, kv)
                )
                now_s = taken_s + train_seconds(groups)
                by_lag = lags(groups, number - 1)
                now_idle_s, idle_s = (
                    rollout.dispatcher.slots_idle_s - idle_s,
                    rollout.dispatcher.slots_idle_s,
                )
                seen = seen_of(by_lag, squares, now_s - at_s, taken_s - at_s, now_idle_s)
                steps.append(
                    Step(
                        settings.max_staleness if state is None else state.now,
                        now_s - begin_s,
                        seen.wait_s,
                        by_lag,
                        seen.ess,
                    )
                )
                at_s, done = now_s, done + seen.ess
                if state is not None:
                    before, state = state, state.saw(seen, limits)
                    if state.now != before.now:
                        rollout.set_bound(state.now)
            dropped = rollout.ledger.counts()["DROPPED"] + rollout.ledger.counts()["CANCELLED"]
            await rollout.close()
        recomputed = sum(int(server.stats()["recompute_tokens"]) for server in servers.decode)
        servers.close()
        return Played(tuple(steps), dropped, recomputed)

    return clock.run(main())


async def train(groups: Sequence[Group]) -> None:
    """Takes its seconds."""
    await asyncio.sleep(train_seconds(groups))


def train_seconds(groups: Sequence[Group]) -> float:
    """Of a batch, on the one device that trains."""
    num = sum(len(t.tokens) for group in groups for t in group.trajectories)
    return TRAIN_TOKEN_S * num


def lags(groups: Sequence[Group], version: int) -> Counter[int]:
    """Sampled tokens by how many versions older than the consumer's they are."""
    found: Counter[int] = Counter()
    for group in groups:
        for trajectory in group.trajectories:
            versions = trajectory.versions[trajectory.loss_mask]
            for value, num in zip(*np.unique(versions, return_counts=True), strict=True):
                found[version - int(value)] += int(num)
    return found


def seen_of(
    by_lag: Counter[int], squares: Squares, step_s: float, wait_s: float, idle_s: float
) -> Seen:
    """What the driver's metrics would say of such a batch."""
    total = by_lag.total()
    shares = {lag: (num / total, 1 / squares(lag)) for lag, num in by_lag.items()}
    ess = 1 / sum(share / size for share, size in shares.values())
    return Seen(step_s, wait_s, min(idle_s, step_s), ess, fresher(shares))
