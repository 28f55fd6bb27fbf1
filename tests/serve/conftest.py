"""Servers round a FakeEngine whose blocks a test lets through one by one."""

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rl_jax.serve import DecodeServer, PrefillServer
from rl_jax.serve.commands import Commit
from rl_jax.settings import EngineSettings, ServeSettings
from rl_jax.testing.fake_engine import FakeEngine
from rl_jax.types import TurnError, TurnRequest

PATIENCE_S = 20.0  # nothing here takes long; a hang must not look like a slow machine
SETTINGS = EngineSettings(
    slots=4, context=64, page_size=8, steps_per_block=4, chunk_sizes=(4, 16), chunk_requests=2,
    num_stop_tokens=2, append_limit=8,
)  # fmt: skip
SERVE = ServeSettings(queue_size=16, stop_deadline_s=PATIENCE_S)


class Gate:
    """A FakeEngine's before_block: open, or letting through as many blocks as `step` allows."""

    def __init__(self):
        self.is_open = True
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)

    def __call__(self, engine) -> None:
        if not self.is_open:
            self._arrived.release()
            assert self._permits.acquire(timeout=PATIENCE_S)

    def close(self) -> None:
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        self._permits.release()

    def arrive(self) -> None:
        """Wait until the server stands before a block."""
        assert self._arrived.acquire(timeout=PATIENCE_S)

    def step(self, num_blocks: int = 1) -> None:
        """Let blocks through and wait until the server stands before the next one."""
        for _ in range(num_blocks):
            self._permits.release()
            self.arrive()


class Turns:
    """Submits requests to one server and keeps what came back."""

    def __init__(self, server):
        self.server, self.num_answers = server, {}

    def start(self, request: TurnRequest, prefix=None, on_tokens=None) -> Future:
        future = Future()

        def on_done(result):
            self.num_answers[request.key] = self.num_answers.get(request.key, 0) + 1
            if isinstance(result, TurnError):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.server.submit(request, prefix, on_done, on_tokens)
        return future

    def run(self, request: TurnRequest, prefix=None):
        return self.start(request, prefix).result(PATIENCE_S)


def request(uid="a", tokens=(1, 2, 3), turn=0, **fields) -> TurnRequest:
    defaults = {
        "attempt": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 6,
        "stop_token_ids": (), "stop": (), "seed": 0, "tag": "", "deadline_s": PATIENCE_S,
    }  # fmt: skip
    tokens = np.array(tokens, np.int32)
    return TurnRequest(uid=uid, turn=turn, tokens=tokens, **(defaults | fields))


def stage(server, version: int, offset: int | None = None, sync_id: str | None = None) -> str:
    """Weights of the FakeEngine: offset = version unless given."""
    sync_id = sync_id or f"v{version}"
    params = server.engine.params(version if offset is None else offset)
    server.stage(sync_id, version, 0, params)
    return sync_id


def commit(server, version: int, offset: int | None = None, kv: str = "recompute"):
    return server.commit(stage(server, version, offset), kv, PATIENCE_S)


def commit_later(server, version: int, kv: str = "recompute"):
    """The reply of a commit that stands in the server's inbox when this returns."""
    command = Commit(stage(server, version), kv)
    server._loop.put(command)
    return command.reply


def until(condition, what: str = "the condition") -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.001)


@pytest.fixture
def kit():
    """`decode(...)` and `prefill(...)` start servers that are closed after the test."""
    started = []

    def decode(*, name="decode.0", version=0, pool="decode", tags=(), compiling=False, **changes):
        gate = Gate()
        serve = replace(SERVE, **{n: changes.pop(n) for n in vars(SERVE) if n in changes})
        engine = FakeEngine(replace(SETTINGS, **changes), before_block=gate)
        server = DecodeServer(name, pool, engine, serve, tags=tags)
        started.append((server, gate))
        if compiling:  # the gate stands before each compile, too; the test starts the server
            engine.before_compile = gate
        else:
            server.start()
        if version is not None:
            commit(server, version)
        return SimpleNamespace(server=server, engine=engine, gate=gate, turns=Turns(server))

    def prefill(*, name="prefill.0", version=0, device=1, **changes):
        serve = replace(SERVE, **{n: changes.pop(n) for n in vars(SERVE) if n in changes})
        engine = FakeEngine(replace(SETTINGS, **changes), device=device)
        server = PrefillServer(name, "prefill", engine, serve)
        server.start()
        started.append((server, Gate()))
        if version is not None:
            commit(server, version)
        return server

    yield SimpleNamespace(
        decode=decode,
        prefill=prefill,
        request=request,
        stage=stage,
        commit=commit,
        commit_later=commit_later,
        until=until,
        PATIENCE_S=PATIENCE_S,
        SETTINGS=SETTINGS,
    )
    for server, gate in started:
        gate.open()
        server.close()
