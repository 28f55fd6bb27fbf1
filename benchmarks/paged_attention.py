"""Decode attention over pages: how close to the memory's own rate, and to what else there is?

    python benchmarks/paged_attention.py                      # one Hopper GPU: checks, then Qwen2.5-7B's heads, B 256
    python benchmarks/paged_attention.py --shapes 1.5b --contexts 1024 --batch 64
    python benchmarks/paged_attention.py --tiny               # CPU: the definition and the interpreted kernel, one page

Limit: the bytes of keys and values that must be read, at the rate at which the card copies (bytes read and written).
`stream` is a kernel that waits for the same pages and does nothing: what reading through a page table costs by itself.
Peers: JAX's Triton paged attention, and cuDNN's attention over a contiguous cache of the same tokens.
Every way is checked against float64 before it is timed; STEPS calls follow each other inside one program.
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
from jax import lax  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from benchmarks.report import Report, median_s  # noqa: E402
from kernels import paged_attention as pa  # noqa: E402
from kernels import paged_attention_hopper as hopper  # noqa: E402
from rl_jax.engine.attention import parts_of  # noqa: E402

PAGE, STEPS = 64, 16
HEADS = {"7b": (4, 7), "1.5b": (2, 6), "tiny": (1, 2)}  # kv heads, queries of each
HEAD_DIM = 128
# Milliseconds of one call, 7b, 256 sequences, H200 (copies at 4.3 TB/s): the bytes at 85 %; the stream at 93 %.
PREDICTIONS = {
    "7b 256 x 1024 stream": 0.134,
    "7b 256 x 1024 kernel, 2,2 stages": 0.150,
    "7b 256 x 1024 kernel, 2,1 stages": 0.155,
    "7b 256 x 4096 kernel, 2,2 stages": 0.585,
    "7b 256 x 16384 kernel, 2,2 stages": 2.35,
    "7b 256 x 16384, window 1024, soft cap 50 kernel, 2,1 stages": 0.20,  # the bytes of 1,024, and tanh
    "7b 16 x 1024 kernel, 2,1 stages": 0.020,  # 17 MB; launches and the sum over parts
    "7b 64 x 1024 kernel, 2,1 stages": 0.052,
    "7b 32 groups of 8, 960 shared + 64, items of 4 pages": 0.045,
}


def main() -> None:
    args = arguments()
    report = Report(args.out, PREDICTIONS)
    report.head["shape"] = {"page": PAGE, "head_dim": HEAD_DIM, "heads": args.shapes}
    if args.tiny:
        tuning = hopper.Tuning(2, 1, stages_weights=True, interpret=plgpu.InterpretGPUParams())
        print(f"largest difference from float64: {check('tiny', tuning, 3, 90):.4f}")
        return
    print(
        f"largest difference from float64: {check('7b', hopper.Tuning(), 9, 700):.4f}", flush=True
    )
    rate = copy_rate()
    report.head["copy_gb_per_s"] = round(rate / 1e9)
    for shape in args.shapes:
        for batch in args.batch:
            for context in args.contexts:
                bench(report, (shape, batch, context, 0, 0.0), rate, args)
        if args.window:
            batch, context = max(args.batch), max(args.contexts)
            bench(report, (shape, batch, context, args.window, 50.0), rate, args)
        shared(report, shape, rate, args)
    report.print_table()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=["7b"], choices=list(HEADS))
    parser.add_argument("--batch", type=int, nargs="+", default=[256])
    parser.add_argument("--window", type=int, default=0, help="one more row, with a soft cap of 50")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--stages", nargs="+", default=["2,2", "2,1"], help="of keys, of values")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/paged_attention.json"
    )
    return parser.parse_args()


def copy_rate() -> float:
    """Bytes read and written a second."""
    x = jnp.ones(1 << 28, jnp.float32)
    programs = [jax.jit(lambda x: x + 1), jax.jit(jnp.copy)]
    seconds = min(median_s(lambda f=f: [f(x) for _ in range(4)]) / 4 for f in programs)
    return 2 * x.nbytes / seconds


def draw(shape: str, batch: int, pages: int, seed: int = 0):
    """(q [B, H, Dh], (k, v) of that many pages)."""
    K, G = HEADS[shape]
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (batch, K * G, HEAD_DIM), jnp.bfloat16)
    cache = [jax.random.normal(key, (pages, PAGE, K, HEAD_DIM), jnp.bfloat16) for key in keys[1:]]
    return q, tuple(cache)


def check(shape: str, tuning: hopper.Tuning, batch: int, longest: int) -> float:
    """Largest |difference| from float64 over ragged lengths, windows, a soft cap, several parts and shared prefixes."""
    rng = np.random.default_rng(0)
    most = -(-longest // PAGE)
    q, cache = draw(shape, batch, batch * most + 1)
    cache = tuple(x.at[0].set(jnp.nan) for x in cache)  # a page that nothing may read
    end = rng.integers(1, longest + 1, batch)
    end[:3] = (1, PAGE, longest)
    first = np.where(rng.random(batch) < 0.5, 0, np.maximum(end - 70, 0))
    table = 1 + rng.permutation(batch * most).reshape(batch, most)
    table = np.where(np.arange(most) < -(-end // PAGE)[:, None], table, 0)
    last = table[np.arange(batch), -(-end // PAGE) - 1]
    for b in range(batch):  # nobody wrote what lies behind the end
        cache = tuple(x.at[last[b], (end[b] - 1) % PAGE + 1 :].set(jnp.nan) for x in cache)
    scores = pa.Scores(HEAD_DIM**-0.5, 4.0)
    attend = partial(hopper.attend, tuning=tuning)
    worst = 0.0
    for parts in (1, 3):
        run = jax.jit(
            lambda q, cache, t, a, b, n=parts: pa.paged_attention(
                q, cache, pa.split_items(t, a, b, PAGE, n), scores, attend
            )
        )
        got = run(q, cache, *(jnp.asarray(x, jnp.int32) for x in (table, first, end)))
        worst = max(worst, difference(got, q, cache, table, first, end, scores))
    q, cache = draw(shape, batch, batch * most + 1, seed=1)
    end = np.maximum(end, PAGE + 26)
    table = 1 + np.arange(batch * most).reshape(batch, most)
    table[:, 0] = table[0, 0]
    rows = pa.TILE // pa.padded(HEADS[shape][1])
    items = pa.shared_items([row.tolist() for row in table], end.tolist(), PAGE, rows, 2)
    got = pa.paged_attention(q, cache, items, scores, attend)
    return max(worst, difference(got, q, cache, table, 0 * end, end, scores))


def difference(got, q, cache, table, first, end, scores: pa.Scores) -> float:
    K, G = cache[0].shape[2], q.shape[1] // cache[0].shape[2]
    q, k, v, got = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, *cache, got))
    worst = 0.0
    for b, (row, low, high) in enumerate(zip(table, first, end)):
        mine = [np.concatenate(list(x[row]))[low:high] for x in (k, v)]
        score = np.einsum("kgd,tkd->kgt", q[b].reshape(K, G, -1), mine[0]) * scores.scale
        if scores.soft_cap is not None:
            score = scores.soft_cap * np.tanh(score / scores.soft_cap)
        weights = np.exp(score - score.max(axis=-1, keepdims=True))
        out = np.einsum("kgt,tkd->kgd", weights, mine[1]) / weights.sum(axis=-1)[..., None]
        worst = max(worst, float(np.abs(out.reshape(K * G, -1) - got[b]).max()))
    return worst


def bench(report: Report, case: tuple[str, int, int, int, float], rate: float, args) -> None:
    """Whole contexts, or the last `window` tokens of them (0 = all), every sequence by itself, pages scattered."""
    shape, batch, context, window, cap = case
    per_row = context // PAGE
    q, cache = draw(shape, batch, batch * per_row)
    table = jax.random.permutation(jax.random.key(7), batch * per_row).astype(jnp.int32)
    table = table.reshape(batch, per_row)
    num_bytes = 2 * cache[0].nbytes * (window or context) // context
    name, limit = f"{shape} {batch} x {context}", num_bytes / rate
    full = jnp.full((batch,), context, jnp.int32)
    parts = parts_of(batch * HEADS[shape][0], (window or context) // PAGE)
    first = full - (window or context)
    items = jax.jit(pa.split_items, static_argnums=(3, 4))(table, first, full, PAGE, parts)
    scores = pa.Scores(HEAD_DIM**-0.5, cap or None)
    of = lambda seconds: {"of_copy_rate": round(limit / seconds, 3)}
    if window:
        name += f", window {window}, soft cap {cap:g}"
    else:
        seconds = timed(partial(stream, stages=3), q, cache, items)
        report.add(f"{name} stream", seconds, num_bytes, limit, **of(seconds))
    for depth in args.stages:
        attend = partial(hopper.attend, tuning=tuning_of(depth))
        run = partial(pa.paged_attention, scores=scores, attend=attend)
        seconds = timed(run, q, cache, items)
        name_it = f"{name} kernel, {depth} stages"
        report.add(name_it, seconds, num_bytes, limit, **of(seconds), parts=parts)
    if args.peers and not window:
        peers(report, (name, num_bytes, limit), q, cache, table)


def tuning_of(stages: str) -> hopper.Tuning:
    return hopper.Tuning(*map(int, stages.split(",")))


def peers(report: Report, row, q, cache, table) -> None:
    name, num_bytes, limit = row
    try:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        turned = [jnp.transpose(x, (2, 0, 1, 3)) for x in cache]
        lengths = jnp.full((len(q),), table.shape[1] * PAGE, jnp.int32)
        splits = next(n for n in (4, 2, 1) if table.shape[1] % n == 0)
        run = partial(paged_attention, k_splits=splits, pages_per_compute_block=1)
        ask = lambda q, k, v, t, n: run(q * HEAD_DIM**-0.5, k, v, t, n)
        seconds = timed(ask, q, *turned, table, lengths)
        report.add(
            f"{name} JAX's Triton kernel",
            seconds,
            num_bytes,
            limit,
            of_copy_rate=round(limit / seconds, 3),
        )
    except Exception as error:  # a peer that does not run here is a row that says so
        print(f"{name} JAX's Triton kernel: {type(error).__name__}: {str(error)[:200]}", flush=True)
    try:
        K = cache[0].shape[2]
        flat = [x[table].reshape(len(q), -1, K, HEAD_DIM) for x in cache]
        run = lambda q, k, v: jax.nn.dot_product_attention(
            q[:, None], k, v, implementation="cudnn"
        )[:, 0]
        seconds = timed(run, q, *flat)
        report.add(
            f"{name} cuDNN, contiguous",
            seconds,
            num_bytes,
            limit,
            of_copy_rate=round(limit / seconds, 3),
        )
    except Exception as error:
        print(f"{name} cuDNN: {type(error).__name__}: {str(error)[:200]}", flush=True)


def shared(report: Report, shape: str, rate: float, args) -> None:
    """32 groups of 8 samples: 15 pages that a group shares, and one of each sample's own."""
    groups, size, prefix = 32, 8, 15
    q, cache = draw(shape, groups * size, groups * (prefix + size))
    ids = np.random.default_rng(1).permutation(groups * (prefix + size)).reshape(groups, -1)
    tables = [[*group[:prefix], group[prefix + i]] for group in ids for i in range(size)]
    rows = pa.TILE // pa.padded(HEADS[shape][1])
    ends = [(prefix + 1) * PAGE] * len(tables)
    K, num_bytes = HEADS[shape][0], 2 * cache[0].nbytes
    tuning, scores = tuning_of(args.stages[0]), pa.Scores(HEAD_DIM**-0.5)
    attend = partial(hopper.attend, tuning=tuning)
    for run in (2, 4, 8, 15):
        items = pa.shared_items(tables, ends, PAGE, rows, run)
        items = jax.tree.map(jnp.asarray, items)
        run_items = partial(pa.paged_attention, scores=scores, attend=attend)
        seconds = timed(run_items, q, cache, items)
        name = f"{shape} 32 groups of 8, 960 shared + 64, items of {run} pages"
        report.add(name, seconds, num_bytes, num_bytes / rate,
                   blocks=K * len(items.span))  # fmt: skip


