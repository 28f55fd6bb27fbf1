"""Routing by tag over pools of two hardware classes, on a virtual clock (rl_jax/simulate/affinity.py), over seeds.

A row is one set of pools under one pair of tasks: the virtual seconds of a rollout (median over seeds), and how much
longer that is than the same seed takes on the pools by tag (median, least and most over seeds). The first rows play one
task alone on 2 H800 or 6 H20, which RollArt measured: they say how far the assumed costs are from a real system.
Predictions are RollArt's own ratios. Nothing here is measured on hardware: it compares what the scheduler, the router
and the servers decide, under the costs that rl_jax/simulate/costs.py assumes.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import ran  # noqa: E402
from rl_jax.settings import RolloutSettings  # noqa: E402
from rl_jax.simulate.affinity import (  # noqa: E402
    CONTEXT,
    FROZEN_LAKE,
    MATH,
    TASKS,
    Played,
    Pools,
    play,
)
from rl_jax.simulate.workload import TaskShape  # noqa: E402

# Equal cost: 25.65, 26 and 25.8 H20; an eighth of RollArt's 72 H800, 208 H20, and 64 H800 with 24 H20.
BY_TAG = Pools("8 H800 + 3 H20, by tag", 8, 3, by_tag=True)
POOLS = (BY_TAG, Pools("9 H800", 9, 0), Pools("26 H20", 0, 26), Pools("8 H800 + 3 H20", 8, 3))
OTHER_SPLITS = tuple(
    Pools(f"{x} H800 + {y} H20, by tag", x, y, by_tag=True) for x, y in ((7, 6), (6, 9))
)
ALONE = (Pools("2 H800", 2, 0), Pools("6 H20", 0, 6))
# RollArt, arXiv:2512.22560: (least, most) of what it reports for the same question.
PUBLISHED = {
    "9 H800": (1.12, 1.37), "26 H20": (1.30, 1.68),
    "frozen_lake: 2 H800 over 6 H20": (0.53, 0.53), "math: 6 H20 over 2 H800": (0.49, 0.79),
}  # fmt: skip
NUM_STEPS = 2
SETTINGS = RolloutSettings(
    batch_groups=8, group_size=8, max_staleness=1, max_new_tokens=CONTEXT, envs_per_worker=4096
)


class Rows:
    """Written after each, so that a run that is cut off keeps what it has."""

    def __init__(self, out: Path, seeds: Sequence[int]):
        self.out, self.rows = out, []
        self.head = {
            "what": "virtual seconds of a simulation, not of hardware",
            **ran(),
            "seeds": list(seeds),
            "batches": NUM_STEPS,
            "episodes of a batch": SETTINGS.batch_groups * SETTINGS.group_size,
        }

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n")
        print(json.dumps(row), flush=True)


def played(pools: Pools, shapes: Sequence[TaskShape], seeds: Sequence[int]) -> list[Played]:
    return [play(pools, shapes, SETTINGS, NUM_STEPS, seed) for seed in seeds]


def spread(ratios: Sequence[float]) -> dict[str, float]:
    named = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(value, 3) for name, value in named.items()}


def alone(rows: Rows, seeds: Sequence[int]) -> None:
    """One task on each class."""
    for shape, better, worse in ((FROZEN_LAKE, *ALONE), (MATH, *ALONE[::-1])):
        fast, slow = (played(pools, (shape,), seeds) for pools in (better, worse))
        name = f"{shape.tag}: {better.name} over {worse.name}"
        ratios = [a.seconds / b.seconds for a, b in zip(fast, slow, strict=True)]
        rows.add({"name": name, **spread(ratios), "published": PUBLISHED[name]})


def together(rows: Rows, tasks: str, options: Sequence[Pools], seeds: Sequence[int]) -> None:
    """Both tasks on each set of pools, against the first."""
    base: list[Played] = []
    for pools in options:
        got = played(pools, TASKS[tasks], seeds)
        base = base or got
        own = sum(p.episodes["frozen_lake", "h800"] + p.episodes["math", "h20"] for p in got)
        row = {
            "name": pools.name,
            "tasks": tasks,
            "price": round(pools.price, 2),
            "seconds": round(statistics.median(p.seconds for p in got), 1),
            **spread([p.seconds / b.seconds for p, b in zip(got, base, strict=True)]),
        }
        if pools.by_tag:
            row["share_in_own_pool"] = own / sum(p.episodes.total() for p in got)
        else:
            row["published"] = PUBLISHED.get(pools.name)
        rows.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/affinity_sim.json")
    args = parser.parse_args()
    seeds = range(args.seeds)
    rows = Rows(args.out, seeds)
    alone(rows, seeds)
    for tasks in TASKS:
        together(rows, tasks, POOLS + OTHER_SPLITS, seeds)
    print(f"\n{'pools':36} {'price':>6} {'seconds':>9} {'over by tag':>12}  (least to most)")
    for row in rows.rows[2:]:
        print(
            f"{row['name']:36} {row['price']:6.2f} {row['seconds']:9.1f} {row['ratio']:12.2f}"
            f"  ({row['least']:.2f} to {row['most']:.2f})  {row['tasks']}"
        )


if __name__ == "__main__":
    main()
