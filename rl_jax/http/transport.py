"""What goes over the wire: bounded bodies in, JSON and event streams out, each with a deadline; and who has gone.

Invariants: an event stream ends with [DONE] or, where it failed, an error event and [DONE]; a client that takes nothing
for write_s loses its stream, and no other's; from the first byte of a request to the last of its answer a client that
goes away is noticed as soon as its connection tells, and what was done for it is cancelled.
Must not: know what a request asks.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rl_jax import asgi
from rl_jax.http.errors import ApiError
from rl_jax.http.limits import HttpLimits

FILE_BYTES = 1 << 20  # of a file, read at once
Scope = Mapping[str, Any]
Send = Callable[[Any], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]


class Gone(Exception):
    """The client went away, or takes nothing more: nobody hears an answer. why: as metrics count it."""

    why = "disconnect"


class TakesNothing(Gone):
    """The client is there, and has read nothing for write_s."""

    why = "slow_reader"


def encoded(value: Any) -> bytes:
    """JSON in ASCII; what JSON cannot hold is an error here, never in a client. Raises: ValueError."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def check_head(scope: Scope, limits: HttpLimits, has_token: bool) -> None:
    """h11 bounds a head that comes in pieces; one that came at once is bounded here. has_token: callers need one.

    Raises: ApiError 431; 403 for what comes from a page of another site.
    """
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    size += sum(len(name) + len(value) for name, value in scope["headers"])
    if size > limits.header_bytes:
        raise ApiError(431, f"a head of more than {limits.header_bytes} bytes")
    if (why := asgi.refusal(dict(scope["headers"]), has_token)) is not None:
        raise ApiError(403, why, None, "cross_site")


def check_token(headers: Mapping[bytes, bytes], token: bytes) -> None:
    """Raises: ApiError 401."""
    if not asgi.knows(headers, token):
        raise ApiError(401, asgi.NO_TOKEN, None, "invalid_api_key")


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limits: HttpLimits) -> bytes:
    """Raises: ApiError 408 or 413; Gone."""
    try:
        return await asgi.read_body(receive, headers, limits.body_bytes, limits.body_s)
    except asgi.BadBody as bad:
        code = "body_too_large" if bad.status == 413 else None
        raise ApiError(bad.status, bad.detail, None, code) from None
    except ConnectionResetError:
        raise Gone from None


async def until_gone(receive: Receive) -> None:
    """Returns when the client has gone. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(work: Awaitable[Any], receive: Receive) -> Any:
    """The work's result. Raises: Gone, once the work is cancelled and has ended; what the work raises."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when="FIRST_COMPLETED")
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def send_json(
    send: Send, status: int, value: Any, headers: Mapping[str, str] | None = None
) -> None:
    await send_bytes(send, status, encoded(value), "application/json", headers)


async def send_bytes(
    send: Send, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None
) -> None:
    told = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    told += [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body})


async def put(send: Send, message: dict[str, Any], limits: HttpLimits) -> None:
    """Raises: TakesNothing."""
    try:
        async with asyncio.timeout(limits.write_s):
            await send(message)
    except TimeoutError:
        raise TakesNothing from None


async def send_file(send: Send, path: Path, limits: HttpLimits) -> None:
    """Raises: OSError before anything is sent; Gone."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        told = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % size)]
        await put(send, {"type": "http.response.start", "status": 200, "headers": told}, limits)
        while size > 0:
            try:
                data = await asyncio.to_thread(file.read, min(size, FILE_BYTES))
            except OSError:
                data = b""
            if not data:
                raise Gone  # cut meanwhile: the connection ends before the length that was told
            size -= len(data)
            body = {"type": "http.response.body", "body": data, "more_body": True}
            await put(send, body, limits)
        await put(send, {"type": "http.response.body", "body": b""}, limits)


async def send_events(
    send: Send, events: AsyncIterator[Any], limits: HttpLimits, headers: Mapping[str, str]
) -> None:
    """An event stream: each value as `data: JSON`, then [DONE]. Raises: TakesNothing."""

    told = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
    told += [(k.encode(), v.encode()) for k, v in headers.items()]
    await put(send, {"type": "http.response.start", "status": 200, "headers": told}, limits)
    try:
        async for value in events:
            line = b"data: " + encoded(value) + b"\n\n"
            await put(send, {"type": "http.response.body", "body": line, "more_body": True}, limits)
    except ApiError as error:
        line = b"data: " + encoded(error.body()) + b"\n\n"
        await put(send, {"type": "http.response.body", "body": line, "more_body": True}, limits)
    await put(send, {"type": "http.response.body", "body": b"data: [DONE]\n\n"}, limits)
