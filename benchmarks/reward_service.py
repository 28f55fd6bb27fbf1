"""The reward service under three jobs: how busy its workers are, what a call costs beside its scorer, and what is lost
when workers are killed.

    python benchmarks/reward_service.py [--tiny]

Needs the extra `uvicorn`; CPU. The service is the real program in a process of its own, and so is each job; scorers
sleep, so that the figures are of the service and not of this machine's cores. A job is a loop of steps: BURST episodes
are scored at once, then it "trains" for TRAIN_S and scores nothing.

    alone      one job; what a service of its own would be used
    shared     three jobs at once: the busy share of WORKERS workers from the first call to the last
    killed     the same three jobs, while a busy worker is killed with -9 every KILL_S
    overhead   one call at a time of each of three jobs: the call's time minus its scorer's
    local      the same calls in worker processes of the job itself, without HTTP
    cold       the first call of a service that has no worker
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from rl_jax.rollout.http_scorers import HttpScorers, ServiceError
from rl_jax.rollout.process import Limit
from rl_jax.rollout.scorer_pool import ScorerPool
from rl_jax.settings import RewardSettings
from rl_jax.types import EpisodeView, Message, Task

RESULTS = Path(__file__).parent / "results" / "reward_service.json"
SCORER = "rl_jax.testing.scorers:SleepingScorer"
WORKERS, BURST, STEPS, TRAIN_S, MEAN_S, KILL_S = 4, 64, 10, 3.0, 0.1, 1.5
CALLS = 200  # of `overhead` and `local`
# An episode of four turns of 400 characters.
TEXTS = tuple("x" * 400 for _ in range(4))
VIEW = EpisodeView(
    tuple(Message(r, "x" * 400) for _ in range(4) for r in ("user", "assistant")),
    TEXTS, {"moves": 3.0}, (0.0,) * 4,
)  # fmt: skip

# Written before the first run: busy shares, and milliseconds.
PREDICTIONS = {
    "alone": 0.34,  # 64 x 0.1 s on 4 workers are 1.6 s of 4.6 s, and a burst's tail leaves workers idle
    "shared": 0.88,  # 4.8 s of work a cycle of at least 4.6 s: nearly always some job has calls waiting
    "killed": 0.82,  # a worker is away for 0.3 s of every 1.5 s; its call begins again
    "overhead_ms": 4.0,  # HTTP and JSON twice, a pipe, and an event loop on each side
    "local_ms": 0.6,
    "cold_ms": 400.0,  # an interpreter and numpy
}


def call(rng: random.Random, number: int, seconds: float | None = None) -> Task:
    if seconds is None:
        seconds = rng.lognormvariate(0.0, 0.5) * MEAN_S / 1.1331  # whose mean is MEAN_S
    payload = {"seconds": seconds, "value": float(number)}
    return Task(f"t/{number}", "e", "e", (), payload, SCORER, 4)


async def job(url: str, seed: int, steps: int, calls: int) -> dict[str, Any]:
    """One job's loop (steps), or its calls one at a time. What it measured."""
    rng, out = random.Random(seed), {"lost": 0, "wrong": 0, "scored": 0, "over_ms": []}
    settings = RewardSettings(url=url, timeout_s=30.0, read_timeout_s=30.0, connections=BURST)
    scorers = HttpScorers([SCORER], settings)
    await scorers.start()

    async def ask(number: int, seconds: float | None = None) -> None:
        task = call(rng, number, seconds)
        start_s = time.perf_counter()
        answer = await scorers.score(SCORER, task, VIEW)
        taken_s = time.perf_counter() - start_s
        out["over_ms"].append(1e3 * (taken_s - task.payload["seconds"]))
        out["scored"] += answer.reward.status == "scored"
        out["lost"] += answer.reward.value is None
        out["wrong"] += answer.reward.value not in (None, float(number))

    for step in range(steps):
        await asyncio.gather(*(ask(step * BURST + i) for i in range(BURST)))
        if step + 1 < steps:
            await asyncio.sleep(TRAIN_S)
    for number in range(calls):
        await ask(number, 0.01)
    out["retries"] = scorers.counts["reward_retries"]
    await scorers.close()
    return out


@contextlib.contextmanager
def service(port: int, keep_alive_s: float = 600.0):
    words = ["-m", "rl_jax.tools.reward_server", f"--port={port}", f"--reward={SCORER}",
             f"--workers={WORKERS}", f"--keep_alive_s={keep_alive_s}"]  # fmt: skip
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    try:
        asyncio.run(_until_up(f"http://127.0.0.1:{port}"))
        yield process
    finally:
        process.terminate()
        process.wait(20)


async def _until_up(url: str) -> None:
    while True:
        try:
            return await HttpScorers([SCORER], RewardSettings(url=url)).check()
        except ServiceError:
            await asyncio.sleep(0.1)


