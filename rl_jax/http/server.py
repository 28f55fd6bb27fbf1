"""The two planes on uvicorn, in one event loop, from their start to a graceful end.

End: 1 SIGTERM or SIGINT. 2 Nothing new is taken: 503, /ready says no. 3 Requests under way have limits.drain_s, then
they are aborted and answered with what was sampled. 4 The sockets close. A second signal goes on at once.
Invariants: what HTTP/1.1 is not gets a 4xx in OpenAI's shape and a closed connection; a connection that sends no whole
head within HEAD_S is closed; one loop, so that no handler of one plane waits for the other's.
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl_jax.http.api import Api
from rl_jax.http.errors import ApiError
from rl_jax.http.transport import encoded

HEAD_S = 15.0
BACKLOG = 2048
MAX_CONNECTIONS = 4096
SEND_BYTES = (
    64 << 10
)  # of a connection that the kernel holds: what a slow reader costs, with as much of ours
CLOSE_S = 2  # for connections to end once their answers are sent
REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class Protocol(H11Protocol):
    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        # How a stream whose client takes nothing is ended, with what waits for it (transport.py).
        self.app_state = {**self.app_state, "abort": lambda: self.transport.abort()}
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_S, self._no_head)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def _no_head(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What h11 refuses: 431 for a head that is too large, else 400."""
        error = sys.exception()
        status = 431 if getattr(error, "error_status_hint", 400) == 431 else 400
        body = encoded(ApiError(status, msg).body())
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (status, REASONS[status], len(body), body)
        )
        self.transport.close()


class Server(uvicorn.Server):
    """Leaves signals to Planes."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def port(self) -> int:
        return self.servers[0].sockets[0].getsockname()[1]


def make_server(app: Any, host: str, port: int, header_bytes: int) -> Server:
    config = uvicorn.Config(
        app, host=host, port=port, http=Protocol, ws="none", lifespan="off", log_level="warning",
        access_log=False, backlog=BACKLOG, timeout_graceful_shutdown=CLOSE_S, server_header=False,
        h11_max_incomplete_event_size=header_bytes,
    )  # fmt: skip
    return Server(config)


@dataclass
class Planes:
    api: Api
    public: Server
    admin: Server
    on_started: Callable[["Planes"], None] = lambda planes: None
    _ends: asyncio.Event = field(default_factory=asyncio.Event)
    _at_once: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """As a signal does; of the event loop."""
        (self._at_once if self._ends.is_set() else self._ends).set()

    async def run(self, *, with_signals: bool = True) -> None:
        """Until stop(). Raises: OSError for a port that cannot be had."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT) if with_signals else ():
            loop.add_signal_handler(number, self.stop)
        servers = (self.public, self.admin)
        tasks = [asyncio.create_task(server.serve()) for server in servers]
        try:
            while not all(server.started for server in servers):
                if ended := [task for task in tasks if task.done()]:
                    ended[0].result()
                    raise OSError("a port cannot be listened on; uvicorn said why")
                await asyncio.sleep(0.01)
            self.on_started(self)
            await self._ends.wait()
            self.api.stopping = "the server is ending"
            settle = asyncio.create_task(self.api.settle(self.api.limits.drain_s))
            at_once = asyncio.create_task(self._at_once.wait())
            await asyncio.wait({settle, at_once}, return_when="FIRST_COMPLETED")
            for task in (settle, at_once):
                task.cancel()
            self.api.abort(None, "the server is ending")
            await self.api.settle(1.0)
        finally:
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*tasks, return_exceptions=True)
            for number in (signal.SIGTERM, signal.SIGINT) if with_signals else ():
                loop.remove_signal_handler(number)
