"""Log-probs and entropies from hidden states and head: forward and both gradients against the card's matmul rate.

    python benchmarks/linear_logprob.py --peer       # one Hopper GPU
    python benchmarks/linear_logprob.py --tiny       # CPU: that it runs; its times mean nothing

Limit of a row: 8 T D V floating-point operations (forward 2, again 2, two gradients 4; forward alone 2) at the rate
of an 8192^3 bfloat16 product measured in the same run. Target: at least 75 % of it.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import Report, median_s

from kernels.linear_logprob import linear_logprob, linear_logprob_ref
from kernels.linear_logprob_hopper import Hopper, column_stats, logit_gradient

# Logits cost 4.2 ps a pass at D 1536 and 740 TFLOP/s. The portable way moves about 7 ps of float32 logits beside that;
# the kernels add the end of a tile, a tenth of its products if nothing hides it, and float32 sums of the gradients.
PREDICTIONS = {
    "1.5B 16384 portable 1024": 75.0,
    "1.5B 16384 portable 4096": 62.0,
    "1.5B 16384 portable 16384": 60.0,
    "1.5B 16384 kernels": 50.0,
    "1.5B 65536 portable 4096": 248.0,
    "1.5B 65536 kernels": 200.0,
    "7B 16384 portable 4096": 115.0,
    "7B 16384 kernels": 112.0,
}
SHAPES = {"1.5B": (1536, 151936), "7B": (3584, 152064)}


def draw(T: int, D: int, V: int, dtype: Any = jnp.bfloat16, seed: int = 0) -> tuple:
    """(hidden, head, targets, cotangents): logits of standard deviation 2."""
    keys = jax.random.split(jax.random.key(seed), 5)
    hidden = 2 * jax.random.normal(keys[0], (T, D), dtype)
    head = (jax.random.normal(keys[1], (D, V), jnp.float32) * D**-0.5).astype(dtype)
    targets = jax.random.randint(keys[2], (T,), 0, V)
    return hidden, head, targets, tuple(jax.random.normal(k, (T,)) for k in keys[3:])


def both_ways(function: Any, hidden, head, targets, cotangents) -> list:
    """[log-probs, entropies, gradient of hidden, gradient of head]"""
    outputs, pull = jax.vjp(lambda h, w: function(h, w, targets), hidden, head)
    return [*outputs, *pull(cotangents)]


def check(ways: dict[str, Any], D: int, V: int, T: int = 1000) -> None:
    """Every way against float64 on the host, on fresh inputs that are ragged in T and V."""
    case = draw(T, D, V, seed=np.random.default_rng().integers(1 << 30))
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64) for x in case[:2]]
        rest = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), case[2:])
        cotangents = tuple(c.astype(jnp.float64) for c in rest[1])
        want = both_ways(linear_logprob_ref, *wide, rest[0], cotangents)
        want = [np.asarray(x) for x in want]
    for name, function in ways.items():
        got = jax.jit(partial(both_ways, function))(*case)
        got = [np.asarray(x, np.float64) for x in got]
        errors = [
            float(np.linalg.norm(g - w) / np.linalg.norm(w)) for g, w in zip(got, want, strict=True)
        ]
        print(f"error of {name}: " + " ".join(f"{e:.1e}" for e in errors), flush=True)
        limits = (1e-4, 1e-4, 1e-2, 1e-2)  # float32 values, bfloat16 gradients
        assert all(e < limit for e, limit in zip(errors, limits, strict=True)), name


def matmul_rate(report: Report, size: int) -> float:
    """FLOP/s of a bfloat16 product."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in (0, 1))
    repeat = jax.jit(lambda a, b: jax.lax.fori_loop(0, 8, lambda _, x: jnp.dot(x, b), a))
    b = b * size**-0.5
    seconds = median_s(lambda: repeat(a, b), repeats=7) / 8
    rate = 2 * size**3 / seconds
    report.add(f"matmul {size}", seconds, tflops=round(rate / 1e12, 1))
    return rate


def measure(report: Report, rate: float, name: str, function: Any, case: tuple) -> None:
    """Rows of a way: both directions, and forward alone."""
    T, (D, V) = case[2].size, case[1].shape
    programs = {
        "": (8, jax.jit(partial(both_ways, function))),
        " forward": (2, jax.jit(lambda h, w, t, _: function(h, w, t))),
    }
    for suffix, (passes, program) in programs.items():
        try:
            compiled = program.lower(*case).compile()
            seconds = median_s(lambda c=compiled: c(*case))
        except Exception as error:  # a way that does not run is a row, not the end of the run
            report.rows.append({"name": name + suffix, "failed": str(error)[:300]})
            print(name + suffix, "failed:", str(error)[:300], flush=True)
            continue
        flop = passes * T * D * V
        report.add(
            name + suffix,
            seconds,
            limit_s=flop / rate,
            tflops=round(flop / seconds / 1e12, 1),
            of_matmul_rate=round(flop / seconds / rate, 3),
            temporary_gb=round(compiled.memory_analysis().temp_size_in_bytes / 1e9, 3),
        )


