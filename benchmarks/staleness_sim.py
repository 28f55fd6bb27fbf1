"""Every fixed staleness bound and staleness_policy=adaptive on three workloads, and what rebuilding KV after a sync
costs, on a virtual clock (rl_jax/simulate/staleness.py).

Rows of `bounds`: virtual seconds until the batches' effective sample sizes sum to WORTH batches, and how many times
those of the best fixed bound, of the medians over seeds. Rows of `kv`: the same for weights.kv=recompute over keep, at
a bound of 1. Nothing here is measured on hardware, and how worth falls with lag is assumed (the module says from what).
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import ran  # noqa: E402
from rl_jax.simulate.staleness import (  # noqa: E402
    BATCH,
    MOST,
    WORKLOADS,
    Played,
    drift,
    play,
    walk,
)

WORTH = 60.0  # batches
KV_WORTH = 12.0
SQUARES = {"drift": drift, "walk": walk}
SHAPES = {shape.tag: shape for shape in WORKLOADS}
Job = tuple[str, int | None, float, int, str, str]  # the arguments of play, by name


def work(job: Job) -> Played:
    tag, bound, worth, seed, squares, kv = job
    return play(SHAPES[tag], bound, worth, seed, SQUARES[squares], kv)


def row_of(name: dict[str, Any], played: Sequence[Played], worth: float) -> dict[str, Any]:
    """Medians over seeds; of the first seed which bounds there were."""
    lags = sum((step.lags for p in played for step in p.steps), Counter())
    of_step = lambda get: statistics.median(
        statistics.mean(get(step) for step in p.steps) for p in played
    )
    return {
        **name,
        "seconds": round(statistics.median(p.time_to(worth) for p in played), 1),
        "by_seed": [round(p.time_to(worth), 1) for p in played],
        "steps": [len(p.steps) for p in played],
        "step_s": round(statistics.median(p.seconds / len(p.steps) for p in played), 1),
        "wait_s": round(of_step(lambda step: step.wait_s), 1),
        "ess": round(of_step(lambda step: step.worth), 3),
        "lags": {str(lag): round(lags[lag] / lags.total(), 3) for lag in sorted(lags)},
        "stale_or_cancelled": [p.dropped for p in played],
        "recomputed_tokens": [p.recomputed for p in played],
        "bounds": "".join(str(step.bound) for step in played[0].steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--squares", choices=SQUARES, default="drift")
    parser.add_argument("--worth", type=float, default=WORTH, help="of the rows of bounds")
    parser.add_argument(
        "--choices", type=int, nargs="+", default=[0, *range(1, MOST + 1)], help="0: adaptive"
    )
    parser.add_argument("--kv_worth", type=float, default=KV_WORTH, help="of the rows of kv")
    parser.add_argument("--sections", nargs="+", default=["bounds", "kv"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/staleness_sim.json")
    args = parser.parse_args()
    seeds, squares = range(args.seeds), args.squares
    jobs: dict[tuple, list[Job]] = {}
    for tag in args.workloads:
        if "bounds" in args.sections:
            for choice in args.choices:
                bound = choice or None
                jobs["bounds", tag, bound] = [
                    (tag, bound, args.worth, seed, squares, "keep") for seed in seeds
                ]
        if "kv" in args.sections:
            for kv in ("keep", "recompute"):
                jobs["kv", tag, kv] = [(tag, 1, args.kv_worth, seed, squares, kv) for seed in seeds]
    rows: dict[str, list[dict[str, Any]]] = {"bounds": [], "kv": []}
    with ProcessPoolExecutor(args.processes) as pool:
        found = {key: [pool.submit(work, job) for job in of_key] for key, of_key in jobs.items()}
        for (section, tag, what), futures in found.items():
            worth = args.worth if section == "bounds" else args.kv_worth
            word = "adaptive" if what is None else what
            row = row_of({"workload": tag, "choice": word}, [f.result() for f in futures], worth)
            rows[section].append(row)
            print(json.dumps(row), flush=True)
    for of_section in rows.values():
        for row in of_section:
            fixed = [
                other["seconds"]
                for other in of_section
                if other["workload"] == row["workload"] and other["choice"] != "adaptive"
            ]
            if fixed:
                row["over_best"] = round(row["seconds"] / min(fixed), 3)
    head = {
        "what": "virtual seconds of a simulation, not of hardware",
        **ran(),
        "squares": f"{squares}: mean square of the weights at lags 0 to {MOST}: "
        + ", ".join(f"{SQUARES[squares](lag):.3f}" for lag in range(MOST + 1)),
        "worth": {"bounds": args.worth, "kv": args.kv_worth},
        "episodes of a batch": BATCH.batch_groups * BATCH.group_size,
    }
    args.out.write_text(json.dumps({**head, **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
