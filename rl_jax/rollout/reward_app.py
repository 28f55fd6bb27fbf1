"""RewardApp: a ScorerPool behind HTTP, for any ASGI server. It keeps nothing between two requests.

    POST /v1/score    {"name", "task", "view", "turn"?, "limit_s"?, "wait_s"?}  ->  200 {"value", "parts",
                      "turn_values", "status", "scorer_version", "detail", "seconds"}; task, view: as of wire.py
    GET /v1/scorers   {"scorers": [names], "of_turns": [names of those that score turns], "workers", "busy", "waiting",
                      "busy_s", "counts"}
    GET /metrics      the same figures as Prometheus text
    GET /healthz      {"status": "ok"}, without a token: for whoever restarts it

What a scorer does wrong is a 200 with a status, as in a run's own processes: asking again would not mend it. What the
service cannot do now is 429 or 503 with Retry-After: more waits than max_waiting, or longer than wait_s; and a caller's
fault is 400, 401, 404, 405, 408 or 413, each with {"error": one line}.

Invariants: only scorers that were named at its start are run, whatever a request says; bodies are bounded, and have a
deadline; a caller that has gone costs no further work (its call ends by its own deadline, in its worker); every answer
but /metrics' is JSON. Must not: import a scorer, or write a token.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_jax import asgi
from rl_jax.asgi import Receive
from rl_jax.exposition import CONTENT_TYPE, Text, tell_process
from rl_jax.rewards.check import finite, reward_to_json
from rl_jax.rollout import wire
from rl_jax.rollout.process import WorkerFault
from rl_jax.rollout.scorer_pool import SCORER_LIVES, Answer, ScorerPool

RETRY_AFTER_S = 1
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class AppLimits:
    limit_s: float = 30.0  # most that a request may ask of a scorer
    wait_s: float = 30.0  # most that it may wait for a worker
    max_waiting: int = 1024
    body_s: float = 10.0  # for a request's body to arrive
    max_body: int = 8 << 20  # bytes


class Refusal(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, detail: str, retry_after_s: int = 0):
        super().__init__(detail)
        self.status, self.detail, self.retry_after_s = status, detail, retry_after_s


class RewardApp:
    def __init__(
        self,
        pool: ScorerPool,
        names: Iterable[str],
        token: str = "",
        limits: AppLimits = AppLimits(),
    ):
        """token: "" = whoever reaches it may ask."""
        self._pool, self._names, self._limits = pool, frozenset(names), limits
        self._token = token.encode("ascii")

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            try:
                said = await self._answer(scope, receive)
            except Refusal as refusal:
                await _send(send, refusal.status, {"error": refusal.detail}, refusal.retry_after_s)
            except ConnectionResetError:
                return  # the caller has gone: nobody hears an answer
            else:
                await _send(send, 200, said)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._pool.check()
            await self._pool.start()
        except WorkerFault as fault:
            await self._pool.close()
            await send({"type": "lifespan.startup.failed", "message": fault.detail})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._pool.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Mapping[str, Any], receive: Receive) -> Any:
        """What a 200 says. Raises: Refusal; ConnectionResetError if the caller has gone."""
        methods = {"/healthz": "GET", "/metrics": "GET", "/v1/scorers": "GET", "/v1/score": "POST"}
        path, headers = scope["path"], dict(scope["headers"])
        if (why := asgi.refusal(headers, bool(self._token))) is not None:
            raise Refusal(403, why)
        if path not in methods:
            raise Refusal(404, f"no {path[:80]}; there are {', '.join(methods)}")
        if scope["method"] != methods[path]:
            raise Refusal(405, f"{path} takes {methods[path]}")
        if path == "/healthz":
            return {"status": "ok"}
        if not asgi.knows(headers, self._token):
            raise Refusal(401, asgi.NO_TOKEN)
        if path == "/metrics":
            return metrics_text(self._pool)
        if path == "/v1/scorers":
            return self._state()
        request = self._checked(await self._body(receive, headers))
        return await self._score(request, receive)

    def _state(self) -> dict[str, Any]:
        pool = self._pool
        return {
            "scorers": sorted(self._names),
            "of_turns": sorted(pool.of_turns),
            "workers": len(pool.workers),
            "busy": pool.num_busy,
            "waiting": pool.num_waiting,
            "busy_s": pool.busy_s,
            "counts": dict(pool.counts),
        }

    async def _body(self, receive: Receive, headers: Mapping[bytes, bytes]) -> bytes:
        try:
            return await asgi.read_body(
                receive, headers, self._limits.max_body, self._limits.body_s
            )
        except asgi.BadBody as bad:
            raise Refusal(bad.status, bad.detail) from None

    def _checked(self, body: bytes) -> dict[str, Any]:
        """The arguments of a score(). Raises: Refusal 400 naming the field."""
        try:
            said = json.loads(body)
            name, turn = said["name"], said.get("turn")
            task, view = wire.task_from_wire(said["task"]), wire.view_from_wire(said["view"])
            wire.dumps([wire.task_to_wire(task), wire.view_to_wire(view)])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as e:
            detail = " ".join(f"{type(e).__name__}: {e}".split())[:200]
            raise Refusal(400, f"no score request ({detail}); see rl_jax/rollout/wire.py") from None
        if not isinstance(name, str) or name not in self._names:
            raise Refusal(
                404, f"no scorer {name!r:.80}; there are {', '.join(sorted(self._names))}"
            )
        if turn is not None and (type(turn) is not int or not 0 <= turn < len(view.turn_texts)):
            raise Refusal(400, f"turn is {turn!r:.40}; the view has {len(view.turn_texts)} turns")
        times = {}
        for key in ("limit_s", "wait_s"):
            most = getattr(self._limits, key)
            seconds = finite(said.get(key, most))
            if seconds is None or seconds <= 0:
                raise Refusal(400, f"{key} is {said[key]!r:.40}; use seconds above 0")
            times[key] = min(seconds, most)
        return {"name": name, "task": task, "view": view, "turn": turn, **times}

    async def _score(self, request: dict[str, Any], receive: Receive) -> dict[str, Any]:
        pool, limits = self._pool, self._limits
        if pool.num_waiting >= limits.max_waiting:
            raise Refusal(429, f"{pool.num_waiting} calls wait already", RETRY_AFTER_S)
        wait_s, limit_s = request.pop("wait_s"), request["limit_s"]
        taken = asyncio.Event()
        call = asyncio.create_task(pool.score(**request, on_taken=taken.set))
        gone = asyncio.create_task(_until_gone(receive))
        queue = asyncio.create_task(taken.wait())
        try:
            await asyncio.wait({queue, call, gone}, timeout=wait_s, return_when="FIRST_COMPLETED")
            if not (taken.is_set() or call.done() or gone.done()):
                raise Refusal(429, f"no worker was free within {wait_s:g} s", RETRY_AFTER_S)
            # A worker that dies is replaced and the call made again, so it may take its time more than once.
            most_s = SCORER_LIVES * limit_s + limits.wait_s
            await asyncio.wait({call, gone}, timeout=most_s, return_when="FIRST_COMPLETED")
            if not call.done():
                if gone.done():
                    raise ConnectionResetError
                raise Refusal(503, f"no answer within {most_s:g} s", RETRY_AFTER_S)
            return _told(call.result())
        finally:
            for task in (call, gone, queue):
                task.cancel()


def metrics_text(pool: ScorerPool) -> str:
    """What the service tells Prometheus."""
    text = Text(process="reward_service")
    tell_process(text)
    text.add("rl_jax:workers", len(pool.workers))
    text.add("rl_jax:workers_busy", pool.num_busy)
    text.add("rl_jax:calls_waiting", pool.num_waiting)
    text.add("rl_jax:busy_seconds_total", pool.busy_s)
    for what, num in sorted(pool.counts.items()):
        text.add("rl_jax:pool_events_total", num, event=what)
    return str(text)


def _told(answer: Answer) -> dict[str, Any]:
    return {**reward_to_json(answer.reward), "seconds": answer.seconds}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, status: int, said: Any, retry_after_s: int = 0) -> None:
    """said: JSON, or the text of /metrics."""
    body, kind = json.dumps(said, allow_nan=False, separators=(",", ":")), "application/json"
    if isinstance(said, str):
        body, kind = said, CONTENT_TYPE
    body = body.encode("utf-8")
    headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    if retry_after_s:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
