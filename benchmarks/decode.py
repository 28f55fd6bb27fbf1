"""Decode: steps of the engine's own `generate` at Qwen2.5-1.5B's shapes against the bytes that a step must read.

    python benchmarks/decode.py                       # one Hopper GPU, 64 and 256 slots
    python benchmarks/decode.py --ways engine "XLA products" plain        # other ways beside it
    python benchmarks/decode.py --window 512          # every second layer sees the last 512 tokens only
    python benchmarks/decode.py --profile out.json    # also kernel times of one block each
    python benchmarks/decode.py --tiny                # CPU: that it runs; its times mean nothing

What runs is `JaxEngine.generate` on packed random bfloat16 weights and a full set of slots at ragged contexts about
1,000 tokens long, temperature 1, log-probs on, in blocks of 32 steps: sampled tokens feed the next step.
Limit: every weight read once and the live KV of all slots (of layers with a window, what lies in it), over the best
copy rate of the card in the same run (bytes read and bytes written). Target: 80 % of it with 64 slots, 85 % with 256.
Before anything is timed the step's attention is checked against float64, and the first step's log-probs against the
portable path. No program may be compiled while blocks are timed, and the compiled block may hold no second cache.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.served_model import begin, draw  # noqa: E402
from rl_jax.settings import EngineSettings  # noqa: E402

CONTEXT, LONGEST, SPREAD = (
    1280,
    944,
    80,
)  # of the cache; the longest context at start, and the shortest below it
STEPS, BLOCKS = 32, 5

WAYS = ("engine", "XLA products", "plain", "triton", "hopper")

# Milliseconds a step, one H100 at 2.9 TB/s (limits 1.72 and 3.70). Earlier runs of this program on such a card gave
# 2.94 and 5.90, with attention's loads three deep, its grid slots first, and every product by XLA: of the step of 64
# slots 37.5 us a layer were attention, 6.1 the sums of products that XLA had cut in parts, 1.9 SwiGLU's end.
PREDICTIONS = {
    "64 slots": 2.45,  # attention 31 us, no sums and no SwiGLU by themselves: 14 us a layer and 5 kernels fewer
    "256 slots": 5.7,  # heads side by side read the same pages: attention 120 -> 113 us
    "64 slots, XLA products": 2.7,
    # Few slots, one H200 (4.05 TB/s), where Triton's kernel had taken 1.86, 2.10, 2.31 and 2.14 and leaves most of the
    # card idle: several parts a slot keep it busy.
    "4 slots, hopper": 1.80,
    "16 slots, hopper": 1.85,
    "32 slots, hopper": 1.95,
    "64 slots, hopper": 2.25,
    # One H200: products, norms and append by XLA (0.5 and 0.6 ms over the kernels' at 64 and 256 slots), a quarter of
    # the KV not read.
    "64 slots, window 512": 2.4,
    "256 slots, window 512": 4.4,
}


def main() -> None:
    args = arguments()
    report, shape = begin(args.out, args.tiny, PREDICTIONS)
    report.head["shape"] = {"model": report.head["shape"], "context": CONTEXT}
    if args.window:
        shape = replace(shape, window=args.window, full_every=2)
        report.head["shape"] |= {"window": args.window, "full_every": 2}
    rate = copy_rate(1 << (22 if args.tiny else 32))
    report.head["copy_gb_per_s"] = round(rate / 1e9, 1)
    profiles, params, drawn = {}, None, None
    for way in args.ways:
        for slots in (4, 8) if args.tiny else args.slots:
            engine = make_engine(shape, slots, way)
            if drawn != engine.served_formats:
                params, drawn = None, engine.served_formats
                params = draw(engine.served, drawn)
            name = f"{slots} slots" + ("" if way == "engine" else f", {way}")
            name += f", window {args.window}" if args.window else ""
            found = measure(engine, params, name, args.profile is not None)
            profiles[name] = found.pop("profile", None)
            num_bytes, seconds = found.pop("bytes"), found.pop("seconds")
            report.add(name, seconds, num_bytes, num_bytes / rate,
                       of_byte_limit=round(num_bytes / rate / seconds, 3), **found)  # fmt: skip
            if args.profile:
                args.profile.write_text(json.dumps(profiles))
            del engine
    report.print_table()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--ways", nargs="+", default=["engine"], choices=WAYS)
    parser.add_argument("--window", type=int, default=0, help="of every second layer; 0 = none")
    parser.add_argument("--profile", type=Path, help="write kernel times of one block here")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/decode.json")
    return parser.parse_args()


def copy_rate(num_bytes: int) -> float:
    """Bytes read and written a second, the best of two programs; calls follow each other without a wait."""
    import jax
    import jax.numpy as jnp

    from benchmarks.report import median_s

    x = jnp.ones(num_bytes // 4, jnp.float32)
    programs = [jax.jit(lambda x: x + 1), jax.jit(jnp.copy)]
    seconds = min(median_s(lambda f=f: [f(x) for _ in range(4)]) / 4 for f in programs)
    return 2 * x.nbytes / seconds


def make_engine(shape, slots: int, way: str):
    """way: the engine's own, or a part of it replaced by another."""
    import jax

    import kernels.decode_rows
    from rl_jax.engine import JaxEngine
    from rl_jax.engine.attention import HOPPER, PLAIN, TRITON
    from rl_jax.mesh import SERVE_RULES, make_mesh
    from rl_jax.models.decoder import build_model

    settings = EngineSettings(
        slots=slots, context=CONTEXT, steps_per_block=STEPS, chunk_sizes=(64,), chunk_requests=4
    )
    model = build_model(shape, shape.vocab_size)
    engine = JaxEngine(model, make_mesh({}, jax.devices()[:1]), SERVE_RULES, settings, "decode")
    others = {"plain": PLAIN, "triton": TRITON, "hopper": HOPPER}
    if way in others:
        engine.step = replace(engine.step, attention=others[way])
        engine._compile()
    kernels.decode_rows.MOST_ROWS = 0 if way == "XLA products" else 128
    if way == "XLA products" and engine.step.attention.rows is not None:
        attention = replace(engine.step.attention, rows=None)
        engine.step = replace(engine.step, attention=attention)
        engine.served_formats = {
            n: getattr(f, "sharding", f) for n, f in engine.served_formats.items()
        }
        engine._compile()
    return engine


