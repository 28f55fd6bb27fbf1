"""Servers from a request to its last token, at Qwen2.5-1.5B's shapes: the peer's workloads, and a rollout's traffic.

    python benchmarks/serve.py                        # one Hopper GPU: section fixed
    python benchmarks/serve.py --steps 8 16 32        # other numbers of steps a block
    python benchmarks/serve.py --sections closed open  # traffic through a Router, results/serve_traffic.json
    python benchmarks/serve.py --sections closed open --prefill 1  # two GPUs, one of them prefills
    python benchmarks/serve.py --tiny                 # CPU: that it runs; its times mean nothing

Sections closed and open: serve_traffic.py says what is asked, serve_clients.py how, and what is counted. Each kind of
traffic is played by --clients clients in a closed loop, then with Poisson arrivals, at --loads of the conversations a
second that the last closed loop ended, or at --rates. Servers keep their prefix trees between; no run shares tokens
with another.

Section fixed: all requests are submitted at once to an idle server, which prefills (its own chunks) and decodes them;
log-probs are always made. As the peer's program counts: prefill is a run of one token a request, a decode step the rest
of the whole run's time over output - 1. Best of three. Peer: vLLM 0.21 by its own program on the same kind of card; its
figures are in PEER, best of its variants. Targets: decode tokens/s 2.5 times the peer's with log-probs and 2.0 without,
the whole job 1.6 times with log-probs, for 256 prompts of 960 tokens; 128 + 512 in at most 1.7 s on an H200.
"""

import argparse
import gc
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.serve_traffic import Traffic, poisson  # noqa: E402
from benchmarks.served_model import begin, draw  # noqa: E402
from rl_jax.settings import EngineSettings, ServeSettings  # noqa: E402

SECTIONS = ("fixed", "closed", "open")
WORKLOADS = ((64, 960, 128), (256, 960, 128), (256, 128, 512))  # requests, prompt, output
TRAFFIC = (
    Traffic("random", 1024, own=960, output=128),
    Traffic("shared prefix", 1024, own=64, output=128, header=960, group=8),
    Traffic("multi-turn", 512, own=512, output=128, turns=4, says=128),
)
TINY_TRAFFIC = (
    Traffic("random", 12, own=24, output=8),
    Traffic("shared prefix", 12, own=8, output=8, header=32, group=4),
    Traffic("multi-turn", 6, own=16, output=8, turns=3, says=8),
)
DEADLINE_S = 120.0

# vLLM 0.21 on one H100: (ms a step, the same with log-probs, prefill seconds).
PEER = {
    (64, 960, 128): (3.95, 4.18, None),
    (256, 960, 128): (6.97, 12.9, 1.29),
    (256, 128, 512): (10.7, 15.4, None),
}

# Milliseconds of the whole job on one H100: prefill at 205 k tokens/s (short prompts pad more), steps as decode.py
# measured, and 3 ms of the host's work a block of 16 steps and 256 slots that nothing hides.
PREDICTIONS = {
    "64 x 960 + 128": 680.0,
    "256 x 960 + 128": 2000.0,  # 2681 while a block ran after every chunk, 2175 after every second
    "256 x 128 + 512": 2450.0,
    # Tokens to prefill at 205 k/s, and steps of 256 slots, 4.5 to 4.8 ms each, one after the other.
    "closed, 256 clients, random": 7500.0,
    "closed, 256 clients, shared prefix": 3400.0,
    "closed, 256 clients, multi-turn": 7500.0,
}


def positive(kind):
    """An argparse type: a number above 0."""

    def number(text: str):
        if (value := kind(text)) <= 0:
            raise argparse.ArgumentTypeError(f"{text} must be above 0")
        return value

    number.__name__ = kind.__name__  # in argparse's line about what is no number
    return number


