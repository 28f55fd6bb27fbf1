"""A twentieth of all scorer calls hangs: what the adaptive timeout saves against a fixed one of 30 s, and what it cuts.

    python benchmarks/reward_timeout.py

The rollout's own RewardService on a virtual clock (rl_jax/simulate/rewards.py), so a run takes seconds and its times
are those of the workload. `visits` is how often a task comes back: the timeout is learnt from its first right answer.
`spread` is how far a task's answers lie apart: within 0.2 none takes more than 1.5 times as long as another, which is
what the rule covers; at 0.5 one may take three times as long as another, at 0.8 nine times, which it does not.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

from rl_jax.simulate.rewards import Workload, measure

RESULTS = Path(__file__).parent / "results" / "reward_timeout.json"
CAP_S = 30.0
BASE = Workload()
WORKLOADS = {
    "three visits": BASE,
    "one visit": replace(BASE, visits=1, tasks=192),
    "ten visits": replace(BASE, visits=10),
    "wider answers": replace(BASE, spread=0.5),
    "slow tests": replace(BASE, pace_s=4.0),
    "slow tests, wider answers": replace(BASE, pace_s=4.0, spread=0.5),
    "slow tests, answers far apart": replace(BASE, pace_s=4.0, spread=0.8),
    "no hangs": replace(BASE, hangs=0.0),
}
# Adaptive over fixed wall time, and right answers cut, written before the first run.
PREDICTIONS = {
    "three visits": (0.5, 0),  # the first visit costs what it did, unless a member was right before
    "one visit": (0.8, 0),
    "ten visits": (0.25, 0),
    "wider answers": (0.5, 5),
    "slow tests": (0.8, 0),
    "slow tests, wider answers": (0.8, 40),
    "slow tests, answers far apart": (0.85, 25),
    "no hangs": (1.0, 0),
}


def main() -> None:
    from benchmarks.report import ran

    rows = []
    for name, workload in WORKLOADS.items():
        fixed, adaptive = (measure(workload, CAP_S, adaptive=on) for on in (False, True))
        ratio, cut = PREDICTIONS[name]
        rows.append(
            {
                "name": name,
                "fixed_s": round(fixed.wall_s, 1),
                "adaptive_s": round(adaptive.wall_s, 1),
                "ratio": round(adaptive.wall_s / fixed.wall_s, 3),
                "predicted_ratio": ratio,
                "calls": fixed.calls,
                "hung": fixed.hung,
                "right": fixed.right,
                "cut": adaptive.cut,
                "cut_fixed": fixed.cut,
                "predicted_cut": cut,
                "workload": asdict(workload),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    RESULTS.write_text(
        json.dumps({"card": "virtual clock", **ran(), "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
