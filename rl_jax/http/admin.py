"""Admin: the plane of whoever runs the server, on a port of its own: loopback, or with a token.

    POST /admin/pause {}  /admin/resume {}      generation stops after the block under way; requests wait
    POST /admin/abort {"request_id"?}           that request, or all, end with finish_reason abort
    POST /admin/drain {"deadline_s"?}           nothing new is taken (503) until resume; waits for what is under way
    POST /admin/update_weights {"directory" | "peer", "peer_token"?, "version"?, "kv"?, "digest"?}
        as of weights/directory.py; peer: http://HOST:PORT of another server's operator's plane
    GET  /admin/weights, /admin/weights/NAME    the files that are served, for such a server (peer.py)
    GET  /admin/status, /admin/digest           versions, fences, what is under way; the digest that is served

Invariants: one update at a time; an update that fails leaves the old version; every call has a deadline; the token is
compared in constant time, and bodies are bounded as the public plane's are.
"""

import asyncio
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rl_jax.http.api import Api
from rl_jax.http.errors import ApiError, bad
from rl_jax.http.peer import Peer, fetch
from rl_jax.http.schemas import DIGEST, Body, Count, Name, check_body, read_json
from rl_jax.http.transport import (
    Gone,
    Receive,
    Scope,
    Send,
    check_head,
    check_token,
    read_body,
    send_file,
    send_json,
)

log = logging.getLogger(__name__)
WEIGHTS = "/admin/weights/"

# (directory, version, kv, expected digest) -> what was published, as JSON; blocking
Update = Callable[[str, int, str, str], Mapping[str, Any]]


@dataclass(frozen=True)
class Source:
    """Where weights come from. `directory` and `digest` are of what is served at the start; "" = not known."""

    update: Update
    files: Callable[
        [Path], Sequence[Path]
    ]  # what another server needs of a directory, to publish it
    directory: str = ""
    digest: str = ""


class Empty(Body):
    """Takes no field."""


class AbortBody(Body):
    request_id: Name | None = None


class DrainBody(Body):
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] | None = None


class UpdateBody(Body):
    directory: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    peer: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    peer_token: Annotated[str, Field(pattern="^[!-~]{1,4096}$")] | None = None
    version: Count | None = None
    kv: Literal["recompute", "keep"] | None = None
    digest: Annotated[str, Field(pattern=DIGEST)] | None = None