def main(words: list[str] | None = None) -> None:
    """words: of the command line; None: this process's."""
    parser = argparse.ArgumentParser()
    count, number = positive(int), positive(float)
    parser.add_argument("--steps", type=count, nargs="+", default=[16], help="decode steps a block")
    parser.add_argument(
        "--only", type=int, nargs="+", default=[0, 1, 2], help="of the workloads, by number"
    )
    parser.add_argument("--sections", nargs="+", default=["fixed"], choices=SECTIONS)
    parser.add_argument("--clients", type=count, nargs="+", help="of closed loops; default 64 256")
    parser.add_argument("--loads", type=number, nargs="+", default=[0.5, 0.8], help="of open loops")
    parser.add_argument("--rates", type=number, nargs="+", help="conversations a second, not loads")
    parser.add_argument("--decode", type=count, default=1, help="decode servers, a device each")
    parser.add_argument("--prefill", type=int, default=0, help="prefill servers, a device each")
    parser.add_argument("--seed", type=int, default=0, help="of traffic and arrivals")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/serve[_traffic].json")
    args = parser.parse_args(words)
    if args.prefill < 0:
        parser.error(f"--prefill {args.prefill} must be 0 or more")
    if "open" in args.sections and "closed" not in args.sections and not args.rates:
        parser.error(
            "an open loop without a closed one needs --rates; give them, or --sections closed open"
        )
    name = "serve.json" if "fixed" in args.sections else "serve_traffic.json"
    out = args.out or ROOT / "benchmarks/results" / name
    report, shape = begin(out, args.tiny, PREDICTIONS, args.decode + args.prefill)
    if "fixed" in args.sections:
        measure_fixed(report, shape, args)
    if {"closed", "open"} & set(args.sections):
        measure_traffic(report, shape, args)
    report.print_table()


def measure_fixed(report, shape, args) -> None:
    arrays = None
    workloads = ((4, 24, 16), (8, 8, 24)) if args.tiny else [WORKLOADS[i] for i in args.only]
    for num, prompt, output in workloads:
        for steps in args.steps:
            server, arrays = make_server(shape, (num, prompt, output), steps, arrays)
            name = f"{num} x {prompt} + {output}" + ("" if steps == 16 else f", blocks of {steps}")
            measure(report, server, name, (num, prompt, output))
            server.close()
            del server
            gc.unfreeze()
            gc.collect()


def measure_traffic(report, shape, args) -> None:
    """Every traffic in every loop, on the same servers."""
    from benchmarks.serve_clients import closed, opened

    traffics = TINY_TRAFFIC if args.tiny else TRAFFIC
    clients = args.clients or ([2, 4] if args.tiny else [64, 256])
    router, decode, servers = make_router(shape, args, traffics, max(clients))
    seeds = iter(range(args.seed * 1000, args.seed * 1000 + 1000))
    talk = lambda traffic: traffic.conversations(shape.vocab_size, next(seeds))
    closed(router, decode, talk(traffics[-1]), max(clients))  # warm
    for traffic in traffics:
        rate = None
        for num in clients if "closed" in args.sections else ():
            run = closed(router, decode, talk(traffic), num)
            rate = traffic.num / run.seconds
            notes = {"conversations_per_s": round(rate, 3), **run.notes()}
            report.add(f"closed, {num} clients, {traffic.name}", run.seconds, **notes)
        if "open" not in args.sections:
            continue
        named = [(f"{rate:g}/s", rate) for rate in args.rates or ()]
        named = named or [(f"load {load:g}", load * rate) for load in args.loads]
        for name, rate in named:
            run = opened(router, decode, talk(traffic), poisson(rate, traffic.num, next(seeds)))
            notes = {"conversations_per_s": round(rate, 3), **run.notes()}
            report.add(f"open, {name}, {traffic.name}", run.seconds, **notes)
    for server in servers:
        server.close()


