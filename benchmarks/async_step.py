"""A whole GRPO step on two cards, one that generates and one that trains: synchronous and asynchronous.

    python benchmarks/async_step.py                       # 2 GPUs, Qwen2.5-1.5B's shapes
    python benchmarks/async_step.py --tokens 640          # longer answers, where the phases are not balanced
    python benchmarks/async_step.py --tiny                # CPU: that it runs; its times mean nothing

What runs is `python -m rl_jax.launch` with the config below: real environments in worker processes, real sync, random
weights. An answer never says stop, so each has --tokens tokens; the reward is a bit of its text's checksum, so groups
differ and gradients are real. Evaluations, checkpoints and traces are off while it is measured.
Read from metrics.jsonl of the run directory: medians of the steps after the third. A synchronous step is the wait for
its batch, the update and the sync one after the other; asynchronous (max_staleness 1) they overlap.
Targets: with the two phases within 45 and 55 % of their sum, an asynchronous step takes at most 0.60 of a synchronous
one; the sync takes at most 2 % of the step.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from ml_collections import ConfigDict

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mesh_configs import gpu_2  # noqa: E402
from rl_jax.config import default_config  # noqa: E402
from rl_jax.testing.envs import EvenEnv  # noqa: E402
from rl_jax.types import Action, StepResult  # noqa: E402

DROPPED, KEPT = 3, 8  # steps
GROUPS, MEMBERS = 16, 8
DEADLINE_S = 280.0  # of one run, compiling included

# Milliseconds on two H100: 128 answers of 512 tokens at 2.9 ms a step and 4 % of host's work, 66 k tokens trained at
# 40 k a second, 3.1 GB synchronised in 0.1 s with its digests.
PREDICTIONS = {"synchronous": 3300.0, "asynchronous": 1850.0}


class ChecksumEnv(EvenEnv):
    """The reward is a bit of the text's checksum: most tokens of a vocabulary that is no tokenizer's look alike."""

    def step(self, action: Action) -> StepResult:
        return StepResult((), float(zlib.crc32(action.text.encode()) & 1), True)


def get_config(arg: str = "") -> ConfigDict:
    """arg: "TOKENS" or "tiny"."""
    tiny = arg == "tiny"
    tokens = 8 if tiny else int(arg)
    config = default_config()
    config.steps = DROPPED + KEPT + 1
    if not tiny:
        config.model.update(
            vocab_size=151_936, num_layers=28, embed_size=1536,
            num_heads=12, num_kv_heads=2, head_dim=128, mlp_size=8960, rope_theta=1e6,
            qkv_bias=True, tie_embeddings=True, dtype="bfloat16", param_dtype="float32",
        )  # fmt: skip
    context = 32 + tokens
    config.engine.update(
        slots=GROUPS * MEMBERS, context=-(-context // 64) * 64, steps_per_block=4 if tiny else 16,
        chunk_sizes=(512,) if tiny else (4096,), chunk_requests=GROUPS * MEMBERS,
    )  # fmt: skip
    config.rollout.update(
        batch_groups=GROUPS, group_size=MEMBERS, max_new_tokens=tokens, max_turns=1
    )
    row = 64 if tiny else 7 * context  # seven answers, about 4,000 tokens
    config.learner.update(
        row_tokens=max(row, -(-context // 64) * 64), microbatch_rows=1, remat="none",
        logprob_chunk=64 if tiny else 4096, learning_rate=1e-6,
    )  # fmt: skip
    config.warm_start.steps = 0
    config.eval.update(every=0, episodes=1)
    config.checkpoint.every = 0
    config.metrics.update(progress="plain", rollouts_every=0)
    config.mesh = gpu_2.get_config()
    config.mesh.platform = "cpu" if tiny else ""
    config.tasks.sources = [
        ConfigDict(
            {
                "tag": "even",
                "env": "benchmarks.async_step:ChecksumEnv",
                "config": ConfigDict({"turns": 1, "num_tasks": 256}),
                "script_episodes": 0,
            }
        )
    ]
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/async_step.json")
    args = parser.parse_args()
    found = {}
    for name, staleness in (("synchronous", 0), ("asynchronous", 1)):
        arg = "tiny" if args.tiny else str(args.tokens)
        found[name] = run(arg, staleness)  # before this process holds the cards
        print(json.dumps({"name": name, **found[name]}), flush=True)
    if args.tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from benchmarks.report import Report

    report = Report(args.out, {} if args.tiny else PREDICTIONS)
    report.head["shape"] = "tiny" if args.tiny else f"Qwen2.5-1.5B, {args.tokens} tokens"
    step_s = found["synchronous"]["step_s"]
    for name, figures in found.items():
        of_synchronous = round(figures["step_s"] / step_s, 3)
        report.add(name, figures.pop("step_s"), of_synchronous=of_synchronous, **figures)
    report.print_table()


def run(arg: str, staleness: int) -> dict:
    """Medians of the steps of one run, which is killed once it has done enough of them."""
    directory = Path(tempfile.mkdtemp()) / "run"
    log = directory.with_name("log")
    command = [
        sys.executable, "-m", "rl_jax.launch", f"--config={Path(__file__).resolve()}:{arg}",
        f"--run_dir={directory}", f"--config.rollout.max_staleness={staleness}",
    ]  # fmt: skip
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    end, rows = time.monotonic() + DEADLINE_S, []
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True
        )
        try:
            while len(rows) < DROPPED + KEPT:
                time.sleep(0.5)
                file = directory / "metrics.jsonl"
                lines = file.read_text().splitlines() if file.exists() else []
                rows = [row for row in map(json.loads, lines) if "time/step_s" in row]
                if process.poll() is not None or time.monotonic() > end:
                    break
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if len(rows) < DROPPED + KEPT:
        raise RuntimeError(
            f"{len(rows)} steps were done; the end of {log}:\n{log.read_text()[-3000:]}"
        )
    return figures_of(rows[DROPPED : DROPPED + KEPT])


def figures_of(rows: list[dict]) -> dict:
    middle = lambda name: statistics.median(row[name] for row in rows)
    steps = [row["time/step_s"] for row in rows]
    assert all(row["optim/grad_norm"] > 0 for row in rows), "an update was not real"
    wait, train, sync = (middle(f"time/{name}_s") for name in ("wait_for_batch", "train", "sync"))
    where_known = {"train_mfu": "perf/train_mfu", "lag0": "mismatch/abs_mean_lag0_pure"}
    return {
        "step_s": statistics.median(steps),
        "spread_s": round(max(steps) - min(steps), 3),
        "wait_for_batch_s": round(wait, 3),
        "batch_s": round(middle("time/batch_s"), 3),
        "train_s": round(train, 3),
        "sync_s": round(sync, 3),
        "pause_s": round(middle("sync/pause_s"), 4),
        "sync_of_step": round(sync / statistics.median(steps), 4),
        "rollout_of_phases": round(wait / (wait + train), 3),
        "staleness": round(middle("staleness/mean"), 3),
        "decode_tokens_per_s": round(middle("perf/decode_tokens_per_s")),
        "train_tokens_per_s": round(middle("perf/train_tokens_per_s")),
        "fill": round(middle("batch/fill"), 3),
        **{n: round(middle(key), 4) for n, key in where_known.items() if key in rows[0]},
    }


if __name__ == "__main__":
    main()
