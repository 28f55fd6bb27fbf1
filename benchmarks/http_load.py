"""The HTTP edge under load: ten times too many clients, 20,000 requests, a real model beside its bare program.

    python -m benchmarks.http_load overload      429s: how fast; answers: as many as at the peak?
    python -m benchmarks.http_load soak          20,000 requests of all kinds: what is left behind?
    python -m benchmarks.http_load model DIR     tokens/s at 1, 8, 32 requests: over HTTP, by the router alone, and of
                                                 the decode program alone, which computes no prompt and tells nobody

overload and soak: the real server on a socket, in this process, round a DecodeServer with a FakeEngine whose blocks
take a fixed time; the clients are another process, so that their work is not the server's. Figures go to
benchmarks/results/http_load.json, each part under its name.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "results" / "http_load.json"
SERVED_S = 10.0  # of each load
BLOCK_S = 0.02
ASK = {"prompt": "hello", "max_tokens": 32, "ignore_eos": True}


# --- clients ---


async def post(
    port: int, body: Any, path: str = "/v1/completions", leave_s: float | None = None
) -> tuple[int, bytes]:
    """(status, the rest) of one request on a connection of its own. leave_s: go away after so long."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        if leave_s is not None:
            await asyncio.sleep(leave_s)
            return 0, b""
        said = await asyncio.wait_for(reader.read(), 60)
        return int(said.split(b" ", 2)[1]), said
    finally:
        writer.transport.abort()