def make_router(shape, args, traffics, slots: int):
    """(a Router, its decode servers, all servers, ready)."""
    from types import SimpleNamespace

    from rl_jax.serve import DecodeServer, PrefillServer, Router

    context = -(-(max(t.context for t in traffics) + 1) // 64) * 64
    largest = 64 if args.tiny else 16384
    settings = EngineSettings(
        slots=slots,
        context=context,
        page_size=8 if args.tiny else 64,
        steps_per_block=4 if args.tiny else args.steps[0],
        chunk_sizes=(largest // 8, largest),
        chunk_requests=min(32, slots),
    )
    kinds = [DecodeServer] * args.decode + [PrefillServer] * args.prefill
    servers = [
        start_server(kind, shape, settings, device=i, arrays=None)[0]
        for i, kind in enumerate(kinds)
    ]
    gc.collect()
    gc.freeze()
    decode, prefill = servers[: args.decode], servers[args.decode :]
    router = Router(decode, prefill, SimpleNamespace(pools_for=lambda tag: ()))
    return router, decode, servers


def make_server(shape, workload, steps: int, arrays):
    """A server that is ready, and its weights by name (drawn if not given)."""
    from rl_jax.serve import DecodeServer

    num, prompt, output = workload
    context = -(-(prompt + output + 1) // 64) * 64
    largest = min(16384, num * prompt)
    sizes = sorted({max(largest // 8, 16), largest})
    settings = EngineSettings(
        slots=num,
        context=context,
        steps_per_block=steps,
        chunk_sizes=tuple(sizes),
        chunk_requests=min(-(-largest // prompt) + 1, num),
    )
    server, arrays = start_server(DecodeServer, shape, settings, 0, arrays)
    gc.collect()
    gc.freeze()  # as a job does (rl_jax/job.py)
    return server, arrays


def start_server(kind, shape, settings: EngineSettings, device: int, arrays):
    """A server of this kind on one device, ready, and its weights by name (drawn if not given)."""
    import jax

    from rl_jax.engine import JaxEngine
    from rl_jax.mesh import SERVE_RULES, make_mesh
    from rl_jax.models.decoder import build_model

    model, name = build_model(shape, shape.vocab_size), f"{kind.kind}.{device}"
    mesh = make_mesh({}, jax.devices()[device : device + 1])
    engine = JaxEngine(model, mesh, SERVE_RULES, settings, name)
    arrays = arrays or draw(model, engine.param_shardings)
    server = kind(name, kind.kind, engine, ServeSettings())
    server.start()
    server.stage("first", 0, 0, arrays)
    server.commit("first", "keep", DEADLINE_S * 3)
    server.wait_ready(DEADLINE_S * 3)
    return server, arrays


def measure(report, server, name: str, workload) -> None:
    num, prompt, output = workload
    run(server, workload, 2)
    before = server.stats()
    prefill_s, total_s, host_s = None, None, None
    for _ in range(3):
        first, _ = run(server, workload, 1)
        whole, times = run(server, workload, output)
        prefill_s = first if prefill_s is None else min(prefill_s, first)
        if total_s is None or whole < total_s:
            total_s, host_s = whole, times
    decode_s = total_s - prefill_s
    notes = {
        "prefill_s": round(prefill_s, 3),
        "ms_per_step": round(decode_s / (output - 1) * 1e3, 3),
        "decode_tokens_per_s": round(num * (output - 1) / decode_s),
        "tokens_per_s": round(num * output / total_s),
        "host_s": round(host_s["host_s"], 3),
        "blocks": int(host_s["blocks"]),
        "chunks": int(host_s["chunks"]),
    }
    if workload in PEER:
        plain, with_logprobs, prefill = PEER[workload]
        step = decode_s / (output - 1) * 1e3
        notes["decode_over_peer"] = round(plain / step, 2)
        notes["decode_over_peer_with_logprobs"] = round(with_logprobs / step, 2)
        if prefill is not None:
            whole = prefill + with_logprobs / 1e3 * (output - 1)
            notes["job_over_peer_with_logprobs"] = round(whole / total_s, 2)
    assert server.stats()["failed"] == before["failed"]
    report.add(name, total_s, **notes)


def run(server, workload, output: int) -> tuple[float, dict]:
    """(seconds until the last of the requests is answered, what the server counted meanwhile)."""
    import numpy as np

    from rl_jax.types import Turn, TurnRequest

    num, prompt, _ = workload
    rng, done, answers = np.random.default_rng(), threading.Event(), []

    def answered(turn) -> None:
        answers.append(turn)
        if len(answers) == num:
            done.set()

    requests = [
        TurnRequest(
            uid=f"{rng.integers(1 << 62)}", attempt=0, turn=0,
            tokens=rng.integers(10, server.engine.model.vocab_size, prompt).astype(np.int32),
            temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=output, stop_token_ids=(),
            stop=(), seed=i, tag="", deadline_s=DEADLINE_S,
        )
        for i in range(num)
    ]  # fmt: skip
    before = server.stats()
    start = time.perf_counter()
    for request in requests:
        server.submit(request, None, answered)
    assert done.wait(DEADLINE_S), f"not done: {server.stats()}"
    seconds = time.perf_counter() - start
    after = server.stats()
    for turn in answers:
        assert isinstance(turn, Turn) and len(turn.tokens) == output, turn
        assert np.isfinite(turn.logprobs).all()
    for request in requests:
        server.release(f"{request.uid}#0")
    while server.stats()["sessions"]:
        time.sleep(0.001)
    return seconds, {name: after[name] - before[name] for name in after}


if __name__ == "__main__":
    main()