def armed_state(engine):
    """All slots at ragged contexts over a random cache."""
    import jax
    import numpy as np

    from rl_jax.engine.state import DecodeState
    from rl_jax.types import SlotSampling

    S, rng = engine.settings.slots, np.random.default_rng()
    shape, dtype = engine.spec.shape, engine.dtype
    place = engine.init_state().kv[0][0].sharding
    fill = jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=place)
    keys = jax.random.split(jax.random.key(1), 2 * engine.spec.num_layers)
    kv = tuple((fill(keys[2 * i]), fill(keys[2 * i + 1])) for i in range(engine.spec.num_layers))
    state = DecodeState(kv, engine.init_state().slots)
    full = lambda value, dtype: np.full(S, value, dtype)
    sampling = SlotSampling(
        last_token=rng.integers(0, engine.model.vocab_size, S).astype(np.int32),
        context_length=rng.integers(LONGEST - SPREAD, LONGEST, S).astype(np.int32),
        seed=np.arange(S, dtype=np.uint64), token_index=full(0, np.int32),
        max_new_tokens=full(10**6, np.int32), temperature=full(1, np.float32),
        top_p=full(1, np.float32), top_k=full(0, np.int32),
        stop_token_ids=np.full((S, engine.settings.num_stop_tokens), -1, np.int32),
        epoch=full(0, np.int32),
    )  # fmt: skip
    return engine.arm(state, np.arange(S, dtype=np.int32), sampling)


def scattered_tables(engine):
    """i32[S, N]: every slot's pages, anywhere in the cache."""
    import numpy as np

    order = np.random.default_rng(0).permutation(engine.spec.num_pages)
    return order.reshape(engine.settings.slots, -1).astype(np.int32)


