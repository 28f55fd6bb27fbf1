"""Packed attention: cuDNN's ragged calls against float64, the card's matmul rate and plain causal attention.

    python benchmarks/packed_attention.py            # one Hopper GPU: Qwen2.5-1.5B's heads, 4 rows of 4,096

Checked first, on fresh random rows: ragged segments, one-token segments, padding with NaN in it, an empty row, more
segments than one call takes. Then timed, forward and with gradients, over rows of 1 to 256 segments and several
`max_segments`. Limit: 4 H Dh FLOP a visible pair forwards, 14 with gradients (scores again), at the rate of an 8192^3
product. Peer: `jax.nn.dot_product_attention(implementation="cudnn", is_causal=True)` on rows of one segment.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.report import Report, median_s  # noqa: E402
from benchmarks.train_step import matmul_rate  # noqa: E402
from kernels.packed_attention import find_segments, packed_attention, packed_attention_ref  # noqa: E402

H, K, DH = 12, 2, 128
MANY = 10  # calls a timed program

# Milliseconds for 4 rows of 4,096: forward 0.10 TFLOP at 450 TFLOP/s, with gradients 0.36 at 350.
PREDICTIONS = {
    "jax.nn, forward": 0.23,
    "jax.nn, both": 1.0,
    "1 segments, max 16, forward": 0.25,
    "1 segments, max 16, both": 1.1,
    "1 segments, max 64, both": 1.2,  # 64 empty sequences a row: 100,000 thread blocks that stop at once
    "16 segments, max 16, both": 0.3,
}


def rows_of(num_segments: int, shape: tuple[int, int], rng) -> np.ndarray:
    B, T = shape
    cuts = [np.sort(rng.choice(np.arange(1, T), num_segments - 1, replace=False)) for _ in range(B)]
    return np.stack([np.searchsorted(c, np.arange(T), "right") + 1 for c in cuts]).astype(np.int32)


def draw(ids: np.ndarray, rng, dtype=jnp.bfloat16) -> list[jax.Array]:
    return [jnp.asarray(rng.normal(size=(*ids.shape, n, DH)), dtype) for n in (H, K, K, H)]


def both(function, q, k, v, of_out) -> list[jax.Array]:
    out, pull = jax.vjp(function, q, k, v)
    return [out, *pull(of_out.astype(out.dtype))]


def check(report: Report) -> None:
    rng = np.random.default_rng()
    cases = {
        "ragged": [[100, 1, 199], [256, 44], [1] * 60, []],
        "not a multiple of anything": [[307], [1, 306], [200], [3]],
        "256 one-token segments": [[1] * 256, [255, 1]],
    }
    for name, rows in cases.items():
        T = max(sum(row) for row in rows)
        ids = np.zeros((len(rows), T), np.int32)
        for row, lengths in zip(ids, rows, strict=True):
            row[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
        inputs = draw(ids, rng)
        poisoned = [jnp.where(jnp.asarray(ids == 0)[..., None, None], jnp.nan, x) for x in inputs]
        attend = lambda q, k, v, ids=ids: packed_attention(q, k, v, find_segments(jnp.asarray(ids)))
        got = jax.jit(partial(both, attend))(*poisoned)
        with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
            wide = [jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64) for x in inputs]
            want = jax.jit(
                partial(both, lambda q, k, v, ids=ids: packed_attention_ref(q, k, v, ids))
            )(*wide)
        errors = {}
        for part, g, w in zip(("out", "q", "k", "v"), got, want, strict=True):
            g = np.asarray(g.astype(jnp.float32), np.float64)
            errors[part] = float(np.linalg.norm(g - w) / np.linalg.norm(w))
        report.add(f"check: {name}", 0.0, errors=errors)
        assert all(error < 1e-2 for error in errors.values()), errors


def measure(report: Report, rate: float, name: str, attend, ids: np.ndarray, inputs: list) -> None:
    lengths = np.concatenate([np.bincount(row) for row in ids])
    pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum()) * H * DH

    def forward(q, k, v, of_out):
        out = jax.lax.fori_loop(0, MANY, lambda _, q: attend(q, k, v), q)
        return out + of_out

    def gradients(q, k, v, of_out):
        step = lambda _, x: both(attend, *x, of_out)[1:]  # each reads what the last one wrote
        return jax.lax.fori_loop(0, MANY, step, [q, k, v])

    for kind, function, factor in (("forward", forward, 4), ("both", gradients, 14)):
        program = jax.jit(function)
        seconds = median_s(lambda program=program: program(*inputs)) / MANY
        report.add(
            f"{name}, {kind}",
            seconds,
            limit_s=factor * pairs / rate,
            tflops=round(factor * pairs / seconds / 1e12, 1),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/packed_attention.json"
    )
    args = parser.parse_args()
    report = Report(args.out, PREDICTIONS)
    check(report)
    rate = matmul_rate(8192)
    report.add("matmul 8192", 2 * 8192**3 / rate, tflops=round(rate / 1e12, 1))
    rng = np.random.default_rng(0)
    shape = (4, 4096)
    inputs = draw(rows_of(1, shape, rng), rng)
    plain = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    measure(report, rate, "jax.nn", plain, rows_of(1, shape, rng), inputs)
    for num, most in ((1, 2), (1, 16), (1, 64), (1, 256), (5, 16), (16, 16), (64, 16), (64, 64)):
        ids = rows_of(num, shape, rng)
        segments = find_segments(jnp.asarray(ids))
        attend = lambda q, k, v, s=segments, m=most: packed_attention(q, k, v, s, max_segments=m)
        measure(report, rate, f"{num} segments, max {most}", attend, ids, inputs)
    report.print_table()


if __name__ == "__main__":
    main()