def timed(run, q, *arrays) -> float:
    """Seconds of one call of run(q, *arrays), of STEPS that depend on each other in one program."""

    def steps(q, *arrays):
        def step(q, _):
            out = run(q, *arrays)
            return (q + 0.001 * out.astype(q.dtype)).astype(q.dtype), None

        return lax.scan(step, q, None, length=STEPS)[0]

    program = jax.jit(steps)
    return median_s(lambda: program(q, *arrays)) / STEPS


def stream(q, cache, items: pa.Items, stages: int):
    """Waits for every page of every item, and reads one number of it."""
    B, H, Dh = q.shape
    K, page = cache[0].shape[2], cache[0].shape[1]
    num_rows = pa.TILE // pa.padded(H // K)
    header = hopper._header(items, num_rows)

    def body(k, v, items, out, header, keys, values, told, has_key, has_value):
        head, item = lax.axis_index("head"), lax.axis_index("item")
        plgpu.copy_gmem_to_smem(items.at[item], header, told)
        plgpu.barrier_wait(told)
        steps = lax.div(header[0, 1] + (page - 1), jnp.int32(page))

        def load(step):
            slot = lax.rem(step, jnp.int32(stages))
            at = hopper.HEADER + num_rows + step
            where = header[lax.div(at, jnp.int32(hopper.LINE)), lax.rem(at, jnp.int32(hopper.LINE))]
            plgpu.copy_gmem_to_smem(k.at[where, :, head], keys.at[slot], has_key.at[slot])
            plgpu.copy_gmem_to_smem(v.at[where, :, head], values.at[slot], has_value.at[slot])

        lax.fori_loop(0, lax.min(jnp.int32(stages), steps), lambda i, _: load(i), None)

        def step(i, _):
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(has_key.at[slot])
            plgpu.barrier_wait(has_value.at[slot])
            plgpu.commit_smem()
            pl.when(i + stages < steps)(lambda: load(i + stages))

        lax.fori_loop(0, steps, step, None)
        plgpu.copy_smem_to_gmem(header, out.at[item, head])
        plgpu.wait_smem_to_gmem(0)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    ring = plgpu.SMEM((stages, page, Dh), jnp.bfloat16, transforms=tiled)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((header.shape[0], K, *header.shape[1:]), jnp.int32),
        grid=(K, header.shape[0]),
        grid_names=("head", "item"),
        scratch_types=[
            plgpu.SMEM(header.shape[1:], jnp.int32), ring, ring, plgpu.Barrier(num_arrivals=1),
            *[plgpu.Barrier(num_arrivals=1, num_barriers=stages)] * 2,
        ],
    )  # fmt: skip
    shift = lax.convert_element_type(q[0, 0, 0] * 0, jnp.int32)  # one call waits for another
    return q + kernel(*cache, header + shift)[0, 0, 0, 0].astype(q.dtype) * 0


if __name__ == "__main__":
    main()
