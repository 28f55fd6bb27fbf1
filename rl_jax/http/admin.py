"""Admin: the plane of whoever runs the server, on a port of its own: loopback, or with a token.

    POST /admin/pause {}  /admin/resume {}      generation stops after the block under way; requests wait
    POST /admin/abort {"request_id"?}           that request, or all, end with finish_reason abort
    POST /admin/drain {"deadline_s"?}           nothing new is taken (503) until resume; waits for what is under way
    POST /admin/update_weights {"directory", "version"?, "kv"?, "digest"?}     as of weights/directory.py
    GET  /admin/status, /admin/digest           versions, fences, what is under way; the digest that is served

Invariants: one update at a time; an update that fails leaves the old version; every call has a deadline; the token is
compared in constant time, and bodies are bounded as the public plane's are.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from rl_jax.http.api import Api
from rl_jax.http.errors import ApiError, bad
from rl_jax.http.schemas import Body, Count, Name, check_body, read_json
from rl_jax.http.transport import (
    Gone,
    Receive,
    Scope,
    Send,
    check_head,
    check_token,
    read_body,
    send_json,
)

log = logging.getLogger(__name__)

# (directory, version, kv, expected digest) -> what was published, as JSON; blocking
Update = Callable[[str, int, str, str], Mapping[str, Any]]


class Empty(Body):
    """Takes no field."""


class AbortBody(Body):
    request_id: Name | None = None


class DrainBody(Body):
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] | None = None


class UpdateBody(Body):
    directory: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Count | None = None
    kv: Literal["recompute", "keep"] | None = None
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None


class Admin:
    """An ASGI app; of the public plane's event loop."""

    def __init__(
        self, api: Api, servers: Sequence[Any], update: Update, *, token: str = "", digest: str = ""
    ):
        """servers: DecodeServers and PrefillServers. digest: of what is served now."""
        self._api, self._servers, self._update = api, tuple(servers), update
        self._token, self._digest = token.encode("ascii"), digest
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
            await send_json(send, 200, said)

    async def _answer(self, scope: Scope, receive: Receive) -> Any:
        check_head(scope, self._api.limits, bool(self._token))
        headers, method, path = dict(scope["headers"]), scope["method"], scope["path"]
        check_token(headers, self._token)
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
        async with self._updating:
            served = max((server.version for server in self._servers), default=-1)
            version = served + 1 if body.version is None else body.version
            if version <= served:
                raise bad("version", f"is {version}, and {served} is served: versions only rise")
            work = asyncio.to_thread(
                self._update, body.directory, version, body.kv or "recompute", body.digest or ""
            )
            try:
                said = await asyncio.shield(asyncio.ensure_future(work))
            except (RuntimeError, ValueError, OSError) as error:
                told = " ".join(str(error).split())[:500]
                raise ApiError(400, f"directory: {told}", "directory", "not_published") from None
            self._digest = said["digest"]
            return said

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
            "choices_under_way": self._api.num_choices,
            "requests": sorted(self._api.requests())[:1000],
            "servers": servers,
        }
