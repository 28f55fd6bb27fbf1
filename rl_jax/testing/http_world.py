"""The HTTP planes on real sockets, in a thread, over any sampler; make_world puts them before a DecodeServer with a
FakeEngine, so that tests and benchmarks of the edge cost no compile.
"""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from types import SimpleNamespace

from rl_jax.http.admin import Admin, Source
from rl_jax.http.api import Api
from rl_jax.http.app import build_app
from rl_jax.http.asks import Served
from rl_jax.http.limits import HttpLimits
from rl_jax.http.server import Planes, make_server
from rl_jax.serve import DecodeServer, Router
from rl_jax.settings import EngineSettings, ServeSettings
from rl_jax.testing.fake_engine import FakeEngine
from rl_jax.tokens import ByteTokenizer, ChatRenderer
from rl_jax.weights.directory import files_of

PATIENCE_S = 20.0
VOCAB = ByteTokenizer().vocab_size
ENGINE = EngineSettings(
    slots=4, context=512, page_size=8, steps_per_block=4, chunk_sizes=(64, 256), chunk_requests=4,
    num_stop_tokens=4,
)  # fmt: skip
LIMITS = HttpLimits(
    queue=8, body_s=0.5, write_s=1.0, drain_s=1.0, body_bytes=1 << 20, request_s=20.0
)


def until(condition, what="the condition", within_s=PATIENCE_S):
    """Seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + within_s, f"waited in vain for {what}"
        time.sleep(0.002)
    return time.monotonic() - start


class World:
    """Planes in a thread with a loop of its own."""

    def __init__(
        self,
        sampler,
        servers=(),
        *,
        token="",
        admin_token="",
        limits=LIMITS,
        update=None,
        api=None,
        weights=("", ""),
    ):
        """api: in place of one for the byte tokenizer. weights: directory and digest of what is served."""
        served = Served("tiny", ChatRenderer(ByteTokenizer()), ENGINE.context, VOCAB, 4, limits)
        self.sampler, self.servers, self.limits = sampler, servers, limits
        self.api = api or Api(served, sampler, servers, slots=ENGINE.slots, token=token)
        source = Source(update or (lambda *a: {}), files_of, *weights)
        self.admin = Admin(self.api, servers, source, token=admin_token)
        size = limits.header_bytes
        public = make_server(build_app(self.api), "127.0.0.1", 0, size)
        admin = make_server(self.admin, "127.0.0.1", 0, size)
        started = threading.Event()
        self.planes = Planes(self.api, public, admin, on_started=lambda planes: started.set())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert started.wait(PATIENCE_S)
        self.port, self.admin_port = public.port, admin.port
        self.url = f"http://127.0.0.1:{self.port}"

    def _run(self):
        async def main():
            self.loop = asyncio.get_running_loop()
            await self.planes.run(with_signals=False)

        asyncio.run(main())

    def stop(self):
        with contextlib.suppress(RuntimeError):  # it ended
            self.loop.call_soon_threadsafe(self.planes.stop)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    # --- asking -----------------------------------------------------------------------------

    def ask(self, method, path, body=None, headers=None, *, admin=False, timeout=PATIENCE_S):
        """(status, JSON or text, headers)"""
        port = self.admin_port if admin else self.port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        try:
            raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            connection.request(method, path, raw, headers or {})
            answer = connection.getresponse()
            data = answer.read()
            kind = answer.headers.get("content-type", "")
            said = json.loads(data) if kind.startswith("application/json") else data.decode()
            return SimpleNamespace(status=answer.status, body=said, headers=answer.headers)
        finally:
            connection.close()

    def post(self, path, body, headers=None, **named):
        return self.ask("POST", path, body, headers, **named)

    def get(self, path, **named):
        return self.ask("GET", path, **named)

    def events(self, path, body):
        """The JSON of each event of a stream; it ends with [DONE]."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status == 200, answer.body
        lines = [line for line in answer.body.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def open(self, path, body, *, receive_bytes=None):
        """A socket on which the request was sent."""
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(PATIENCE_S)
        sock.connect(("127.0.0.1", self.port))
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n"
        sock.sendall(head.encode() + raw)
        return sock

    def gauges(self):
        stats = [server.stats() for server in self.servers]
        return {
            "choices": self.api.num_choices,
            **{n: sum(s[n] for s in stats) for n in ("running", "waiting", "filling", "sessions")},
            "free_slots": sum(s["free_slots"] for s in stats),
        }

    def is_still(self):
        """Nothing is under way, and every slot is free."""
        now = self.gauges()
        idle = not any(now[n] for n in ("choices", "running", "waiting", "filling"))
        return idle and now["free_slots"] == ENGINE.slots * len(self.servers)


class Pace:
    """Before a block: so many seconds, which a test may change."""

    def __init__(self):
        self.block_s = 0.0

    def __call__(self, engine):
        if self.block_s:
            time.sleep(self.block_s)


def publish(server, version, offset):
    server.stage(f"v{version}", version, 0, server.engine.params(offset))
    server.commit(f"v{version}", "recompute", PATIENCE_S)


class Offsets:
    """An http.admin.Update over FakeEngines: a "directory" is an offset."""

    def __init__(self, servers):
        self.servers = servers

    def __call__(self, directory, version, kv, expected):
        if not directory.lstrip("-").isdigit():
            raise ValueError(f"{directory} has no config.json")
        for server in self.servers:
            publish(server, version, int(directory))
        return {"version": version, "digest": f"{int(directory):064x}"}


def make_world(**named):
    """A DecodeServer with a FakeEngine behind planes; its version 0 has offset 0."""
    pace = Pace()
    engine = FakeEngine(ENGINE, vocab_size=VOCAB, before_block=pace)
    server = DecodeServer("decode.0", "all", engine, ServeSettings(queue_size=64))
    server.start()
    publish(server, 0, 0)
    router = Router([server], [], SimpleNamespace(pools_for=lambda tag: ()))
    world = World(router, (server,), update=Offsets((server,)), **named)
    world.pace, world.engine, world.server = pace, engine, server
    return world


def close(world):
    world.pace.block_s = 0.0
    world.stop()
    world.server.close()
