"""Api: the public plane. Requests in, answers out, over a StreamingSampler; and build_app, the same as a FastAPI app.

Life of a request: 1 More choices under way than slots and limits.queue: 429 with Retry-After, before its body is read
where that is known by then. While the server ends: 503. 2 The body is read and checked. 3 Its choices are sampled
while the connection is watched; a client that goes away, in any phase, ends them at once. 4 One body, or a stream.
Invariants: every accepted request ends in exactly one answer or one count of `ends`; nothing waits without a deadline;
an answer that is not 200 is an ApiError's.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_jax.clock import now_s
from rl_jax.http import asks
from rl_jax.http.asks import Ask, Served
from rl_jax.http.completion import (
    Delta,
    End,
    Scored,
    Sessions,
    StreamingSampler,
    complete,
)
from rl_jax.http.errors import NONFINITE, ApiError, bad
from rl_jax.http.other_apis import JetstreamReply, SglangReply, TokensReply
from rl_jax.http.prometheus import HttpMetrics
from rl_jax.http.replies import ChatReply, Reply
from rl_jax.http.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    JetstreamBody,
    SglangBody,
    TokenizeBody,
    TokensBody,
    check_body,
    read_json,
)
from rl_jax.http.transport import (
    Gone,
    Receive,
    Scope,
    Send,
    check_head,
    check_token,
    read_body,
    send_bytes,
    send_events,
    send_json,
    while_there,
)

log = logging.getLogger(__name__)

SESSION_HEADER = b"x-session-id"
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN = ("/health", "/v1/health", "/ready")  # asked without a token, by whoever restarts the server
Handler = Callable[["Api", Any, Mapping[bytes, bytes], Receive, Send], Any]


@dataclass(frozen=True)
class Interface:
    """How one path's body becomes an Ask, and its events a Reply."""

    body: type[Body]
    ask: Callable[[Any, Served, str], Ask]
    reply: type[Reply]
    streams: Callable[[Any], bool]
    options: Callable[[Any], dict[str, Any]]


INTERFACES = {
    "/v1/chat/completions": Interface(
        ChatBody, asks.of_chat, ChatReply, lambda b: bool(b.stream),
        lambda b: {
            "logprobs": b.logprobs, "top": b.top_logprobs, "token_ids": b.return_token_ids,
            "prompt_top": b.prompt_logprobs,
            "as_token_ids": b.return_tokens_as_token_ids,
            "usage": b.stream_options is not None and b.stream_options.include_usage,
        },
    ),
    "/v1/completions": Interface(
        CompletionBody, asks.of_completion, Reply, lambda b: bool(b.stream),
        lambda b: {
            "logprobs": b.logprobs is not None, "top": b.logprobs, "token_ids": b.return_token_ids,
            "prompt_top": b.prompt_logprobs,
            "as_token_ids": b.return_tokens_as_token_ids,
            "usage": b.stream_options is not None and b.stream_options.include_usage,
        },
    ),
    "/generate": Interface(
        SglangBody, asks.of_sglang, SglangReply, lambda b: bool(b.stream),
        lambda b: {
            "logprobs": b.return_logprob, "top": b.top_logprobs_num,
            "text_in_logprobs": b.return_text_in_logprobs,
        },
    ),
    "/inference/v1/generate": Interface(
        TokensBody, asks.of_tokens, TokensReply, lambda b: False,
        lambda b: {} if (params := b.sampling_params) is None else {
            "logprobs": params.logprobs is not None, "prompt_top": params.prompt_logprobs,
        },
    ),
    "/v1/generate": Interface(
        JetstreamBody, asks.of_jetstream, JetstreamReply, lambda b: True, lambda b: {},
    ),
}  # fmt: skip


