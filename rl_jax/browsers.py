"""What a page that a browser has open elsewhere may ask of our HTTP services: nothing.

A service on loopback needs no token, as only this host's users reach it; so does any page in their browsers. Two ways:
a form or fetch to http://127.0.0.1:PORT, which the browser marks with the page's Origin, and a name of the page's own
that is made to mean 127.0.0.1 (DNS rebinding), which stands in Host. A page that a service serves itself has the
service's own Host as its Origin. With a token neither is of use, as the page does not know it.
"""

import ipaddress
from collections.abc import Mapping


def is_loopback(host: str) -> bool:
    """host: an address or a name, without a port."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def refusal(headers: Mapping[bytes, bytes], has_token: bool) -> str | None:
    """Why such a request is not answered (403); None where it may be. headers: ASGI's, names in lower case."""
    origin, host = headers.get(b"origin"), headers.get(b"host", b"")
    if origin is not None and origin.partition(b"://")[2] != host:
        shown = origin[:80].decode("latin-1")
        return f"Origin is {shown!r}: pages of other sites are not answered"
    if host and not has_token and not is_loopback(_name_of(host.decode("latin-1"))):
        shown = host[:80].decode("latin-1")
        return f"Host is {shown!r}: without a token only loopback is answered; use 127.0.0.1, or give a token file"
    return None


def _name_of(host: str) -> str:
    """Host without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] or host
