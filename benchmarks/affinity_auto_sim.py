"""serve.affinity=auto from no tags beside tags declared by hand, on a virtual clock (rl_jax/simulate/affinity.py).

A row is one choice under one pair of tasks on 8 H800 and 3 H20: the virtual seconds of all batches and of their later
half (medians over seeds), over those of the same seed by tag, and how often the assignment changed. Nothing here is
measured on hardware.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import ran  # noqa: E402
from rl_jax.settings import RolloutSettings  # noqa: E402
from rl_jax.simulate.affinity import (  # noqa: E402
    CONTEXT,
    TASKS,
    Pools,
    play,
)

CHOICES = (
    Pools("by tag", 8, 3, by_tag=True),
    Pools("auto", 8, 3, is_auto=True),
    Pools("any to any", 8, 3),
)
NUM_STEPS = 6
SETTINGS = RolloutSettings(
    batch_groups=8, group_size=4, max_staleness=1, max_new_tokens=CONTEXT, envs_per_worker=4096
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/affinity_auto_sim.json"
    )
    args = parser.parse_args()
    rows = []
    for tasks, shapes in TASKS.items():
        base = []
        for pools in CHOICES:
            got = [play(pools, shapes, SETTINGS, NUM_STEPS, seed) for seed in range(args.seeds)]
            base = base or got
            where = sum((p.later[1] for p in got), Counter())
            row = {
                "tasks": tasks,
                "choice": pools.name,
                "seconds": round(statistics.median(p.seconds for p in got), 1),
                "over_by_tag": [round(p.seconds / b.seconds, 3) for p, b in zip(got, base)],
                "later_over_by_tag": [round(p.later[0] / b.later[0], 3) for p, b in zip(got, base)],
                "changes": [p.moves for p in got],
                "assigned": [dict(p.assigned) for p in got],
                "later_episodes": {f"{tag} on {pool}": n for (tag, pool), n in where.items()},
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    head = {
        "what": "virtual seconds of a simulation, not of hardware",
        **ran(),
        "batches": NUM_STEPS,
        "episodes of a batch": SETTINGS.batch_groups * SETTINGS.group_size,
    }
    args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