class Api:
    """All methods belong to the event loop."""

    def __init__(
        self,
        served: Served,
        sampler: StreamingSampler,
        servers: Sequence[Any] = (),
        *,
        slots: int,
        token: str = "",
    ):
        """servers: DecodeServers, for /metrics and /ready. slots: choices that are generated at once.
        token: that callers must send; "" = whoever reaches it may ask.
        """
        self.served, self.sampler, self.servers = served, sampler, tuple(servers)
        self.limits = served.limits
        self.metrics = HttpMetrics(served.name)
        self.sessions = Sessions(sampler, self.limits.sessions)
        self.created = int(time.time())
        self.stopping = ""  # why nothing new is taken
        self.unhealthy: int | None = None  # the last version that gave logits that are not finite
        self.num_choices = 0  # under way
        self._most = slots + self.limits.queue
        self._slots, self._token = slots, token.encode("ascii")
        self._choice_s = 0.5  # how long a choice takes, smoothed: for Retry-After

    # --- one request --------------------------------------------------------------------------------

    async def answer(self, scope: Scope, receive: Receive, send: Send, handler: Handler) -> None:
        """Whatever comes: one answer, or none where nobody hears it."""
        started = False

        async def sent(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.metrics.answers[message["status"]] += 1
            await send(message)

        try:
            check_head(scope, self.limits, bool(self._token))
            await handler(self, scope, dict(scope["headers"]), receive, sent)
        except ApiError as error:
            self.metrics.rejects += error.status == 429
            await send_json(sent, error.status, error.body(), error.headers())
        except Gone as gone:
            self.metrics.ends[gone.why] += 1
            log.info("a client of %s went away (%s)", scope["path"], gone.why)
            if started and (abort := scope.get("state", {}).get("abort")) is not None:
                abort()  # else what waits for it is kept until it takes that
        except Exception:  # the boundary to the client: told without its inside, logged with it
            log.exception("a request of %s failed", scope["path"])
            if started:
                raise
            error = ApiError(500, "the server failed; its log says how", None, "internal_error")
            await send_json(sent, error.status, error.body())

    def check_token(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises: ApiError 401."""
        if path not in OPEN:
            check_token(headers, self._token)

    def check_room(self, num: int = 1) -> None:
        """Raises: ApiError 503 while the server ends, 429 where too much is under way."""
        if self.stopping:
            raise ApiError(503, self.stopping, None, "stopping", 5)
        if num > self._most:
            raise bad("n", f"asks for {num} choices; at most {self._most} may be under way here")
        if self.num_choices + num > self._most:
            ahead = max(0, self.num_choices - self._slots)
            after_s = min(60, max(1, math.ceil(ahead * self._choice_s / self._slots)))
            said = (
                f"{self.num_choices} choices are under way, at most {self._most}; ask again later"
            )
            raise ApiError(429, said, None, "queue_full", after_s)

    async def generate(
        self, interface: Interface, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        self.check_room()
        start_s = now_s()
        body = check_body(interface.body, read_json(await read_body(receive, headers, self.limits)))
        session = headers.get(SESSION_HEADER, b"").decode("latin-1")
        ask = interface.ask(body, self.served, session)
        self.check_room(ask.num_choices)
        reply = interface.reply(ask, self.served, int(time.time()), interface.options(body))
        told = {"x-request-id": ask.id} if ask.id.isascii() and ask.id.isprintable() else {}
        self.num_choices += ask.num_choices
        try:
            if interface.streams(body):
                work = self._stream(ask, reply, start_s, send, told)
            else:
                work = self._collect(ask, reply, start_s)
            result = await while_there(work, receive)
        finally:
            self.num_choices -= ask.num_choices
        if result is not None:
            await send_json(send, 200, result, told)

    async def _collect(self, ask: Ask, reply: Reply, start_s: float) -> Any:
        async for event in self._events(ask, start_s):
            for _ in reply.add(event):
                pass
        return reply.body()

    async def _stream(
        self, ask: Ask, reply: Reply, start_s: float, send: Send, headers: Mapping[str, str]
    ) -> None:
        events = self._events(ask, start_s)
        try:
            # The first event decides: what cannot even begin is an answer of its own, no broken stream.
            first = await anext(events)

            async def chunks() -> AsyncIterator[Any]:
                for chunk in reply.first_chunks():
                    yield chunk
                for chunk in reply.add(first):
                    yield chunk
                async for event in events:
                    for chunk in reply.add(event):
                        yield chunk
                for chunk in reply.last_chunks():
                    yield chunk

            await send_events(send, chunks(), self.limits, headers)
        finally:
            await events.aclose()

    async def _events(self, ask: Ask, start_s: float) -> AsyncIterator[Delta | End | Scored]:
        """complete()'s, measured."""
        metrics, first_s, num = self.metrics, None, 0
        metrics.prompt_tokens += ask.prompt_tokens
        events = complete(ask, self.served, self.sampler, self.sessions)
        try:
            async for event in events:
                if isinstance(event, Delta):
                    if first_s is None and event.tokens:
                        first_s = now_s()
                        metrics.ttft.add(first_s - start_s)
                    num += len(event.tokens)
                    metrics.generation_tokens += len(event.tokens)
                elif isinstance(event, End):
                    metrics.finished[event.finish] += 1
                    metrics.cached_tokens += event.cached_tokens
                    metrics.queue.add(event.times_s.get("queue", 0.0))
                    metrics.prefill.add(event.times_s.get("prefill", 0.0))
                    took_s = now_s() - start_s
                    self._choice_s += 0.1 * (
                        took_s - event.times_s.get("queue", 0.0) - self._choice_s
                    )
                yield event
        except ApiError as error:
            metrics.errors[error.code or str(error.status)] += 1
            if error.code == NONFINITE:
                self.unhealthy = self.sampler.version()
            raise
        finally:
            await events.aclose()
            metrics.e2e.add(now_s() - start_s)
            if first_s is not None and num > 1:
                metrics.tpot.add((now_s() - first_s) / (num - 1))

    # --- from the other plane -----------------------------------------------------------------------

    def requests(self) -> set[str]:
        """Ids of those under way."""
        return set(self.sessions.running.values())

    def abort(self, request_id: str | None, why: str) -> int:
        """End the request's choices, or all, with what was sampled. Returns: how many."""
        running = [uid for uid, own in self.sessions.running.items() if request_id in (None, own)]
        for uid in running:
            self.sampler.abort(uid, why)
        return len(running)

    async def settle(self, deadline_s: float) -> bool:
        """Wait until nothing is under way. Returns: whether that came in time; what is left then goes on."""
        end_s = now_s() + deadline_s
        while self.num_choices and now_s() < end_s:
            await asyncio.sleep(min(0.02, deadline_s))
        return not self.num_choices

    # --- the small ones -----------------------------------------------------------------------------

    def why_not_ready(self) -> str:
        """ "" where it is. A version that once gave no finite logits stays unhealthy; a later one is healthy again."""
        if self.stopping:
            return self.stopping
        if (version := self.sampler.version()) < 0:
            return "no decode server has weights, or none is live"
        if version == self.unhealthy:
            return f"version {version} gives logits that are not finite; serve other weights"
        return ""

    def gauges(self) -> dict[str, float]:
        """What is there now."""
        stats = [server.stats() for server in self.servers]
        pages = sum(s["pages"] for s in stats)
        held = pages - sum(s["free_pages"] for s in stats)
        return {
            "vllm:num_requests_running": sum(s["running"] + s["filling"] for s in stats),
            "vllm:num_requests_waiting": sum(s["waiting"] for s in stats),
            "vllm:kv_cache_usage_perc": held / pages if pages else 0.0,
            "rl_jax:choices_under_way": self.num_choices,
            "rl_jax:sessions": len(self.sessions),
            "rl_jax:weight_version": self.sampler.version(),
            "rl_jax:servers_live": sum(server.fenced is None for server in self.servers),
            "rl_jax:ready": not self.why_not_ready(),
        }

    def models(self) -> dict[str, Any]:
        model = {
            "id": self.served.name, "object": "model", "created": self.created, "owned_by": "rl_jax",
            "max_model_len": self.served.context, "weight_version": self.sampler.version(),
        }  # fmt: skip
        return {"object": "list", "data": [model]}

    def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        served = self.served
        asks.check_model(body.model, served)
        if (body.prompt is None) == (body.messages is None):
            raise bad("prompt", "send prompt or messages, and not both")
        if body.prompt is not None:
            tokens = asks.encode(body.prompt, served, "prompt")
        else:
            messages = asks.messages_of(body.messages or (), served)
            tools = asks.tools_of(body.tools, served)
            tokens = asks.rendered(messages, tools, served, body.chat_template_kwargs).tolist()
        out = {"count": len(tokens), "max_model_len": served.context, "tokens": tokens}
        if body.return_token_strs:
            out["token_strs"] = [served.renderer.tokenizer.decode([token]) for token in tokens]
        return out

    def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        asks.check_model(body.model, self.served)
        if body.tokens and (high := max(body.tokens)) >= self.served.vocab_size:
            raise bad("tokens", f"{high} is outside the vocabulary 0..{self.served.vocab_size - 1}")
        return {"prompt": self.served.renderer.tokenizer.decode(body.tokens)}


# --- handlers ------------------------------------------------------------------------------------------------------


def generating(interface: Interface) -> Handler:
    async def handle(api: Api, scope: Scope, headers, receive: Receive, send: Send) -> None:
        api.check_token(scope["path"], headers)
        await api.generate(interface, headers, receive, send)

    return handle


def at_once(kind: type[Body], make: Callable[[Api, Any], Any]) -> Handler:
    """A body in, a body out; no sampling."""

    async def handle(api: Api, scope: Scope, headers, receive: Receive, send: Send) -> None:
        api.check_token(scope["path"], headers)
        body = check_body(kind, read_json(await read_body(receive, headers, api.limits)))
        # Beside the loop: a long text takes a tokenizer its time.
        await send_json(send, 200, await asyncio.to_thread(make, api, body))

    return handle


def telling(make: Callable[[Api], Any]) -> Handler:
    async def handle(api: Api, scope: Scope, headers, receive: Receive, send: Send) -> None:
        api.check_token(scope["path"], headers)
        status, said = make(api)
        await send_json(send, status, said)

    return handle


def ready(api: Api) -> tuple[int, Any]:
    if why := api.why_not_ready():
        return 503, ApiError(503, why, None, "not_ready").body()
    return 200, {"status": "ready", "weight_version": api.sampler.version()}


async def metrics(api: Api, scope: Scope, headers, receive: Receive, send: Send) -> None:
    api.check_token(scope["path"], headers)
    # Beside the loop: a server of another process is asked, and may be slow to tell.
    gauges = await asyncio.to_thread(api.gauges)
    text = api.metrics.text(gauges)
    await send_bytes(send, 200, text.encode(), PROMETHEUS_TEXT)


async def health_generate(api: Api, scope: Scope, headers, receive: Receive, send: Send) -> None:
    """Progress, not life: samples one token."""
    api.check_token(scope["path"], headers)
    body = CompletionBody(prompt=[0], max_tokens=1, temperature=0.0, timeout_s=30.0)
    ask = asks.of_completion(body, api.served)
    api.check_room()
    result = await while_there(api._collect(ask, Reply(ask, api.served, 0, {}), now_s()), receive)
    await send_json(send, 200, {"status": "ok", "tokens": result["usage"]["completion_tokens"]})


GETS: dict[str, Handler] = {
    "/health": telling(lambda api: (200, {"status": "ok"})),
    "/v1/health": telling(lambda api: (200, {"is_live": True})),
    "/ready": telling(ready),
    "/health_generate": health_generate,
    "/metrics": metrics,
    "/v1/models": telling(lambda api: (200, api.models())),
}
POSTS: dict[str, tuple[type[Body], Handler]] = {
    **{path: (one.body, generating(one)) for path, one in INTERFACES.items()},
    "/tokenize": (TokenizeBody, at_once(TokenizeBody, Api.tokenize)),
    "/detokenize": (DetokenizeBody, at_once(DetokenizeBody, Api.detokenize)),
}
