"""What generation sees of a weight sync: a real DecodeServer with every slot busy, under `keep` and under `recompute`.

A section of weight_sync.py. Blocks are watched from outside, by polling the server's counter, so the gap round the swap
holds everything a client waits for: the block under way, the swap, the first block under the new weights.
"""

import gc
import statistics
import threading
import time
import zlib
from typing import Any

import numpy as np

from rl_jax.engine.engine import JaxEngine
from rl_jax.mesh import SERVE_RULES
from rl_jax.serve.decode_server import DecodeServer
from rl_jax.settings import EngineSettings, ServeSettings, WeightSettings
from rl_jax.types import TurnRequest
from rl_jax.weights.sync import WeightSync

POLL_S = 0.0002
DEADLINE_S = 120.0
READY_S = 500.0  # compiling 28 layers written out
FILLED = ("prefill_tokens", "append_tokens")


def bench_pause(w: Any, bucket_bytes: int) -> None:
    """Rows "keep: ..." and "recompute: ..."; w: the World of weight_sync.py."""
    slots, prompt, new, context = (4, 24, 90, 128) if w.tiny else (32, 512, 500, 1024)
    settings = EngineSettings(
        slots=slots, context=context, steps_per_block=4, chunk_sizes=(32 if w.tiny else 512,)
    )
    engine = JaxEngine(w.model, w.serve, SERVE_RULES, settings, "decode.0")
    server = DecodeServer("decode.0", "decode", engine, ServeSettings())
    server.start()
    server.wait_ready(READY_S)
    # A full collection takes 0.3 s once a model of 28 layers has been traced, and would be taken for a pause.
    gc.collect()
    gc.freeze()
    plan = w.plan(w.train, [server], bucket_bytes)
    for version, kv in ((0, "keep"), (2, "recompute")):
        sync = WeightSync(plan, [server], WeightSettings(kv=kv))
        publish(sync, w.params, version)  # compiles, and gives the server its weights
        watch = Watch(server)
        before = server.stats()
        start = time.perf_counter()
        for i in range(slots):
            server.submit(request(f"{kv}{i}", prompt, new), None, lambda turn: None)
        fill_s = watch.until(lambda s: s["running"] == slots) - start
        filled = server.stats()
        blocks = filled["blocks"] + 8
        watch.until(lambda s, n=blocks: s["blocks"] >= n)
        steady_s = statistics.median(watch.gaps_s(start + fill_s, time.perf_counter()))
        begun = time.perf_counter()
        result = publish(sync, w.params, version + 1)
        swapped = time.perf_counter()
        back_s = watch.until(lambda s: s["running"] == slots) - swapped
        blocks = server.stats()["blocks"] + 4
        watch.until(lambda s, n=blocks: s["blocks"] >= n)
        after = server.stats()
        for i in range(slots):
            server.abort(f"{kv}{i}", "measured")
            server.release(f"{kv}{i}#0")
        watch.until(lambda s: s["sessions"] == 0)
        watch.close()
        sync.close()
        gap_s = max(watch.gaps_s(watch.swap_s, watch.swap_s))
        during = watch.gaps_s(begun, watch.swap_s)
        w.report.add(
            f"{kv}: pause", max(0.0, gap_s - steady_s), swap_ms=round(result.pause_s * 1e3, 3)
        )
        w.report.add(f"{kv}: block, no sync", steady_s)
        w.report.add(f"{kv}: slowest block while staging", max(during[:-1], default=0.0))
        w.report.add(f"{kv}: publish beside generation", swapped - begun, w.num_bytes, w.limit_s)
        if kv == "recompute":
            rate = sum(filled[n] - before[n] for n in FILLED) / fill_s
            rebuilt = after["recompute_tokens"] - before["recompute_tokens"]
            w.report.add(
                "recompute: all slots decode again", back_s, limit_s=rebuilt / rate,
                tokens=rebuilt, prefill_tokens_per_s=round(rate),
            )  # fmt: skip
    server.close()


class Watch:
    """Polls a server from a thread: when each block ended, and when the version changed."""

    def __init__(self, server: DecodeServer):
        self._server, self._stop = server, threading.Event()
        self.swap_s = 0.0
        self._ends: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def until(self, reached) -> float:
        """When the server's stats first satisfied `reached`. Raises: TimeoutError."""
        deadline = time.perf_counter() + DEADLINE_S
        while not reached(self._server.stats()):
            if time.perf_counter() > deadline:
                raise TimeoutError(f"not reached: {self._server.stats()}")
            time.sleep(POLL_S)
        return time.perf_counter()

    def gaps_s(self, start: float, stop: float) -> list[float]:
        """Seconds between the ends of neighbouring blocks, for gaps that touch [start, stop]."""
        ends = self._ends
        return [b - a for a, b in zip(ends, ends[1:]) if b >= start and a <= stop]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        blocks, version = -1.0, self._server.version
        while not self._stop.is_set():
            now = time.perf_counter()
            if self._server.version != version:
                version, self.swap_s = self._server.version, now
            if (seen := self._server.stats()["blocks"]) != blocks:
                blocks = seen
                self._ends.append(now)
            time.sleep(POLL_S)


def publish(sync: WeightSync, params: Any, version: int) -> Any:
    result = sync.publish(params, version)
    if result.state != "PUBLISHED":
        raise RuntimeError(f"{result.state}: {result.detail}")
    return result


def request(uid: str, prompt: int, new: int) -> TurnRequest:
    tokens = (
        np.random.default_rng(zlib.crc32(uid.encode())).integers(8, 256, prompt).astype(np.int32)
    )
    return TurnRequest(
        uid=uid, attempt=0, turn=0, tokens=tokens, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=new,
        stop_token_ids=(), stop=(), seed=1, tag="", deadline_s=DEADLINE_S,
    )  # fmt: skip
