"""What a sandbox costs: from the call to the end of everything, for the least command, Python, and a grade of code.

    python benchmarks/sandbox_start.py [--backend=bubblewrap] [--num=200] [--out=FILE]

Each after the other, in one process that holds nothing else. The file has percentiles in milliseconds, the load of the
machine before and after, and the same command without a sandbox.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from rl_jax.sandbox.grade import open_grader
from rl_jax.sandbox.records import Job

BARE = ("/usr/bin/python3", "-c", "print(1)")
TESTS = [{"args": [n], "expected": n * n} for n in range(4)]


def percentiles(run: Callable[[], object], num: int) -> dict[str, float]:
    seconds = []
    for _ in range(num):
        started_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_s)
    cuts = statistics.quantiles(seconds, n=100)
    named = {"min": min(seconds), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
    return {name: round(1000 * value, 1) for name, value in named.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="bubblewrap")
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    grader = open_grader(args.backend, "python3", 10.0, 256)
    run, files = grader.sandbox.run, {"main.py": b"print(1)"}
    measured = {
        "true": lambda: run(Job(("true",))),
        "true, a file in, files out": lambda: run(Job(("true",), files, keeps_files=True)),
        "python3": lambda: run(Job(("python3", "main.py"), files)),
        "a grade of four tests": lambda: grader.grade("def f(n): return n * n", TESTS),
        "python3 without a sandbox": lambda: subprocess.run(BARE, capture_output=True, check=True),
    }
    load_before = os.getloadavg()[0]
    out = {
        "cores": os.cpu_count(),
        "milliseconds": {what: percentiles(one, args.num) for what, one in measured.items()},
        "load": [load_before, os.getloadavg()[0]],
        "is_root": os.geteuid() == 0,
    }
    # Not before: it imports jax, which no start of a sandbox should be measured beside.
    from benchmarks.report import ran

    text = json.dumps({**ran(), **out}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
