"""Trajectories against batches, redundancy, and staleness: how long a rollout's steps take where environments dawdle.

As RollArt (arXiv:2512.22560) asks it. `trajectory`: 128 trajectories of 10 to 30 turns with 3 s of generation and a
latency of Gaussian(10 s, sigma) a turn; the ratio of batched stepping (scheduler and env_stepping `batch`) to
trajectory-level rollout. `staleness`: the same workload at sigma 5 over four steps, max_staleness 0 to 1, with a train
step beside it, and at most 128 trajectories in flight on either side. `redundancy`: 32 groups of 8 are needed, of more
that run; the ratio of none redundant to so many. `bias`: whose turns it keeps where slow episodes are the long ones.
These parts run on a virtual clock (rl_jax/simulate/latency.py). Those named wall_... run the same on the real one, in
shortened seconds, over the Router and a DecodeServer round a FakeEngine in a process of its own (process_sampler.py).
A ratio is the median over seeds, with the least and the most; both sides of it play the same episodes. Rows are merged
into the file by name, so parts may run apart.
A virtual second is a statement about who waits for whom, never about hardware. The wall clock adds what rollout's own
Python costs, on whatever else the machine does.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.process_sampler import ProcessSampler  # noqa: E402
from benchmarks.report import ran  # noqa: E402
from rl_jax.settings import EngineSettings, RolloutSettings  # noqa: E402
from rl_jax.simulate.latency import (  # noqa: E402
    BATCHED,
    NEEDED,
    PACED,
    TRAJECTORIES,
    TURN_S,
    Played,
    play,
    played,
    turns_of,
)
from rl_jax.simulate.rollout import sleeping  # noqa: E402
from rl_jax.simulate.workload import Constant, Draw, TaskShape  # noqa: E402

SIGMAS = (1, 3, 5, 7, 10)
GROUPS, MEMBERS = (32, 34, 36), (8, 10, 12)
STEPS = 3  # of the redundancy rows
# RollArt, and what a model of the workload in a few lines of numpy said before this was written.
TRAJECTORY_PUBLISHED = dict(zip(SIGMAS, (1.23, 1.51, 1.69, 2.18, 2.27)))
TRAJECTORY_PREDICTED = dict(zip(SIGMAS, (1.16, 1.47, 1.74, 1.98, 2.23)))
REDUNDANCY_PUBLISHED = {8: (1.00, 1.16, 1.30), 10: (1.11, 1.38, 1.52), 12: (1.24, 1.51, 1.62)}
REDUNDANCY_PREDICTED = {8: (1.00, 1.23, 1.35), 10: (1.15, 1.39, 1.52), 12: (1.20, 1.47, 1.61)}
# RollArt's steps are 23.1 % training and 68.4 % rollout, which here takes some 445 s.
TRAIN_S = 150.0
STALENESS_STEPS = 4
STALENESS = tuple(
    replace(TRAJECTORIES, max_staleness=staleness, envs_per_worker=128) for staleness in (0, 1)
)
BLOCKS = 4  # of a turn: what comes while one runs waits for a quarter of a turn at most
ENGINE = EngineSettings(
    slots=512, context=1024, page_size=64, steps_per_block=1, chunk_sizes=(2048,),
    chunk_requests=64, append_limit=1024,
)  # fmt: skip


class Rows:
    """Written after each, in the place of one of the same name, so that a run that is cut off keeps what it has."""

    def __init__(self, out: Path, seeds: Sequence[int]):
        self.out, self.of_row = out, {"seeds": list(seeds), **ran()}
        self.head = {
            "what": "seconds of a simulation, not of hardware; rows named wall: of real waits, CPU only",
            "versions": self.of_row.pop("versions"),
            "cpus": os.cpu_count(),
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        return json.loads(self.out.read_text())["rows"] if self.out.exists() else []

    def add(self, row: dict[str, Any]) -> None:
        rows = [r for r in self.rows if r["name"] != row["name"]] + [row | self.of_row]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps({**self.head, "rows": rows}, indent=1) + "\n")
        print(json.dumps(row), flush=True)


def spread(ratios: Sequence[float]) -> dict[str, float]:
    named = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(value, 3) for name, value in named.items()}


def seconds(runs: Sequence[Played]) -> float:
    """Median over seeds of a step's mean."""
    return round(statistics.median(sum(r.step_s) / len(r.step_s) for r in runs), 2)