async def closed_loop(port: int, num_clients: int, seconds: float) -> dict[str, Any]:
    """So many clients, each asking again once it is answered; after a 429 it waits a tenth of a second."""
    end, took, counts = time.monotonic() + seconds, {200: [], 429: []}, Counter()

    async def client(i: int) -> None:
        await asyncio.sleep(i * 0.5 / num_clients)  # connections are not all made at once
        while time.monotonic() < end:
            start = time.monotonic()
            status, _ = await post(port, {**ASK, "seed": i})
            counts[status] += 1
            took.setdefault(status, []).append(time.monotonic() - start)
            if status == 429:
                await asyncio.sleep(0.1)

    start = time.monotonic()
    await asyncio.gather(*(client(i) for i in range(num_clients)))
    no = sorted(took[429]) or [0.0]
    return {
        "clients": num_clients,
        "answers_per_s": round(counts[200] / (time.monotonic() - start), 2),
        "statuses": {str(k): v for k, v in counts.items()},
        "answer_p50_s": round(statistics.median(took[200]), 4),
        "reject_p50_ms": round(1000 * no[len(no) // 2], 2),
        "reject_p99_ms": round(1000 * no[min(len(no) - 1, int(0.99 * len(no)))], 2),
    }


async def all_kinds(port: int, num: int, together: int) -> dict[str, int]:
    """Requests of all kinds, some of which leave; how each ended."""
    rng, counts, left = random.Random(0), Counter(), iter(range(num))

    async def client() -> None:
        for _ in left:
            kind = rng.random()
            body: dict[str, Any] = {
                **ASK,
                "max_tokens": rng.randint(1, 24),
                "prompt": "x" * rng.randint(1, 200),
            }
            if kind < 0.15:
                body |= {"stream": True}
            elif kind < 0.3:
                body |= {"n": rng.randint(2, 4), "logprobs": 1}
            elif kind < 0.4:
                body |= {"session_id": f"s{rng.randint(0, 99)}"}
            elif kind < 0.5:
                body |= {"max_tokens": 10**9}
            leave_s = rng.random() * 0.03 if kind > 0.85 else None
            status, said = await post(port, body, leave_s=leave_s)
            if body.get("stream") and status == 200 and b"[DONE]" not in said:
                status = -1
            counts["left" if leave_s is not None else str(status)] += 1

    await asyncio.gather(*(client() for _ in range(together)))
    return dict(counts)


def elsewhere(work: Any, *given: Any) -> Any:
    """What the coroutine function returns, run in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_run, (work, *given))


def _run(work: Any, *given: Any) -> Any:
    return asyncio.run(work(*given))


# --- what is measured ---


def overload() -> dict[str, Any]:
    world, close = make()
    world.pace.block_s = BLOCK_S
    peak = elsewhere(closed_loop, world.port, world.api._slots + world.limits.queue // 2, SERVED_S)
    over = elsewhere(
        closed_loop, world.port, 10 * (world.api._slots + world.limits.queue), SERVED_S
    )
    left = world.gauges()
    close(world)
    share = round(over["answers_per_s"] / peak["answers_per_s"], 3)
    return {"peak": peak, "ten_times": over, "goodput_share": share, "left_behind": left}


def soak(num: int = 20_000) -> dict[str, Any]:
    world, close = make()
    rows = []

    def look(when: str) -> None:
        time.sleep(1.5)
        status = Path("/proc/self/status").read_text()
        rss = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        stats = world.server.stats()
        rows.append({
            "when": when, "rss_kib": rss, "descriptors": len(os.listdir("/proc/self/fd")),
            "free_slots": stats["free_slots"], "sessions": stats["sessions"],
            "held_pages": world.server._paging.num_held,
            "choices": world.api.num_choices, "connections": len(world.planes.public.server_state.connections),
        })  # fmt: skip

    elsewhere(all_kinds, world.port, 1000, 5)  # what is made once is made
    look("after 1,000")
    start = time.monotonic()
    ended = elsewhere(all_kinds, world.port, num, 5)
    seconds = time.monotonic() - start
    look(f"after {num:,} more")
    figures = {"requests": num, "seconds": round(seconds, 1), "ended": ended, "rows": rows}
    close(world)
    return figures


def make() -> tuple[Any, Any]:
    from rl_jax.backend import simulate_cpu_devices

    simulate_cpu_devices(1)
    from rl_jax.testing.http_world import close, make_world

    return make_world(), close


def model(directory: str) -> dict[str, Any]:
    """Tokens/s of greedy answers of 64 tokens."""
    from rl_jax.tools import serve

    args = serve.parser().parse_args(
        [directory, "--context=512", "--slots=32", "--port=0", "--admin_port=0"]
    )
    settings, limits, _ = serve.check(args)
    from rl_jax import backend
    from rl_jax.mesh.plan import MeshPlan

    backend.avoid_broken_fusions()
    backend.simulate_cpu_devices(1)
    backend.enable_compile_cache()
    from rl_jax.serving import Service

    service = Service(
        settings, MeshPlan.from_settings(settings.mesh, settings.model), "model", limits
    )
    service.start()
    out: dict[str, Any] = {"model": Path(directory).name, "tokens": 64, "rows": []}
    out["load_before"] = round(os.getloadavg()[0], 1)  # of this host, of whatever runs beside it
    (server,) = service.cluster.decode

    async def run() -> None:
        started = asyncio.Event()
        planes = service.planes(
            ("127.0.0.1", 0), ("127.0.0.1", 0), on_started=lambda planes: started.set()
        )
        task = asyncio.create_task(planes.run(with_signals=False))
        await started.wait()
        for num in (1, 8, 32):
            rates = []
            for _ in range(2):
                # The server is idle: its engine's programs may run for somebody else.
                rates.append(program_rate(server, num))
                for over_http in (False, True):
                    start, port = time.monotonic(), planes.public.port
                    await asyncio.gather(*(one(port, i, over_http) for i in range(num)))
                    rates.append(round(num * 64 / (time.monotonic() - start), 1))
            best = {name: max(rates[i::3]) for i, name in enumerate(("program", "router", "http"))}
            out["rows"].append({"together": num, **best, "all": rates})
        planes.stop()
        await task

    async def one(port: int, i: int, over_http: bool) -> None:
        prompt = [100 + i, *range(200, 231)]
        if over_http:
            body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
            status, said = await post(port, body)
            assert status == 200, said[-300:]
        else:
            await service.cluster.router.generate(bare(prompt, i))

    def bare(prompt: list[int], i: int) -> Any:
        import numpy as np

        from rl_jax.types import TurnRequest

        return TurnRequest(
            uid=f"bare{i}.{random.random()}", attempt=0, turn=0, tokens=np.array(prompt, np.int32), temperature=0.0,
            top_p=1.0, top_k=0, max_new_tokens=64, stop_token_ids=(), stop=(), seed=0, tag="", deadline_s=300.0,
        )  # fmt: skip

    asyncio.run(run())
    service.close()
    return out


def program_rate(server: Any, num: int) -> float:
    """Tokens/s of the server's decode program for so many slots, over 64 tokens each behind 32."""
    import jax
    import numpy as np

    from kernels.kv import NO_PAGE
    from rl_jax.types import SlotSampling

    engine, slots = server.engine, np.arange(num, dtype=np.int32)
    size = engine.settings
    whole = lambda value, dtype=np.int32: np.full(num, value, dtype)
    state = engine.arm(engine.init_state(), slots, SlotSampling(
        whole(100), whole(32), whole(0, np.uint64), whole(0), whole(10_000), whole(0, np.float32),
        whole(1, np.float32), whole(0), np.full((num, size.num_stop_tokens), -1, np.int32), whole(0),
    ))  # fmt: skip
    tables = np.full((size.slots, size.table_pages), NO_PAGE, np.int32)
    each = engine.spec.pages_of(32 + 64 + size.steps_per_block)
    tables[:num, :each] = np.arange(num * each).reshape(num, each)
    start = 0.0
    for block in range(64 // size.steps_per_block + 1):
        if block == 1:  # the first one is not measured
            start = time.monotonic()
        state, made = engine.generate(server._params, state, tables)
        jax.block_until_ready(made.tokens)
    return round(num * 64 / (time.monotonic() - start), 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("overload", "soak", "model"))
    parser.add_argument("directory", nargs="?", default=".cache/smollm2")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    figures = {
        "overload": overload,
        "soak": lambda: soak(args.requests),
        "model": lambda: model(args.directory),
    }[args.part]()
    known = json.loads(args.out.read_text()) if args.out.is_file() else {}
    args.out.write_text(json.dumps({**known, args.part: figures}, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
