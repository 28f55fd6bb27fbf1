"""What our HTTP services share at their edge: who may ask, and bounded bodies.

A service on loopback needs no token, as only this host's users reach it; so does any page in their browsers. Two ways:
a form or fetch to http://127.0.0.1:PORT, which the browser marks with the page's Origin, and a name of the page's own
that is made to mean 127.0.0.1 (DNS rebinding), which stands in Host. A page that a service serves itself has the
service's own Host as its Origin. With a token neither is of use, as the page does not know it.
Headers are ASGI's, their names in lower case.
"""

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

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