def over(slow: Sequence[Played], fast: Sequence[Played]) -> dict[str, float]:
    return spread([sum(a.step_s) / sum(b.step_s) for a, b in zip(slow, fast, strict=True)])


def extra_work(runs: Sequence[Played]) -> dict[str, float]:
    """What was begun and not needed, against what was kept; over all seeds."""

    def total(name: str, part: str = "sum") -> float:
        return sum(getattr(run.redundant[name], part) for run in runs if name in run.redundant)

    def mean(name: str) -> float | None:
        count = total(name, "count")
        return round(total(name) / count, 3) if count else None

    kept = total("redundant/turns_kept", "count")
    names = [f"{what}_{kind}" for what in ("turns", "reward") for kind in ("kept", "dropped")]
    return {
        "extra_episodes": round(total("redundant/episodes") / kept, 3),
        "extra_tokens": round(total("redundant/tokens") / total("redundant/length_kept"), 3),
        **{name: mean(f"redundant/{name}") for name in names},
    }


def check(runs: Sequence[Played], size: int, is_synchronous: bool = True) -> None:
    """Groups are whole, and what was redundant had left when its batch was taken."""
    for run in runs:
        assert set(run.sizes) == {size}, run.sizes
        assert not is_synchronous or run.live == 0, f"{run.live} episodes live after their batch"


def trajectory(rows: Rows, seeds: Sequence[int]) -> None:
    for sigma in SIGMAS:
        shape = turns_of(sigma)
        fast = [play(shape, TRAJECTORIES, seed=seed) for seed in seeds]
        slow = [play(shape, replace(TRAJECTORIES, **BATCHED), seed=seed) for seed in seeds]
        rows.add(
            {
                "name": f"trajectory over batch, sigma {sigma}",
                **over(slow, fast),
                "predicted": TRAJECTORY_PREDICTED[sigma],
                "published": TRAJECTORY_PUBLISHED[sigma],
                "batch_s": seconds(slow),
                "trajectory_s": seconds(fast),
            }
        )


def staleness(rows: Rows, seeds: Sequence[int]) -> None:
    """Four steps, the first one's start and the last one's wait without overlap included."""
    shape = turns_of(5)
    runs = [
        [play(shape, s, num_steps=STALENESS_STEPS, seed=seed, train_s=TRAIN_S) for seed in seeds]
        for s in STALENESS
    ]
    row = {"name": "max_staleness 1 over 0, sigma 5", **over(*runs), "train_s": TRAIN_S}
    rows.add(row | {"synchronous_s": seconds(runs[0]), "asynchronous_s": seconds(runs[1])})


def redundancy(rows: Rows, seeds: Sequence[int]) -> None:
    base: list[Played] = []
    for size in MEMBERS:
        for groups, said, found in zip(
            GROUPS, REDUNDANCY_PREDICTED[size], REDUNDANCY_PUBLISHED[size], strict=True
        ):
            settings = replace(NEEDED, extra_groups=groups - 32, extra_members=size - 8)
            runs = [play(PACED, settings, num_steps=STEPS, seed=s, turn_s=0.0) for s in seeds]
            check(runs, NEEDED.group_size)
            base = base or runs
            row = {"name": f"redundancy, {groups}x{size} for 32x8", **over(base, runs)}
            row |= {"predicted": said, "published": found, "step_s": seconds(runs)}
            rows.add(row | (extra_work(runs) if runs is not base else {}))


def bias(rows: Rows, seeds: Sequence[int]) -> None:
    """Redundancy where an episode is slow because it is long: whose turns are kept, of 20 on average."""
    shape = turns_of(5)
    plain = [play(shape, NEEDED, seed=seed) for seed in seeds]
    settings = replace(NEEDED, extra_groups=4, extra_members=4)
    runs = [play(shape, settings, seed=seed) for seed in seeds]
    check(runs, NEEDED.group_size)
    row = {"name": "redundancy, 36x12 for 32x8, 10 to 30 turns", **over(plain, runs)}
    rows.add(row | extra_work(runs))