def tune(report: Report, rate: float, T: int, D: int, V: int, num_sms: int) -> None:
    """The kernels alone, one setting away from the default each."""
    hidden, head, _, _ = draw(T, D, V)
    rows = [jnp.full((T,), x, jnp.float32) for x in (10.0, 0.5, 0.1)]
    for change in (
        {}, {"cluster": 1}, {"stages": 3}, {"strip": 8}, {"strip": 32},
    ):  # fmt: skip
        hopper = Hopper(num_sms, **change)
        kernels = {
            "stats": jax.jit(lambda h, w, r, o=hopper: column_stats(h, w, 1.0, o)),
            "gradient": jax.jit(lambda h, w, r, o=hopper: logit_gradient(h, w, r, 1.0, o)),
        }
        for kind, kernel in kernels.items():
            try:
                seconds = median_s(lambda k=kernel: k(hidden, head, rows))
            except Exception as error:
                print(kind, change, "failed:", str(error)[:500], flush=True)
                continue
            flop = 2 * T * D * V
            report.add(
                f"tune {kind} {change}", seconds, of_matmul_rate=round(flop / seconds / rate, 3)
            )


def torch_peer(report: Report, rate: float, T: int, D: int, V: int) -> None:
    """What a torch trainer does: all logits, cross-entropy, backward (no entropy)."""
    import torch

    hidden = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = (torch.randn(V, D, device="cuda", dtype=torch.bfloat16) * D**-0.5).requires_grad_()
    targets = torch.randint(V, (T,), device="cuda")

    def step():
        hidden.grad = head.grad = None
        loss = torch.nn.functional.cross_entropy((hidden @ head.T).float(), targets)
        loss.backward()
        torch.cuda.synchronize()

    seconds = median_s(step)
    flop = 6 * T * D * V  # nothing is computed twice
    report.add(
        f"torch cross-entropy {T}",
        seconds,
        tflops=round(flop / seconds / 1e12, 1),
        of_8tdv_rate=round(8 * T * D * V / seconds / rate, 3),
        temporary_gb=round(torch.cuda.max_memory_allocated() / 1e9, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/linear_logprob.json"))
    parser.add_argument("--tiny", action="store_true", help="CPU, small shapes, portable only")
    parser.add_argument(
        "--peer", action="store_true", help="also all logits at once, in jnp and torch"
    )
    parser.add_argument("--tune", action="store_true", help="only the kernels, with other settings")
    parser.add_argument("--num_sms", type=int, default=132)
    parser.add_argument("--chunk", type=int, default=16384, help="positions a chunk of the kernels")
    args = parser.parse_args()
    report = Report(args.out, {} if args.tiny else PREDICTIONS)
    portable = lambda chunk: partial(linear_logprob, temperature=1.0, chunk=chunk)
    kernels = partial(portable(args.chunk), hopper=Hopper(args.num_sms))
    if args.tiny:
        check({"portable": portable(64)}, 64, 300, 100)
        rate = matmul_rate(report, 256)
        measure(report, rate, "tiny portable 64", portable(64), draw(256, 64, 1000, jnp.float32))
    elif args.tune:
        ways = {
            f"kernels cluster {c}": Hopper(args.num_sms, cluster=c, columns=2048) for c in (1, 2)
        }
        for name, hopper in ways.items():
            try:
                check({name: partial(portable(512), hopper=hopper)}, 256, 5000)
            except Exception as error:
                print(name, "failed:", type(error), str(error)[:1500], flush=True)
        rate = matmul_rate(report, 8192)
        tune(report, rate, 16384, 1536, 64 * 256, args.num_sms)
    else:
        check({"portable": portable(512), "kernels": partial(kernels, chunk=512)}, 256, 5000)
        rate = matmul_rate(report, 8192)
        for model, T, chunks in (
            ("1.5B", 16384, (1024, 4096, 16384)), ("7B", 16384, (4096,)), ("1.5B", 65536, (4096,)),
        ):  # fmt: skip
            case = draw(T, *SHAPES[model])
            measure(report, rate, f"{model} {T} kernels", kernels, case)
            for chunk in chunks:
                measure(report, rate, f"{model} {T} portable {chunk}", portable(chunk), case)
            del case
        if args.peer:
            case = draw(4096, *SHAPES["1.5B"])
            measure(report, rate, "1.5B 4096 all logits at once", linear_logprob_ref, case)
            torch_peer(report, rate, 4096, *SHAPES["1.5B"])
    report.print_table()


if __name__ == "__main__":
    main()
