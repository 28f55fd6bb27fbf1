"""Four equal servers split between prefill and decode in every way, and who chooses the split.

Source: RollArt, arXiv:2512.22560, section PD split: 1P3D, 2P2D and 3P1D, chosen by hand there; 3P1D is worst for its
decode-bound work. Traces of one turn an episode: long prompts with short answers, the reverse, one between; and others.
Who chooses: nobody (a fixed split), serve/split.py from a table before the start, or serve.pd_balance=auto from the
even split. The table's points are what CostEngine spends on a chunk and on a block, as a benchmark of one server would
measure them.
Members of a group have prompts of their own: where they share them a prefix is computed once for all of them.
Must not: be adjusted to a result.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from rl_jax.mesh import MeshPlan
from rl_jax.serve.split import Split, Table, Traffic, choose_split
from rl_jax.settings import (
    MeshSettings,
    PoolSettings,
    RolloutSettings,
    ServeSettings,
)
from rl_jax.simulate import clock
from rl_jax.simulate.costs import H800, QWEN3_8B, Costs, Hardware
from rl_jax.simulate.rollout import DEADLINE_S, SimulatedRollout
from rl_jax.simulate.servers import Servers, engine_settings
from rl_jax.simulate.workload import Constant, Draw, Lognormal, TaskShape, rng_of

NUM_SERVERS = 4
CONTEXT = 32_768
ENGINE = engine_settings(CONTEXT)
SETTINGS = RolloutSettings(
    batch_groups=16, group_size=4, max_staleness=1, max_new_tokens=CONTEXT, envs_per_worker=4096
)


def _trace(tag: str, prompt: float, answer: float) -> TaskShape:
    return TaskShape(
        tag, Constant(1), Lognormal(prompt, 0.3), Lognormal(answer, 0.5), shares_prompt=False
    )


PREFILL_HEAVY = _trace("prefill_heavy", 8000, 100)
BETWEEN = _trace("between", 4000, 500)
DECODE_HEAVY = _trace("decode_heavy", 500, 2000)
TRACES = (PREFILL_HEAVY, BETWEEN, DECODE_HEAVY)
# By which it is seen whether a change helps beyond the traces that it was made for.
OTHERS = (
    _trace("2000_1000", 2000, 1000),
    _trace("6000_250", 6000, 250),
    _trace("1000_500", 1000, 500),
)


@dataclass(frozen=True)
class Played:
    """seconds: of virtual time until the last batch; moves: servers that changed their role meanwhile."""

    seconds: float
    moves: int
    ended_s: tuple[float, ...]  # each batch


def plan(num_prefill: int) -> MeshPlan:
    pools = [
        PoolSettings(kind, kind, num, num, hardware=H800.name)
        for kind, num in (("prefill", num_prefill), ("decode", NUM_SERVERS - num_prefill))
    ]
    return MeshPlan.from_settings(MeshSettings(pools=(*pools, PoolSettings("train", "train"))))


def play(
    num_prefill: int,
    shape: TaskShape,
    num_steps: int,
    seed: int,
    pd_balance: str = "fixed",
    settings: RolloutSettings = SETTINGS,
) -> Played:
    """num_steps batches without training between them, on a clock of their own. num_prefill: at the start."""
    serve = ServeSettings(progress_timeout_s=DEADLINE_S, pd_balance=pd_balance)

    async def main() -> Played:
        servers = Servers(plan(num_prefill), QWEN3_8B, ENGINE, serve)
        with tempfile.TemporaryDirectory() as folder:
            rollout = SimulatedRollout(
                servers.router, (shape,), settings, Path(folder), context=CONTEXT, seed=seed
            )
            taken = await rollout.steps(num_steps, commit=lambda v: servers.commit(v, "keep"))
            await rollout.close()
        moves = int(servers.router.stats()["role_moves"])
        servers.close()
        return Played(taken[-1][0], moves, tuple(at_s for at_s, _ in taken))

    return clock.run(main())


def table(context: int, hardware: Hardware = H800) -> Table:
    """What one server takes, at histories of `context` tokens."""
    costs = Costs(hardware, QWEN3_8B)
    size = lambda num: costs.chunk_s(num, num * (num + 1) // 2, num)
    lengths, loads = (128, 512, 2048, 4096, 8192), (1, 4, 16, 64)
    return Table(
        tuple((num, size(num)) for num in lengths),
        tuple((num, costs.decode_s(1, num, num * context)) for num in loads),
        ENGINE.slots,
    )


def planned(shape: TaskShape, settings: RolloutSettings = SETTINGS) -> Split:
    """What the planner chooses for a trace, told its mean lengths and how many episodes may be under way."""
    prompt, answer = _mean(shape.prompt), _mean(shape.answer)
    at_once = settings.batch_groups * settings.group_size * (1 + settings.max_staleness)
    traffic = Traffic(prompt, answer, at_once)
    return choose_split(table(int(prompt + answer / 2)), traffic, NUM_SERVERS)


def _mean(draw: Draw) -> float:
    """Of so many draws that the last digits do not matter."""
    rng = rng_of("mean")
    return sum(draw(rng) for _ in range(10_000)) / 10_000
