"""A server of HTTP answers that are written out by hand, byte by byte, for tests of who calls one.

`Script` says what the n-th request gets: bytes to write, pauses between them, a connection that is cut. Runs on the
test's own loop. Must not: be reached from another host.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Step = bytes | float | None  # bytes: written; seconds: waited; None: the connection is cut


def answer(said: Any, status: int = 200, *headers: str) -> list[Step]:
    """A whole answer. said: JSON, or bytes as they are."""
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    head = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", *headers]
    return ["\r\n".join(head).encode() + b"\r\n\r\n" + body]


@dataclass
class StubService:
    script: Callable[[int], Sequence[Step]]  # number of the request, from 0 -> what it gets
    bodies: list[bytes] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    num_connections: int = 0

    async def __aenter__(self) -> "StubService":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._served: set[asyncio.Task] = set()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._served:
            task.cancel()
        await asyncio.gather(*self._served, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._served.add(asyncio.current_task())
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = await reader.readexactly(length)
                self.heads.append(head)
                self.bodies.append(body)
                for step in self.script(len(self.bodies) - 1):
                    if step is None:
                        return
                    if isinstance(step, bytes):
                        writer.write(step)
                        await writer.drain()
                    else:
                        await asyncio.sleep(step)
        except (EOFError, OSError):
            return  # the caller has gone
        finally:
            writer.close()
