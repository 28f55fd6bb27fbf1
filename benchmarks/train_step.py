"""Training step: a whole GRPO learner step at Qwen2.5-1.5B's shapes against the card's own matmul rate.

    python benchmarks/train_step.py --peer                    # one Hopper GPU: every remat, then torch + transformers
    python benchmarks/train_step.py --only elementwise,4      # some variants, as REMAT,ROWS (rows of a microbatch)
    python benchmarks/train_step.py --shape 7b --fsdp 4       # 4 GPUs: Qwen2.5-7B, weights and moments split over them
    python benchmarks/train_step.py --tiny                    # CPU: that it runs; its times mean nothing

What runs is `Learner.step`: float32 master weights and AdamW moments, bfloat16 compute, 65,536 tokens a card in
sequences of 4,096, all of them trained but each sequence's first; random weights. Every variant is a process of its
own, so its peak memory is its own; it measures the rate of an 8192^3 bfloat16 product beside its step.
Model FLOP of a step of T tokens in sequences of S:  6 N T + 6 L S (H Dh) T,  with N all weights (the tied table counts
once, as the head; looking up costs nothing) and causal attention, half of the scores. Recomputation does not count.
Limit: these at the matmul rate. Target: 60 % of it with and without remat, and 1.25 times the peer's speed at equal
remat.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rl_jax.settings import AlgorithmSettings, LearnerSettings, ModelSettings  # noqa: E402

QWEN_1_5B = ModelSettings(
    vocab_size=151_936, num_layers=28, embed_size=1536, num_heads=12, num_kv_heads=2, head_dim=128, mlp_size=8960,
    rope_theta=1e6, qkv_bias=True, tie_embeddings=True, dtype="bfloat16", param_dtype="float32",
)  # fmt: skip
SHAPES = {
    "1.5b": QWEN_1_5B,
    "7b": replace(
        QWEN_1_5B, vocab_size=152_064, embed_size=3584, num_heads=28, num_kv_heads=4, mlp_size=18944,
        tie_embeddings=False,
    ),
    "tiny": replace(
        QWEN_1_5B, vocab_size=512, num_layers=2, embed_size=64, num_heads=4, head_dim=16, mlp_size=128,
    ),
}  # fmt: skip

# Milliseconds on one H100, 1.5b. Products 607 TFLOP and the head's 31 again at 650 TFLOP/s: 980; attention 69 at 400:
# 170; elementwise passes, 400 GB at 2.9 TB/s: 140; logits in registers; AdamW 20, gradient sums 20. With remat of
# layers 172 TFLOP more: 265. torch: 36.9 and 31.1 thousand tokens a second were measured on an H200.
PREDICTIONS = {
    "elementwise, 4 rows": 1350.0,
    "elementwise, 2 rows": 1380.0,  # gradient sums twice as often, and about 44 GB instead of 55
    "none, 2 rows": 1450.0,  # XLA keeps what is dear to compute (exponentials) and reads it again
    "layer, 4 rows": 1620.0,
    "layer, 8 rows": 1600.0,
    "torch, no checkpointing": 1800.0,
    "torch, checkpointing": 2120.0,
}
VARIANTS = ("elementwise,4", "none,2", "layer,4", "layer,8")


def main() -> None:
    args = arguments()
    if args.variant:
        return print(json.dumps(measure(args)))
    if args.tiny:
        args.shape, args.row_tokens, args.rows = "tiny", 128, 4
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process only names the card
    from benchmarks.report import Report

    report = Report(args.out, PREDICTIONS if args.shape == "1.5b" else {})
    report.head["shape"] = {"model": args.shape, "tokens": args.rows * args.row_tokens * args.fsdp,
                            "row_tokens": args.row_tokens, "cards": args.fsdp}  # fmt: skip
    for variant in args.only or (("elementwise,2", "layer,1") if args.tiny else VARIANTS):
        remat, rows = variant.split(",")
        found = child(["train_step.py", *shared(args), "--variant", variant], args.limit_s)
        add(report, f"{remat}, {rows} rows", found)
    if args.peer:
        for checkpointing in (False, True):
            name = f"torch, {'' if checkpointing else 'no '}checkpointing"
            extra = ["--checkpointing"] if checkpointing else []
            peer = [*shared(args)[:6], "--layers", str(args.layers), *extra]
            add(report, name, child(["train_step_peer.py", *peer], args.limit_s))
    report.print_table()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=16, help="sequences a card")
    parser.add_argument("--fsdp", type=int, default=1, help="cards")
    parser.add_argument(
        "--layers", type=int, default=0, help="fewer layers than the shape has; 0 = all"
    )
    parser.add_argument(
        "--segments", type=int, default=1, help="sequences in a row, of random lengths"
    )
    parser.add_argument("--chunk", type=int, default=16384, help="learner.logprob_chunk")
    parser.add_argument("--attention", default="auto", help="learner.attention")
    parser.add_argument(
        "--max-segments", type=int, help="sequences a row that one attention call has room for"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only", type=lambda text: text.split(";"), help="variants, as REMAT,ROWS;REMAT,ROWS"
    )
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one variant")
    parser.add_argument("--profile", type=Path, help="write kernel times of one step here")
    parser.add_argument("--variant", help="measure this one in this process")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/train_step.json")
    return parser.parse_args()  # fmt: skip


def shared(args: argparse.Namespace) -> list[str]:
    """What a child is told; the peer takes the first three."""
    names = (
        "shape",
        "row_tokens",
        "rows",
        "repeats",
        "fsdp",
        "layers",
        "segments",
        "chunk",
        "attention",
        "max_segments",
        "profile",
    )
    given = [(n, getattr(args, n)) for n in names if getattr(args, n) is not None]
    return [x for name, value in given for x in (f"--{name.replace('_', '-')}", str(value))]


def child(command: list[str], limit_s: float) -> dict:
    """The last line of a program of this folder, as JSON; {"error": ...} if it gave none."""
    program, *rest = command
    start = time.perf_counter()
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
    try:
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / program), *rest],
            stdout=subprocess.PIPE, text=True, timeout=limit_s, env=os.environ | memory,
        )  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, json.JSONDecodeError, IndexError) as error:
        found = {"error": f"{type(error).__name__} after {time.perf_counter() - start:.0f} s"}
    return {**found, "process_s": round(time.perf_counter() - start, 1)}


def add(report, name: str, found: dict) -> None:
    if "error" in found:
        report.rows.append({"name": name, **found})
        report.save()
        return print(name, found, flush=True)
    seconds, flop, rate = found.pop("seconds"), found.pop("flop"), found.pop("rate")
    report.add(
        name,
        seconds,
        limit_s=flop / rate,
        of_matmul_rate=round(flop / seconds / rate, 3),
        tokens_per_s=round(found.pop("tokens") / seconds),
        tflops=round(flop / seconds / 1e12, 1),
        matmul_tflops=round(rate / 1e12, 1),
        **found,
    )


def model_flop(settings: ModelSettings, num_weights: int, tokens: int, row_tokens: int) -> float:
    if not settings.tie_embeddings:
        num_weights -= settings.vocab_size * settings.embed_size  # looked up, not multiplied
    scores = settings.num_layers * row_tokens * settings.num_heads * settings.head_dim
    return 6.0 * num_weights * tokens + 6.0 * scores * tokens


# --- one variant, in a process of its own ---------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict:
    if args.shape == "tiny":
        from rl_jax.backend import simulate_cpu_devices

        simulate_cpu_devices(args.fsdp)
    import jax

    remat, rows = args.variant.split(",")
    settings = SHAPES[args.shape]
    settings = replace(settings, num_layers=args.layers or settings.num_layers)
    learner = make_learner(args, settings, remat, int(rows))
    batch = make_batch(args, settings)
    rate = matmul_rate(256 if args.shape == "tiny" else 8192)
    start = time.perf_counter()
    learner.step(batch)
    compile_s = time.perf_counter() - start
    times = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        metrics = learner.step(batch)  # it waits for the device
        times.append(time.perf_counter() - start)
    assert not metrics["optim/skipped"].sum, "the update was skipped: its time is not a step's"
    if args.profile:
        from benchmarks.kernel_times import kernel_times

        args.profile.parent.mkdir(parents=True, exist_ok=True)
        args.profile.write_text(json.dumps(kernel_times(lambda: learner.step(batch)), indent=0))
    tokens = args.rows * args.row_tokens * args.fsdp
    num_weights = sum(x.size for x in learner.params.values())
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "seconds": sorted(times)[len(times) // 2],
        "spread_ms": round((max(times) - min(times)) * 1e3, 1),
        "flop": model_flop(settings, num_weights, tokens, args.row_tokens) / args.fsdp,
        "rate": rate,
        "tokens": tokens,
        "peak_gb": round(memory.get("peak_bytes_in_use", 0) / 1e9, 2),
        "attention": learner.attention,
        "compile_s": round(compile_s, 1),
        "loss": metrics["policy/loss"].sum,
        "grad_norm": round(metrics["optim/grad_norm"].sum, 6),
    }


def matmul_rate(size: int) -> float:
    """FLOP/s of a bfloat16 product of random squares: the better of two layouts, as XLA may choose badly."""
    import jax
    import jax.numpy as jnp

    from benchmarks.report import median_s

    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    many = 10
    products = [jax.jit(lambda a, b: a @ b), jax.jit(lambda a, b: a @ b.T)]
    seconds = min(median_s(lambda f=f: [f(a, b) for _ in range(many)]) for f in products)
    return many * 2 * size**3 / seconds


def make_learner(args: argparse.Namespace, settings: ModelSettings, remat: str, rows: int):
    """A learner with random weights, made by a small program a shape: all in one takes a minute to compile."""
    import jax

    import rl_jax.learner.attention
    from rl_jax.algorithms.grpo import Grpo
    from rl_jax.learner.learner import Learner
    from rl_jax.mesh import TRAIN_RULES, make_mesh
    from rl_jax.models.decoder import build_model

    if args.max_segments:
        room = {"max_segments": args.max_segments}
        module = rl_jax.learner.attention
        module.packed_attention = partial(module.packed_attention, **room)
    model = build_model(settings, settings.vocab_size)
    learner = Learner(
        model,
        make_mesh({"fsdp": args.fsdp}, jax.devices()[: args.fsdp]),
        TRAIN_RULES,
        Grpo(AlgorithmSettings()),
        LearnerSettings(
            row_tokens=args.row_tokens, microbatch_rows=rows * args.fsdp, remat=remat,
            logprob_chunk=args.chunk * args.fsdp, attention=args.attention, learning_rate=1e-6,
        ),
        max_rows=args.rows * args.fsdp,
        temperature=1.0,
        total_steps=1000,
    )  # fmt: skip
    draw = {}
    params = {}
    for i, (name, a) in enumerate(model.abstract.items()):
        (mean, std), place = model.initial[name], learner.param_shardings[name]
        key = (a.shape, mean, std, place)
        if key not in draw:
            draw[key] = jax.jit(
                lambda k, a=a, mean=mean, std=std: mean + std * jax.random.normal(k, a.shape),
                out_shardings=place,
            )
        params[name] = draw[key](jax.random.fold_in(jax.random.key(0), i))
    learner.reset(params)
    return learner


def make_batch(args: argparse.Namespace, settings: ModelSettings):
    """Rows full of sequences, all trained but each one's first token."""
    import numpy as np

    from rl_jax.learner.batch import Batch

    rng = np.random.default_rng(0)
    shape = B, T = args.rows * args.fsdp, args.row_tokens
    cuts = [
        np.sort(rng.choice(np.arange(2, T), args.segments - 1, replace=False)) for _ in range(B)
    ]
    starts = [np.concatenate([[0], c]) for c in cuts]
    segments = np.stack([np.searchsorted(s, np.arange(T), "right") for s in starts]).astype(
        np.int32
    )
    positions = np.stack([np.arange(T) - s[i - 1] for s, i in zip(starts, segments, strict=True)])
    lengths = np.concatenate([np.diff([*s, T]) for s in starts])
    mask = positions > 0
    uniform = -np.log(settings.vocab_size)
    return Batch(
        tokens=rng.integers(0, settings.vocab_size, shape).astype(np.int32),
        targets_mask=mask,
        segment_ids=segments,
        sample_ids=segments,
        positions=positions.astype(np.int32),
        turn_ids=np.zeros(shape, np.int16),
        behaviour_logprobs=np.where(mask, uniform + rng.normal(0, 0.1, shape), 0).astype(
            np.float32
        ),
        versions=np.where(mask, 0, -1).astype(np.int32),
        context_mixed=np.zeros(shape, bool),
        advantages=np.where(mask, rng.normal(size=shape), 0).astype(np.float32),
        loss_weights=(mask / mask.sum()).astype(np.float32),
        trajectory_ids=np.arange(len(lengths), dtype=np.int32),
        seq_len=lengths.astype(np.int32),
        rows=np.repeat(np.arange(B), args.segments).astype(np.int32),
        starts=np.concatenate(starts).astype(np.int32),
    )


if __name__ == "__main__":
    main()
