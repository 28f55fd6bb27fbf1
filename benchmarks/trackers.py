"""`python benchmarks/trackers.py`: a step's time with no tracker, with one that raises and with one that hangs.

Each round runs the tests' tiny job once each way, one after the other, in processes of their own; the first steps are
left out. Prediction, written before the first run: the medians differ by less than the rounds of one way do, as a row
costs a put into a queue (microseconds).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


from rl_jax.testing import trackers as fakes  # noqa: E402
from rl_jax.trackers.feed import Feeds  # noqa: E402

WAYS = {"none": "", "raises": "Raising", "hangs": "Hanging"}
LEFT_OUT = 5  # steps: the first compiles, and the queues fill


def step_times(way: str, steps: int, directory: Path) -> tuple[list[float], dict[str, float]]:
    """(seconds of each step, what was lost)."""
    words = [
        f"--config={ROOT / 'tests' / 'job_config.py'}", f"--run_dir={directory}", f"--config.steps={steps}",
        "--config.metrics.rollouts_every=5",
    ]  # fmt: skip
    if kind := WAYS[way]:
        words.append(f"--config.metrics.trackers=('rl_jax.testing.trackers:{kind}Tracker',)")
    subprocess.run(
        [sys.executable, "-m", "rl_jax.launch", *words],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    final = next((e for e in events if e["kind"] == "tracker" and "put" in e), {})
    lost = {
        name: final[name] for name in ("put", "delivered", "failed", "dropped") if name in final
    }
    return [row["time/step_s"] for row in rows if "time/step_s" in row][LEFT_OUT:], lost


def put_us(way: str, num: int = 20_000) -> float:
    """Microseconds that a row costs the driver's thread, with one tracker of this kind."""
    cls = getattr(fakes, f"{WAYS[way] or 'Recording'}Tracker")
    feeds = Feeds(
        {} if way == "none" else {way: lambda: cls(None)}, lambda text, **fields: None, str, 0, 64
    )
    row = {f"area/name_{i}": float(i) for i in range(150)}
    start_s = time.perf_counter()
    for step in range(num):
        feeds.metrics(step, row)
    return round(1e6 * (time.perf_counter() - start_s) / num, 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for number in range(args.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                times, lost = step_times(way, args.steps, Path(folder) / "run")
            row = {
                "round": number,
                "way": way,
                "median_step_s": round(median(times), 5),
                "steps": len(times),
                **lost,
            }
            print(row, flush=True)
            rows.append(row)
    costs = {way: put_us(way) for way in WAYS}
    print("microseconds a row on the driver's thread:", costs)
    of = {way: median(r["median_step_s"] for r in rows if r["way"] == way) for way in WAYS}
    ratios = {way: round(of[way] / of["none"], 4) for way in WAYS}
    print("medians over rounds, over that without a tracker:", ratios)
    out = {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/trackers.py --steps {args.steps} --rounds {args.rounds}",
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
        "rows": rows,
        "ratio_to_none": ratios,
        "row_us": costs,
    }
    path = ROOT / "benchmarks" / "results" / "trackers.json"
    path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
