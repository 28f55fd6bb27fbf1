"""Does a run grow? 2,000 asynchronous steps of a tiny job, with episodes and a weight sync in each.

    python benchmarks/memory_growth.py                      # 2 minutes on 2 cores
    python benchmarks/memory_growth.py --steps 300          # shorter; the slope says less

Fails (exit code 1) if, after the warm-up, resident memory grows by SLOPE_MB a step or more (least squares), or if
anything that rl_jax/testing/census.py counts has at its least more in the second half of the run than in the first:
threads, files, live device arrays, tasks, what episodes hold, objects by type.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SLOPE_MB = 0.05
EVERY = 10  # steps between two looks at resident memory
OBJECTS = (
    100  # of a type, that differ by what is in flight: a tenth of what one leaked a step would make
)
COUNT_EVERY = 50  # steps between two counts, which take a garbage collection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--config", type=Path, default=ROOT / "tests/job_config.py")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/memory_growth.json")
    args = parser.parse_args()
    warm_up = args.steps // 5
    from rl_jax.backend import simulate_cpu_devices

    simulate_cpu_devices(1)  # before jax is imported

    import numpy as np

    from benchmarks.report import ran
    from rl_jax import launch
    from rl_jax.driver import Driver
    from rl_jax.testing import census

    rss, counts, ledgers, step, start = [], [], [], Driver.step, time.perf_counter()

    def watched(driver: Driver, number: int) -> None:
        step(driver, number)
        if number % EVERY == 0:
            rss.append((number, census.rss_bytes() / 1e6))
        if number % COUNT_EVERY == 0:
            ledgers.append(len(driver.parts.ledger._attempts))
            print(
                f"step {number}: {rss[-1][1]:.1f} MB, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
        if number % COUNT_EVERY == 0 and number > warm_up:
            found = census.process_counts() + census.driver_counts(driver)
            counts.append(json.dumps(found + census.object_counts()))

    Driver.step = watched
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"--config={args.config}",
            f"--run_dir={folder}/run",
            f"--config.steps={args.steps}",
        ]
        code = launch.main([*words, "--config.rollout.max_staleness=1"])
    late = np.array([one for one in rss if one[0] > warm_up])
    slope = float(np.polyfit(late[:, 0], late[:, 1], 1)[0])
    found = [json.loads(one) for one in counts]
    grown = census.growth(found, OBJECTS)
    ok = code == 0 and slope < SLOPE_MB and not grown
    report = {
        **ran(("jax",)),
        "steps": args.steps,
        "warm_up_steps": warm_up,
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "exit_code": code,
        "rss_mb_a_step": round(slope, 5),
        "limit_mb_a_step": SLOPE_MB,
        "grown": grown,
        "episodes_that_the_ledger_knows": ledgers[-1],
        "counts_at_the_end": {k: v for k, v in found[-1].items() if not k.startswith("object ")},
        "rss_mb": [[number, round(mb, 1)] for number, mb in rss],
        "ok": ok,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "rss_mb"}, indent=1))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
