"""Prefill and decode servers in every ratio, and who chooses it, on a virtual clock (rl_jax/simulate/pd_ratio.py).

A row is one trace under one choice: the virtual seconds of a rollout (median over seeds), and how much longer that is
than the best fixed ratio of the same seed (median, least and most). `planned` is what serve/split.py chose from the
table before the start; `auto` is serve.pd_balance=auto, from the even split and from the planned one, with what its
later half of batches took beside the best ratio's. Nothing here is measured on hardware.
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
from rl_jax.simulate.pd_ratio import (  # noqa: E402
    NUM_SERVERS,
    OTHERS,
    SETTINGS,
    TRACES,
    Played,
    planned,
    play,
)
from rl_jax.simulate.workload import TaskShape  # noqa: E402

NUM_STEPS = 8
EVEN = NUM_SERVERS // 2


def later_s(played: Played) -> float:
    """Of the later half of the batches."""
    return played.seconds - played.ended_s[NUM_STEPS // 2 - 1]


def spread(ratios: Sequence[float]) -> dict[str, float]:
    named = {"over_best": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(value, 3) for name, value in named.items()}


def rows_of(shape: TaskShape, seeds: Sequence[int]) -> list[dict[str, Any]]:
    ratios = range(1, NUM_SERVERS)
    name = lambda num: f"{num}P{NUM_SERVERS - num}D"
    fixed = {num: [play(num, shape, NUM_STEPS, seed) for seed in seeds] for num in ratios}
    best = min(ratios, key=lambda num: statistics.median(p.seconds for p in fixed[num]))
    choice = planned(shape)
    auto = {
        num: [play(num, shape, NUM_STEPS, seed, "auto") for seed in seeds]
        for num in sorted({EVEN, choice.num_prefill})
    }
    played = {f"fixed {name(num)}": got for num, got in fixed.items()}
    played |= {f"auto from {name(num)}": got for num, got in auto.items()}
    rows = []
    for label, got in played.items():
        pairs = list(zip(got, fixed[best], strict=True))
        row = {
            "trace": shape.tag,
            "choice": label,
            "seconds": round(statistics.median(p.seconds for p in got), 1),
            **spread([p.seconds / b.seconds for p, b in pairs]),
        }
        if label == f"fixed {name(choice.num_prefill)}":
            row |= {"planned": True, "predicted_turns_per_s": round(choice.turns_per_s, 2)}
        if label.startswith("auto"):
            row["moves"] = [p.moves for p in got]
            later = statistics.median(later_s(p) / later_s(b) for p, b in pairs)
            row["later_half_over_best"] = round(later, 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/pd_ratio_sim.json")
    args = parser.parse_args()
    seeds = range(args.seeds)
    head = {
        "what": "virtual seconds of a simulation, not of hardware",
        **ran(),
        "seeds": list(seeds),
        "batches": NUM_STEPS,
        "episodes of a batch": SETTINGS.batch_groups * SETTINGS.group_size,
    }
    rows = [row for shape in (*TRACES, *OTHERS) for row in rows_of(shape, seeds)]
    args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
