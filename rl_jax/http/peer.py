"""Weights between two servers: the files that one serves, fetched over its operator's plane by another one.

    GET /admin/weights          {"version", "digest", "files": [{"name", "bytes"}]}
    GET /admin/weights/NAME     the bytes of one of them

Life of a fetch: 1 The peer says what it serves: version, digest, files. 2 Each file goes into a directory of ours. A
name that is a path, more or fewer bytes than were told, more than fits, or a peer that falls silent ends it. 3 Whoever
asked publishes that directory under the peer's digest (weights/directory.py): then every server here holds, bit by bit,
what the peer's servers hold, or nothing has changed.
Must not: follow a redirect, or tell a token to anybody but the host that was named.
"""

import http.client
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rl_jax.http.errors import ApiError
from rl_jax.http.limits import HttpLimits
from rl_jax.http.schemas import Manifest, check_body, read_json

READ = 1 << 20  # bytes at once
MANIFEST_BYTES = 1 << 20


class PeerError(ValueError):
    """Weights that could not be fetched; one line."""


@dataclass(frozen=True)
class Peer:
    """A server whose weights are asked for. url: of its operator's plane. token: that its callers must send, or ""."""

    url: str
    token: str


def fetch(peer: Peer, into: Path, limits: HttpLimits) -> Manifest:
    """The peer's files, in a directory that is there and empty. Raises: PeerError, OSError."""
    end_s = time.monotonic() + limits.peer_s
    connection = _connect(peer.url, limits.peer_idle_s)
    headers = {"authorization": f"Bearer {peer.token}"} if peer.token else {}
    where = f"the peer {peer.url[:200]}"
    try:
        manifest = _manifest(connection, headers, where)
        total = sum(file.bytes for file in manifest.files)
        room = min(limits.peer_bytes, shutil.disk_usage(into).free)
        if total > room or len(manifest.files) > limits.peer_files:
            raise PeerError(
                f"{where} has {len(manifest.files)} files of {total} bytes; {limits.peer_files} and {room} may come"
            )
        for file in manifest.files:
            connection.request("GET", f"/admin/weights/{file.name}", headers=headers)
            answer = connection.getresponse()
            _check(answer, where)
            with (into / file.name).open("xb") as out:
                left = file.bytes
                while data := answer.read(min(READ, left + 1)):
                    left -= len(data)
                    if left < 0 or time.monotonic() > end_s:
                        break
                    out.write(data)
            if left or time.monotonic() > end_s:
                why = f"took more than {limits.peer_s:g} s" if left == 0 else "is cut or too long"
                raise PeerError(f"{where}: {file.name} {why}")
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise PeerError(f"{where} does not answer ({type(error).__name__}: {error})") from None
    finally:
        connection.close()
    return manifest


def _connect(url: str, idle_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    plain = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kinds or not host or not plain:
        raise PeerError(
            f"{url[:200]!r} is no address of an operator's plane; send http://HOST:PORT"
        )
    return kinds[parts.scheme](host, port, timeout=idle_s)


def _manifest(connection: http.client.HTTPConnection, headers: dict, where: str) -> Manifest:
    connection.request("GET", "/admin/weights", headers=headers)
    answer = connection.getresponse()
    _check(answer, where)
    raw = answer.read(MANIFEST_BYTES + 1)
    if len(raw) > MANIFEST_BYTES:
        raise PeerError(f"{where} says more than {MANIFEST_BYTES} bytes of its files")
    try:
        manifest = check_body(Manifest, read_json(raw))
    except ApiError as error:
        raise PeerError(f"{where} says what is no list of files ({error.message})") from None
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise PeerError(f"{where} names a file twice")
    return manifest


def _check(answer: http.client.HTTPResponse, where: str) -> None:
    if answer.status != 200:
        said = " ".join(answer.read(2000).decode("utf-8", "replace").split())[:300]
        raise PeerError(f"{where} answers {answer.status}: {said}")