def scaled(shape: TaskShape, scale: float) -> TaskShape:
    def shorter(draw: Draw) -> Draw:
        return lambda rng: scale * draw(rng)

    return replace(shape, step_s=shorter(shape.step_s), answer=Constant(BLOCKS))


@dataclass(frozen=True)
class WallJob:
    """Both sides of a ratio, one after the other, for one seed. Seconds are the workload's as it is written."""

    shape: TaskShape
    slow: RolloutSettings
    fast: RolloutSettings
    scale: float  # of the wall clock's seconds
    turn_s: float
    num_steps: int = 1
    train_s: float = 0.0
    seed: int = 0

    def __call__(self) -> list[Played]:
        return [asyncio.run(self._play(settings)) for settings in (self.slow, self.fast)]

    async def _play(self, settings: RolloutSettings) -> Played:
        with tempfile.TemporaryDirectory() as folder:
            sampler = ProcessSampler(self.scale * self.turn_s / BLOCKS, ENGINE, Path(folder))
            try:
                got = await played(
                    sampler, scaled(self.shape, self.scale), settings, num_steps=self.num_steps,
                    seed=self.seed, train=sleeping(self.scale * self.train_s), look_s=0.002,
                )  # fmt: skip
            finally:
                sampler.close()
        return replace(got, step_s=tuple(s / self.scale for s in got.step_s))


def both(job: WallJob, seeds: Sequence[int]) -> tuple[list[Played], list[Played]]:
    """The job for each seed: its slow sides and its fast ones."""
    slow, fast = zip(*(replace(job, seed=seed)() for seed in seeds), strict=True)
    return list(slow), list(fast)


def wall_trajectory(rows: Rows, seeds: Sequence[int], scale: float) -> None:
    batch = replace(TRAJECTORIES, **BATCHED)
    job = WallJob(turns_of(5), batch, TRAJECTORIES, scale, TURN_S)
    slow, fast = both(job, seeds)
    row = {"name": "wall: trajectory over batch, sigma 5", **over(slow, fast), "scale": scale}
    rows.add(row | {"batch_s": seconds(slow), "trajectory_s": seconds(fast)})


def wall_staleness(rows: Rows, seeds: Sequence[int], scale: float) -> None:
    job = WallJob(turns_of(5), *STALENESS, scale, TURN_S, STALENESS_STEPS, TRAIN_S)
    slow, fast = both(job, seeds)
    row = {"name": "wall: max_staleness 1 over 0, sigma 5", **over(slow, fast), "scale": scale}
    rows.add(row | {"synchronous_s": seconds(slow), "asynchronous_s": seconds(fast)})


def wall_redundancy(rows: Rows, seeds: Sequence[int], scale: float) -> None:
    # Two turns of 50 s in place of four of 25: half of the Python, and the same lognormal episodes.
    shape = replace(PACED, turns=Constant(2), step_s=Constant(50.0))
    redundant = replace(NEEDED, extra_groups=4, extra_members=4)
    slow, fast = both(WallJob(shape, NEEDED, redundant, scale, 0.0, STEPS), seeds)
    check([*slow, *fast], NEEDED.group_size, is_synchronous=False)
    row = {"name": "wall: redundancy, 36x12 for 32x8", **over(slow, fast)}
    row |= {"scale": scale, "live_at_take": max(run.live for run in fast)}
    rows.add(row | {"plain_s": seconds(slow), "redundant_s": seconds(fast)} | extra_work(fast))


PARTS: dict[str, Callable[..., None]] = {
    part.__name__: part
    for part in (
        trajectory, staleness, redundancy, bias, wall_trajectory, wall_staleness, wall_redundancy,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--scale", type=float, default=0.01, help="of the wall clock's seconds")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/rollout.json")
    args = parser.parse_args()
    seeds = range(args.seeds)
    rows = Rows(args.out, seeds)
    for part in args.parts:
        if part.startswith("wall"):
            PARTS[part](rows, seeds, args.scale)
        else:
            PARTS[part](rows, seeds)
    for row in rows.rows:
        said = f"predicted {row['predicted']}" if "predicted" in row else ""
        print(
            f"{row['name']:40} {row['ratio']:6.2f}  ({row['least']:.2f} to {row['most']:.2f})  {said}"
        )


if __name__ == "__main__":
    main()