class Admin:
    """An ASGI app; of the public plane's event loop."""

    def __init__(self, api: Api, servers: Sequence[Any], source: Source, *, token: str = ""):
        """servers: DecodeServers and PrefillServers."""
        self._api, self._servers = api, tuple(servers)
        self._update, self._files_in = source.update, source.files
        self._token, self._digest = token.encode("ascii"), source.digest
        self._directory, self._peer = source.directory, ""  # where the weights came from
        self._updating = asyncio.Lock()
        self._is_paused = False
        self._routes: dict[tuple[str, str], tuple[type[Body] | None, Callable[[Any], Any]]] = {
            ("POST", "/admin/pause"): (Empty, self._pause),
            ("POST", "/admin/resume"): (Empty, self._resume),
            ("POST", "/admin/abort"): (AbortBody, self._abort),
            ("POST", "/admin/drain"): (DrainBody, self._drain),
            ("POST", "/admin/update_weights"): (UpdateBody, self._update_weights),
            ("GET", "/admin/status"): (None, self._status),
            ("GET", "/admin/digest"): (None, self._tell_digest),
            ("GET", "/admin/weights"): (None, self._tell_weights),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            said = await self._answer(scope, receive)
        except ApiError as error:
            await send_json(send, error.status, error.body(), error.headers())
        except Gone:
            return
        except Exception:  # the boundary to the operator: told without its inside, logged with it
            log.exception("%s failed", scope["path"])
            error = ApiError(500, "it failed; the server's log says how", None, "internal_error")
            await send_json(send, error.status, error.body())
        else:
            await self._send(send, said)

    async def _send(self, send: Send, said: Any) -> None:
        """said: JSON, or a file."""
        if not isinstance(said, Path):
            return await send_json(send, 200, said)
        try:
            await send_file(send, said, self._api.limits)
        except OSError as error:
            told = ApiError(409, f"{said.name} cannot be read: {error.strerror}", None, "not_there")
            await send_json(send, told.status, told.body())
        except Gone:
            return

    async def _answer(self, scope: Scope, receive: Receive) -> Any:
        check_head(scope, self._api.limits, bool(self._token))
        headers, method, path = dict(scope["headers"]), scope["method"], scope["path"]
        check_token(headers, self._token)
        if method == "GET" and path.startswith(WEIGHTS):
            return await self._file(path.removeprefix(WEIGHTS))
        if (method, path) not in self._routes:
            known = ", ".join(f"{m} {p}" for m, p in self._routes)
            is_path = any(p == path for _, p in self._routes)
            raise ApiError(405 if is_path else 404, f"no {method} {path[:80]}; there are {known}")
        kind, act = self._routes[method, path]
        if kind is None:
            return await act(None)
        raw = await read_body(receive, headers, self._api.limits)
        return await act(check_body(kind, read_json(raw or b"{}")))

    # --- acts -----------------------------------------------------------------------------------

    def _decode(self) -> list[Any]:
        return [server for server in self._servers if server.kind == "decode"]

    async def _pause(self, body: Empty) -> Any:
        for server in self._decode():
            server.pause()
        self._is_paused = True
        return await self._status(None)

    async def _resume(self, body: Empty) -> Any:
        for server in self._decode():
            server.resume()
        self._is_paused, self._api.stopping = False, ""
        return await self._status(None)

    async def _abort(self, body: AbortBody) -> Any:
        return {"aborted": self._api.abort(body.request_id, "the operator's")}

    async def _drain(self, body: DrainBody) -> Any:
        deadline_s = body.deadline_s or self._api.limits.drain_s
        self._api.stopping = "the server is being drained"
        return {"drained": await self._api.settle(deadline_s)}

    async def _update_weights(self, body: UpdateBody) -> Any:
        if self._updating.locked():
            raise ApiError(409, "another update is under way", None, "update_under_way", 5)
        if (body.directory is None) == (body.peer is None):
            raise bad("directory", "send directory or peer, and not both")
        if body.peer_token is not None and body.peer is None:
            raise bad("peer_token", "needs peer")
        async with self._updating:
            served = max((server.version for server in self._servers), default=-1)
            version = served + 1 if body.version is None else body.version
            if version <= served:
                raise bad("version", f"is {version}, and {served} is served: versions only rise")
            work = asyncio.to_thread(self._publish, body, version)
            param = "directory" if body.peer is None else "peer"
            try:
                said = await asyncio.shield(asyncio.ensure_future(work))
            except (RuntimeError, ValueError, OSError) as error:
                told = " ".join(str(error).split())[:500]
                raise ApiError(400, f"{param}: {told}", param, "not_published") from None
            self._digest = said["digest"]
            self._directory, self._peer = body.directory or "", body.peer or ""
            return said

    def _publish(self, body: UpdateBody, version: int) -> Mapping[str, Any]:
        """Blocking. Raises: RuntimeError, ValueError, OSError."""
        kv, expected = body.kv or "recompute", body.digest or ""
        if body.peer is None:
            return self._update(body.directory or "", version, kv, expected)
        with tempfile.TemporaryDirectory(prefix="rl_jax-peer-") as into:
            there = fetch(Peer(body.peer, body.peer_token or ""), Path(into), self._api.limits)
            if expected not in ("", there.digest):
                raise ValueError(f"it serves the digest {there.digest}, not {expected}")
            said = self._update(into, version, kv, there.digest)
        return {**said, "peer_version": there.version}

    def _files(self) -> Sequence[Path]:
        if not self._directory:
            said = f"they came from {self._peer}; ask that one" if self._peer else "there are none"
            raise ApiError(409, f"no files of the served weights: {said}", None, "no_files")
        try:
            return self._files_in(Path(self._directory))
        except (ValueError, OSError) as error:
            told = " ".join(str(error).split())[:300]
            raise ApiError(
                409, f"no files of the served weights: {told}", None, "no_files"
            ) from None

    async def _tell_weights(self, body: None) -> Any:
        files = await asyncio.to_thread(self._files)
        told = [{"name": path.name, "bytes": path.stat().st_size} for path in files]
        return {**await self._tell_digest(None), "files": told}

    async def _file(self, name: str) -> Path:
        files = await asyncio.to_thread(self._files)
        found = next((path for path in files if path.name == name), None)
        if found is None:
            raise ApiError(404, f"there is no file {name[:80]!r} of the served weights")
        return found

    async def _tell_digest(self, body: None) -> Any:
        return {"digest": self._digest, "version": self._api.sampler.version()}

    async def _status(self, body: None) -> Any:
        servers = {
            server.name: {"kind": server.kind, "version": server.version, "fenced": server.fenced}
            for server in self._servers
        }
        return {
            "paused": self._is_paused,
            "stopping": self._api.stopping,
            "not_ready": self._api.why_not_ready(),
            "choices_under_way": self._api.num_choices,
            "requests": sorted(self._api.requests())[:1000],
            "servers": servers,
        }
