"""What our HTTP services share at their edge: who may ask, and where, and bounded bodies.

A service on loopback needs no token, as only this host's users reach it; so does any page in their browsers. Two ways:
a form or fetch to http://127.0.0.1:PORT, which the browser marks with the page's Origin, and a name of the page's own
that is made to mean 127.0.0.1 (DNS rebinding), which stands in Host. A page that a service serves itself has the
service's own Host as its Origin. With a token neither is of use, as the page does not know it.
Headers are ASGI's, their names in lower case.
"""

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

MAX_TOKEN = 4096  # bytes of a token file
NO_TOKEN = "no such token; send Authorization: Bearer TOKEN"
Receive = Callable[[], Awaitable[Mapping[str, Any]]]


class BadBody(Exception):
    """A request's body that is not taken."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status, self.detail = status, detail


def is_loopback(host: str) -> bool:
    """host: an address or a name, without a port."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def cannot_listen(host: str, port: int) -> str:
    """Why nobody can listen there now; "" if one can. port: 0 = any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def read_token(path: str, named: str) -> str:
    """The one line of a token file; "" for no file. named: what says the path. Raises: ValueError, with both."""
    if not path:
        return ""
    try:
        with Path(path).open("rb") as file:
            token = file.read(MAX_TOKEN + 1).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{named}={path} cannot be read: {error}") from None
    if not token or len(token) > MAX_TOKEN or not token.isprintable():
        raise ValueError(
            f"{named}={path} is no token; it holds one line of ASCII, at most {MAX_TOKEN} bytes"
        )
    return token


def refusal(headers: Mapping[bytes, bytes], has_token: bool) -> str | None:
    """Why such a request is not answered (403); None where it may be."""
    origin, host = headers.get(b"origin"), headers.get(b"host", b"")
    if origin is not None and origin.partition(b"://")[2] != host:
        shown = origin[:80].decode("latin-1")
        return f"Origin is {shown!r}: pages of other sites are not answered"
    if host and not has_token and not is_loopback(_name_of(host.decode("latin-1"))):
        shown = host[:80].decode("latin-1")
        return f"Host is {shown!r}: without a token only loopback is answered; use 127.0.0.1, or give a token file"
    return None


def knows(headers: Mapping[bytes, bytes], token: bytes) -> bool:
    """Whether the caller sent the token, compared in constant time; b"" = none is needed. If not: 401, NO_TOKEN."""
    return not token or hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + token)


async def read_body(
    receive: Receive, headers: Mapping[bytes, bytes], max_bytes: int, limit_s: float
) -> bytes:
    """Raises: BadBody 408 or 413; ConnectionResetError if the caller has gone."""
    too_large = BadBody(413, f"a body of more than {max_bytes} bytes")
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            while True:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ConnectionResetError
                body += event.get("body", b"")
                if len(body) > max_bytes:
                    raise too_large
                if not event.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise BadBody(408, f"no whole body within {limit_s:g} s") from None


def _name_of(host: str) -> str:
    """Host without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] or host