async def _state(url: str) -> dict[str, Any]:
    from rl_jax.rewards.http_client import HttpClient

    client = HttpClient(url)
    said = await client.call("GET", "/v1/scorers")
    await client.close()
    return said


def run_jobs(port: int, num: int, steps: int, calls: int) -> tuple[list[dict[str, Any]], float]:
    """What each measured, and seconds from the first call to the last (the jobs' imports are outside)."""
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, __file__, f"--url={url}", f"--steps={steps}", f"--calls={calls}"]
    jobs = [
        subprocess.Popen([*command, f"--seed={i}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for i in range(num)
    ]
    for one in jobs:
        assert one.stdout is not None and one.stdout.readline() == b"ready\n"
    start_s = time.perf_counter()
    for one in jobs:
        assert one.stdin is not None
        one.stdin.write(b"go\n")
        one.stdin.flush()
    said = [json.loads(one.communicate(timeout=600)[0]) for one in jobs]
    return said, time.perf_counter() - start_s


def utilisation(port: int, num: int, steps: int, kill: int | None = None) -> dict[str, Any]:
    """The busy share of the workers under `num` jobs. kill: the service's pid, whose busy workers are killed."""
    url = f"http://127.0.0.1:{port}"
    run_jobs(port, 1, 1, 0)  # all workers are there
    before = asyncio.run(_state(url))
    stop, killed = threading.Event(), []
    if kill is not None:
        threading.Thread(target=_killer, args=(kill, stop, killed), daemon=True).start()
    said, wall_s = run_jobs(port, num, steps, 0)
    stop.set()
    after = asyncio.run(_state(url))
    busy_s = after["busy_s"] - before["busy_s"]
    return {
        "busy": round(busy_s / (WORKERS * wall_s), 3),
        "wall_s": round(wall_s, 2),
        "calls": sum(len(s["over_ms"]) for s in said),
        "scored": sum(s["scored"] for s in said),
        "lost": sum(s["lost"] for s in said),
        "wrong": sum(s["wrong"] for s in said),
        "killed": len(killed),
        "died_in_calls": after["counts"].get("reward_env_died", 0),
    }


def _killer(pid: int, stop: threading.Event, killed: list[int]) -> None:
    rng, parent = random.Random(7), psutil.Process(pid)
    while not stop.wait(KILL_S):
        children = [c.pid for c in parent.children() if c.pid not in killed]
        if children:
            victim = rng.choice(children)
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)


async def local(calls: int) -> list[float]:
    """Milliseconds of a call of worker processes here, beside its scorer's."""
    settings = RewardSettings(workers=1, timeout_s=30.0)
    pool = ScorerPool({SCORER: SCORER}, settings, Limit(60.0, "start"))
    await pool.check()
    await pool.start()
    over_ms = []
    for number in range(calls):
        task = call(random.Random(0), number, 0.01)
        start_s = time.perf_counter()
        await pool.score(SCORER, task, VIEW)
        over_ms.append(1e3 * (time.perf_counter() - start_s - 0.01))
    await pool.close()
    return over_ms


def spread(over_ms: list[float]) -> dict[str, float]:
    ordered = sorted(over_ms)
    return {
        "mean_ms": round(statistics.mean(ordered), 2),
        "median_ms": round(statistics.median(ordered), 2),
        "p99_ms": round(ordered[int(0.99 * (len(ordered) - 1))], 2),
        "calls": len(ordered),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a few steps: shows that it works")
    parser.add_argument("--port", type=int, default=18080)
    for name, kind in (("url", str), ("steps", int), ("calls", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.url:
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(asyncio.run(job(args.url, args.seed, args.steps, args.calls))))
        return
    from benchmarks.report import ran

    steps, calls = (2, 20) if args.tiny else (STEPS, CALLS)
    rows: list[dict[str, Any]] = []

    def add(name: str, key: str, row: dict[str, Any]) -> None:
        rows.append({"name": name, "predicted": PREDICTIONS[key], **row})
        print(json.dumps(rows[-1]), flush=True)
        if not args.tiny:
            head = {"card": f"{os.cpu_count()} CPU cores, shared", **ran(("numpy", "uvicorn"))}
            RESULTS.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")

    with service(args.port):
        add("alone", "alone", utilisation(args.port, 1, steps))
        add("shared", "shared", utilisation(args.port, 3, steps))
        said, _ = run_jobs(args.port, 3, 0, calls)
        add("overhead", "overhead_ms", spread([ms for s in said for ms in s["over_ms"]]))
    with service(args.port) as process:
        add("killed", "killed", utilisation(args.port, 3, steps, kill=process.pid))
    add("local", "local_ms", spread(asyncio.run(local(calls))))
    with service(args.port, keep_alive_s=0.2):
        while asyncio.run(_state(f"http://127.0.0.1:{args.port}"))["workers"]:
            time.sleep(0.05)
        said, _ = run_jobs(args.port, 1, 0, 1)
        add("cold", "cold_ms", spread(said[0]["over_ms"]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
