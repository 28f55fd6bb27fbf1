"""Servers round a FakeEngine in processes of their own: what a server_process builds where a test names `make`, and the
specs of such servers.

job: kind, name, engine (EngineSettings as a tree), serve (ServeSettings as a tree), block_s (how long a block takes),
die_at_block (the engine raises there; 0 = never), num_compile_steps, compile_s (each step's), ballast, axes and device
(as FakeEngine's), dump (a folder in which each commit leaves the bytes of what it swaps in, as NAME.npz, and raises
while a file NAME.refuse lies there; "" = none).
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kernels.kv import KVSpec
from rl_jax import schema
from rl_jax.mesh import abstract_mesh
from rl_jax.remote.spec import ServerSpec
from rl_jax.serve import DecodeServer, PrefillServer
from rl_jax.settings import EngineSettings, ServeSettings
from rl_jax.testing.fake_engine import FakeEngine, ballasted

FACTORY = "rl_jax.testing.fake_servers:make"


def make(job: Mapping[str, Any]) -> DecodeServer | PrefillServer:
    """The server that `job` describes, with an engine that can be slow, or die."""
    errors: list[str] = []
    settings = schema.build(EngineSettings, job["engine"], "engine", errors)
    serve = schema.build(ServeSettings, job["serve"], "serve", errors)
    assert not errors, errors

    began_s = 0.0

    def before_block(engine: FakeEngine) -> None:
        nonlocal began_s
        # Of the block before, if it was just now.
        left_s = began_s + job["block_s"] - time.monotonic()
        time.sleep(left_s if left_s > 0 else job["block_s"])
        began_s = time.monotonic()
        if engine.num_blocks + 1 == job["die_at_block"]:
            raise RuntimeError(f"told to die at block {engine.num_blocks + 1}")

    engine = FakeEngine(
        settings,
        name=job["name"],
        before_block=before_block,
        device=job["device"],
        ballast=job["ballast"],
        axes=job["axes"],
    )
    if job["dump"]:
        engine.pack = lambda params: _dumped(params, Path(job["dump"]) / f"{job['name']}.npz")
    engine.num_compile_steps = job["num_compile_steps"]
    engine.before_compile = lambda engine: time.sleep(job["compile_s"])
    kind = {"prefill": PrefillServer, "decode": DecodeServer}[job["kind"]]
    return kind(job["name"], job["kind"], engine, serve)


def _dumped(params: dict[str, Any], path: Path) -> dict[str, Any]:
    """Each weight as u8[bytes] of its elements in row-major order, whatever its sharding."""
    if path.with_suffix(".refuse").exists():
        raise RuntimeError(f"told to refuse by {path.with_suffix('.refuse').name}")
    whole = {name: np.ascontiguousarray(np.asarray(x)) for name, x in params.items()}
    np.savez(path, **{name: x.reshape(-1).view(np.uint8) for name, x in whole.items()})
    return params


def fake_spec(
    name: str, kind: str, engine: EngineSettings, serve: ServeSettings, **job: Any
) -> ServerSpec:
    """Of a server that `make` makes. job: what differs from an engine that is quick and lives."""
    lively = {"block_s": 0.0, "die_at_block": 0, "num_compile_steps": 2, "compile_s": 0.0}
    job = lively | {"ballast": {}, "axes": {}, "device": 0, "dump": ""} | job
    mesh = abstract_mesh(job["axes"])
    return ServerSpec(
        name=name,
        pool=kind,
        kind=kind,
        tags=(),
        hardware="cpu",
        template_sha256="",
        mesh=mesh,
        param_shardings=ballasted(job["ballast"], mesh),
        engine=engine,
        kv=KVSpec(1, 1, 1, engine.page_tokens, engine.cache_pages, "float32"),
        serve=serve,
        factory=FACTORY,
        job={"kind": kind, "name": name, "engine": asdict(engine), "serve": asdict(serve)} | job,
        num_devices=math.prod(job["axes"].values()),
    )
