"""Two tasks on pools of two hardware classes that cost the same: what routing by tag brings, as RollArt asks it.

Source: RollArt, arXiv:2512.22560: FrozenLake (20 to 100 turns) wants compute, math (one turn) wants bandwidth;
Qwen3-8B, contexts of 32K; an H800 costs 2.85 H20. It gives no lengths but those, so prompts, observations and answers
here are assumed. That an H800 plays FrozenLake in half an H20's time at equal cost follows from rooflines only where
each turn's whole history is computed again, so that is what the first of the tasks does (keeps_history=False). With
servers that find histories again, as ours do, it does not hold: FROZEN_LAKE_CACHED is the same task for them. Members
of a group have prompts of their own here: where they share them the router sends them to one server, which is another
question.
Must not: be adjusted to a result.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl_jax.mesh import MeshPlan
from rl_jax.settings import (
    MeshSettings,
    PoolSettings,
    RolloutSettings,
    ServeSettings,
)
from rl_jax.simulate import clock
from rl_jax.simulate.costs import H20, H800, QWEN3_8B
from rl_jax.simulate.rollout import DEADLINE_S, SimulatedRollout
from rl_jax.simulate.servers import Servers, engine_settings
from rl_jax.simulate.workload import Constant, Lognormal, TaskShape, Uniform
from rl_jax.types import Group

FROZEN_LAKE = TaskShape(
    "frozen_lake",
    turns=Uniform(20, 100),
    prompt=Lognormal(400, 0.3),
    answer=Lognormal(40, 0.5),
    observation=Lognormal(100, 0.3),
    step_s=Constant(0.05),
    keeps_history=False,
    shares_prompt=False,
)
FROZEN_LAKE_CACHED = replace(FROZEN_LAKE, keeps_history=True)
MATH = TaskShape(
    "math",
    turns=Constant(1),
    prompt=Lognormal(200, 0.3),
    answer=Lognormal(4000, 0.8),
    shares_prompt=False,
)
TASKS = {
    "histories computed again each turn": (FROZEN_LAKE, MATH),
    "histories found again": (FROZEN_LAKE_CACHED, MATH),
}
CONTEXT = 32_768
ENGINE = engine_settings(CONTEXT)
SERVE = ServeSettings(progress_timeout_s=DEADLINE_S)


@dataclass(frozen=True)
class Pools:
    """Devices of each class, a server each. by_tag: FrozenLake prefers the H800, math the H20."""

    name: str
    num_h800: int
    num_h20: int
    by_tag: bool = False
    is_auto: bool = False  # serve.affinity=auto, from no tags

    @property
    def price(self) -> float:
        return self.num_h800 * H800.price + self.num_h20 * H20.price

    def plan(self) -> MeshPlan:
        pools = [PoolSettings("train", "train")]
        for num, hardware, shape in ((self.num_h800, H800, FROZEN_LAKE), (self.num_h20, H20, MATH)):
            tags = (shape.tag,) if self.by_tag else ()
            if num:
                name = hardware.name.lower()
                pools.append(
                    PoolSettings(name, "decode", num, num, hardware=hardware.name, tags=tags)
                )
        return MeshPlan.from_settings(MeshSettings(pools=tuple(pools)))


@dataclass(frozen=True)
class Played:
    """seconds: of virtual time until the last batch; episodes: of the batches by (tag, pool of its first turn); moves:
    of the assignment under serve.affinity=auto; later: seconds and episodes of the later half of the batches alone."""

    seconds: float
    episodes: Counter[tuple[str, str]]
    num_turns: int
    moves: int
    assigned: tuple[tuple[str, str], ...]  # (tag, hardware class) at the end
    later: tuple[float, Counter[tuple[str, str]]]


def play(
    pools: Pools, shapes: Sequence[TaskShape], settings: RolloutSettings, num_steps: int, seed: int
) -> Played:
    """num_steps batches without training between them, on a clock of their own."""

    serve = replace(SERVE, affinity="auto" if pools.is_auto else "declared")

    async def main() -> Played:
        tags = tuple(shape.tag for shape in shapes)
        servers = Servers(pools.plan(), QWEN3_8B, ENGINE, serve, tags=tags)
        assigned: dict[str, str] = {}
        servers.router.tell = lambda kind, **fields: assigned.update(fields["assigned"])
        with tempfile.TemporaryDirectory() as folder:
            rollout = SimulatedRollout(
                servers.router, shapes, settings, Path(folder), context=CONTEXT, seed=seed
            )
            taken = await rollout.steps(num_steps, commit=lambda v: servers.commit(v, "keep"))
            await rollout.close()
        moves = int(servers.router.stats()["affinity_moves"])
        servers.close()
        half = num_steps // 2
        begin_s = taken[half - 1][0] if half else 0.0
        later = (taken[-1][0] - begin_s, where(group for _, of in taken[half:] for group in of))
        done = [group for _, groups in taken for group in groups]
        num_turns = sum(len(episode.turns) for group in done for episode in group.trajectories)
        ends = tuple(sorted(assigned.items()))
        return Played(taken[-1][0], where(done), num_turns, moves, ends, later)

    return clock.run(main())


def where(groups: Iterable[Group]) -> Counter[tuple[str, str]]:
    """Episodes by (tag, pool of the first turn)."""
    return Counter((e.tag, e.turns[0].pool) for group in groups for e in group.trajectories)
