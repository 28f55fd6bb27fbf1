"""The timeline: whether its seconds add up against other clocks, and what it costs.

    python -m benchmarks.timeline [--steps 30] [--pairs 4] [--json benchmarks/results/timeline.json]

1. cost      Track.add and the writing of what was added, a span; and a block's, which sums up arrays of 64 slots
             before; alone on one thread, in CPU time.
2. sums      the quickstart's parts without its warm start, synchronous and with max_staleness=1: the seconds of each
             unit, busy and by cause, of steps 2 to the last, against the wall clock of their rows in metrics.jsonl; and
             goodput's factors of each pool.
3. inside    one more run, synchronous, in which all calls of the timeline are timed by their threads' CPU time: what
             adds spans, what finds out about blocks and chunks, what writes. Of the process's CPU seconds; an upper
             bound, as the timing itself counts and calls within calls count twice.
4. overhead  the same job with the timeline and without, in turns: CPU seconds of the whole run (user and system, all
             its processes), which other load on the machine changes little, and median seconds of a step, which it
             changes much. Predicted: the spans of a step times their cost, of the CPU seconds of a step.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rl_jax.metrics import read_metrics
from rl_jax.timeline import Traces
from rl_jax.tools.goodput import goodput_of
from rl_jax.tools.trace import record
from rl_jax.tools.trace_files import read_attempts

NUM_SPANS = 100_000
JOB = (
    "--config.warm_start.steps=0", "--config.eval.episodes=8", "--config.metrics.progress=none",
    "--config.metrics.rollouts_every=0",
)  # fmt: skip
SYNC, ASYNC = "--config.rollout.max_staleness=0", "--config.rollout.max_staleness=1"


def cost() -> dict[str, float]:
    """Microseconds of a span."""
    with tempfile.TemporaryDirectory() as folder:
        traces = Traces(Path(folder), 0, 1 << 30)
        timeline = traces.timeline
        timeline.close()  # its thread must not write meanwhile
        timeline.is_on, timeline._most = True, NUM_SPANS
        track = timeline.track("decode/decode.0")
        valid, tokens = np.ones((64, 4), bool), np.full(64, 300)
        start = time.thread_time()
        for _ in range(NUM_SPANS // 10):
            block = {"tokens": int(valid.sum()), "context": int(tokens.sum())}
            track.add("block", 1.0, 2.0, running=64, version=3, **block)
        block_s = time.thread_time() - start
        timeline._spans.clear()
        start = time.thread_time()
        for i in range(NUM_SPANS):
            track.add("block", 1.0, 2.0, running=8, tokens=32, context=1000 + i, version=3)
        added_s = time.thread_time() - start
        timeline.is_on = False
        start = time.thread_time()
        timeline._flush()
        written_s = time.thread_time() - start
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        assert timeline.num_lost == 0
    return {
        "add_us": 1e6 * added_s / NUM_SPANS,
        "block_us": 1e6 * block_s / (NUM_SPANS // 10),
        "write_us": 1e6 * written_s / NUM_SPANS,
        "bytes": size / NUM_SPANS,
    }


def job(run: Path, steps: int, *words: str) -> tuple[float, float]:
    """Run it; seconds of the whole process, and CPU seconds of it and all that it started."""
    command = [sys.executable, "-m", "rl_jax.launch", f"--run_dir={run}", *JOB, *words]
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, f"--config.steps={steps}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {said}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - start, cpu_s


def inside(run: Path, steps: int) -> dict[str, float]:
    """In this process, which can run no other job after it."""
    from rl_jax import backend, launch, timeline

    backend.avoid_broken_fusions()
    backend.simulate_cpu_devices(8)  # before anything imports jax
    from rl_jax.serve import decode_server, prefill_server

    spent: Counter[str] = Counter()

    def timed(name: str, function: Callable) -> Callable:
        def call(*args, **more):
            start = time.thread_time()
            try:
                return function(*args, **more)
            finally:
                spent[name] += time.thread_time() - start
                spent[f"{name}_calls"] += 1

        return call

    timeline.Track.add = timed("add", timeline.Track.add)
    timeline.Timeline._flush = timed("write", timeline.Timeline._flush)
    for module in (decode_server, prefill_server):
        for name in ("tell_block", "tell_chunk"):
            if hasattr(module, name):
                setattr(module, name, timed("tell", getattr(module, name)))
    if launch.main([f"--run_dir={run}", *JOB, SYNC, f"--config.steps={steps}"]) != 0:
        raise RuntimeError("the run failed")
    cpu_s = time.process_time()
    parts = ("add", "write", "tell")
    return {**spent, "process_cpu_s": cpu_s, "of_cpu": sum(spent[p] for p in parts) / cpu_s}


def sums(run: Path, steps: int, process_s: float) -> dict:
    """Steps 2 to the last against metrics.jsonl, the whole against summary.json and the process."""
    attempts, rows = read_attempts(run), read_metrics(run)
    at_s = {row["step"]: row["time"] for row in rows if "time/step_s" in row}
    wall_s = at_s[steps] - at_s[1]
    inside = goodput_of(attempts, rows, (2, steps))
    whole = goodput_of(attempts, rows)
    totals = {
        unit.name: unit.busy_s - unit.overlap_s + sum((unit.by_cause or {}).values())
        for unit in inside.units
    }
    return {
        "rows_wall_s": wall_s,
        "busy_and_bubbles_s": totals,
        "off": {name: total / wall_s - 1 for name, total in totals.items()},
        "summary_wall_s": json.loads((run / "summary.json").read_text())["wall_s"],
        "whole_wall_s": whole.wall_s,
        "process_s": process_s,
        "steps": record(inside),
        "whole": record(whole),
        "spans": len(attempts[0].spans),
        "spans_in_steps": sum(
            s.start_s >= attempts[0].window((2, steps))[0] for s in attempts[0].spans
        ),
        "bytes": sum(path.stat().st_size for path in (run / "traces").rglob("*.jsonl")),
    }


def step_s(run: Path) -> list[float]:
    """Of each step but the first three, which compile and fill caches."""
    return [row["time/step_s"] for row in read_metrics(run) if "time/step_s" in row][3:]


def overhead(folder: Path, steps: int, pairs: int) -> dict:
    """Pairs of runs, with and without in turns."""
    medians: dict[str, list[float]] = {"with": [], "without": []}
    cpu: dict[str, list[float]] = {"with": [], "without": []}
    for i in range(pairs):
        order = ("with", "without") if i % 2 == 0 else ("without", "with")
        for kind in order:
            run = folder / f"{kind}_{i}"
            off = () if kind == "with" else ("--config.metrics.timeline_bytes=0",)
            cpu[kind].append(job(run, steps, SYNC, *off)[1])
            medians[kind].append(statistics.median(step_s(run)))
    ratios = [a / b - 1 for a, b in zip(cpu["with"], cpu["without"], strict=True)]
    return {
        "cpu_s": cpu,
        "of_cpu": statistics.median(ratios),
        "of_cpu_of_each_pair": ratios,
        "median_step_s": medians,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", type=Path, help="only part 3, into this run directory")
    asked = parser.parse_args()
    if asked.inside is not None:
        print(json.dumps(inside(asked.inside, asked.steps)))
        return
    from benchmarks.report import LIBRARIES, ran  # imports jax

    command = f"python -m benchmarks.timeline --steps {asked.steps} --pairs {asked.pairs}"
    found: dict = {**ran(LIBRARIES), "command": command, "cost": cost()}
    print(found["cost"], flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, word in (("synchronous", SYNC), ("asynchronous", ASYNC)):
            run = folder / kind
            process_s, cpu_s = job(run, asked.steps, word)
            found[kind] = {**sums(run, asked.steps, process_s), "cpu_s": cpu_s}
            told = {k: found[kind][k] for k in ("rows_wall_s", "off", "spans", "bytes")}
            print(kind, json.dumps(told), flush=True)
        one = found["synchronous"]
        per_step = one["spans_in_steps"] / (asked.steps - 1)
        each_us = found["cost"]["block_us"] + found["cost"]["write_us"]
        # All of a run's CPU seconds count as its steps': the start's, too, so that the share is too low by that.
        predicted = {
            "spans_a_step": per_step,
            "cpu_s_a_step": per_step * each_us * 1e-6,
            "of_cpu": per_step * each_us * 1e-6 / (one["cpu_s"] / asked.steps),
            "of_half_a_second": per_step * each_us * 1e-6 / 0.5,
        }
        found["predicted"] = predicted
        print(json.dumps(predicted), flush=True)
        command = [sys.executable, "-m", "benchmarks.timeline", f"--steps={asked.steps}"]
        done = subprocess.run(
            [*command, f"--inside={folder / 'inside'}"], capture_output=True, text=True, check=True
        )
        found["inside"] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(found["inside"]), flush=True)
        if asked.pairs:
            found["overhead"] = overhead(folder, asked.steps, asked.pairs)
            print(json.dumps(found["overhead"]), flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