def measure(engine, params, name: str, with_profile: bool) -> dict:
    import time

    import jax
    import numpy as np

    from benchmarks.kernel_times import kernel_times

    errors = check(engine, params, name)
    state, tables = armed_state(engine), scattered_tables(engine)
    start = time.perf_counter()
    compiled = engine._generate.lower(params, state, tables).compile().memory_analysis()
    compile_s = time.perf_counter() - start
    held = [state]

    def block():
        held[0], made = engine.generate(params, held[0], tables)
        return made

    for _ in range(2):
        jax.block_until_ready(block().tokens)
    before, programs = int(held[0].slots.context_length.sum()), engine._generate._cache_size()
    times = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        made = block()
        jax.block_until_ready(made.tokens)
        times.append((time.perf_counter() - start) / STEPS)
    after = int(held[0].slots.context_length.sum())
    assert np.asarray(made.valid).all() and not np.asarray(made.nan).any()
    assert engine._generate._cache_size() == programs == 1, "a block was compiled again"
    weights = sum(x.nbytes for x in params.values())
    found = {
        "seconds": sorted(times)[len(times) // 2],
        "bytes": weights + live_bytes(engine, (before + after) / 2),
        "spread_ms": round((max(times) - min(times)) * 1e3, 3),
        "attention": engine.step.attention.name,
        "mean_context": round((before + after) / 2 / engine.settings.slots, 1),
        "temp_gb": round(compiled.temp_size_in_bytes / 1e9, 3),
        "cache_gb": round(engine.spec.num_bytes / 1e9, 3),
        "aliased_gb": round(compiled.alias_size_in_bytes / 1e9, 3),
        "compile_s": round(compile_s, 1),
        **errors,
    }
    if with_profile:
        found["profile"] = kernel_times(lambda: jax.block_until_ready(block().tokens))
    return found


def live_bytes(engine, tokens: float) -> float:
    """KV that a step reads of contexts of so many tokens in all, nearly equal in length."""
    from rl_jax.models.features import form_of

    settings, slots = engine.model.settings, engine.settings.slots
    windows = [form_of(settings, layer).window for layer in range(settings.num_layers)]
    seen = sum(min(w * slots, tokens) if w else tokens for w in windows)
    return engine.spec.token_bytes * seen / settings.num_layers


def check(engine, params, name: str) -> dict:
    """The largest error of the step's attention against float64, and `logprob_errors`.

    Raises: AssertionError beyond rounding to bfloat16.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rl_jax.models.features import Form

    window = engine.model.settings.window
    rng = np.random.default_rng()
    pages, page, K, Dh = engine.spec.shape
    S, T, H = engine.settings.slots, engine.settings.context, engine.model.settings.num_heads
    tables = scattered_tables(engine)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), engine.dtype)
    q, new = draw(S, H, Dh), (draw(S, K, Dh), draw(S, K, Dh))
    cache = (draw(pages, page, K, Dh), draw(pages, page, K, Dh))
    position = jnp.asarray(np.minimum(rng.integers(0, T, S), T - 1), jnp.int32).at[0].set(0)
    active = jnp.ones(S, bool).at[1].set(False)
    where = position, active, jnp.asarray(tables)
    form = Form(window=window)
    got, kept = jax.jit(lambda *args: engine.step.attention.of_heads(*args, form))(
        q, new, cache, where
    )
    for old, x, now in zip(cache, new, kept, strict=True):
        want = np.asarray(old).copy()
        rows = np.flatnonzero(np.asarray(active))
        at = np.asarray(position)[rows]
        want[tables[rows, at // page], at % page] = np.asarray(x)[rows]
        assert (want == np.asarray(now)).all(), "the cache holds other than the new k and v"
    worst = 0.0
    for s in np.flatnonzero(np.asarray(active))[:8]:
        n = int(position[s]) + 1
        seen = slice(max(n - window, 0) if window else 0, n)
        k, v = (np.asarray(c[tables[s]], np.float64).reshape(-1, K, Dh)[seen] for c in kept)
        k, v = (np.repeat(x, H // K, axis=1) for x in (k, v))
        scores = np.einsum("hd,thd->ht", np.asarray(q[s], np.float64), k) * Dh**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("ht,thd->hd", weights / weights.sum(-1, keepdims=True), v)
        worst = max(worst, float(np.abs(np.asarray(got[s], np.float64) - out).max()))
    assert worst < 2e-2, f"attention is off by {worst}"
    found = {"attention_error": round(worst, 5)}
    # The cache is held in float32 there, and twice.
    return found | (logprob_errors(engine, params) if S <= 64 else {})


def logprob_errors(engine, params) -> dict:
    """A first step's log-probs against the portable path in float32, of the engine's path and of the portable one."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rl_jax.engine import programs
    from rl_jax.engine.attention import PLAIN
    from rl_jax.models.decoder import build_model

    settings = replace(engine.model.settings, dtype="float32", param_dtype="float32")
    exact = build_model(settings, engine.model.vocab_size).packed
    state = armed_state(engine)
    wide = jax.jit(partial(jax.tree.map, lambda x: x.astype(jnp.float32)))
    ours, portable = (replace(engine.step, attention=a, count=1) for a in (engine.step.attention, PLAIN))  # fmt: skip
    found = []
    for step, model in ((ours, engine.served), (portable, engine.served), (portable, exact)):
        given, given_state = params, state
        if model is exact:
            given, given_state = wide(params), replace(state, kv=wide(state.kv))
        run = jax.jit(partial(programs.generate, model, step=step))
        with jax.default_matmul_precision("highest"):
            made = run(given, given_state, scattered_tables(engine))[1]
            found.append([np.asarray(x)[:, 0] for x in made[:2]])
        del given, given_state
    tokens, logprobs = found[2]
    same = [one[0] == tokens for one in found[:2]]
    assert same[0].mean() > 0.7, f"only {same[0].mean():.0%} of the tokens are the reference's"
    errors = [np.abs(one[1] - logprobs)[s] for one, s in zip(found, same)]
    assert errors[0].mean() < 1.5 * errors[1].mean() + 1e-3, "further off than the portable path"
    return {
        "same_first_tokens": round(float(same[0].mean()), 3),
        "logprob_error": round(float(errors[0].mean()), 5),
        "logprob_error_of_plain": round(float(errors[1].mean()), 5),
    }


if __name__ == "__main__":
    main()
