"""Bodies of OpenAI's two interfaces, whole and in chunks, from the same events: so both say the same.

Beyond OpenAI's fields: token_ids and stop_reason of a choice, prompt_token_ids, and metadata {weight_version,
weight_versions [{start, end, version}] of each choice, engine_id, logprobs_mode, tool_error}, and metrics {queue_s,
prefill_s, decode_s}.
prompt_logprobs are vLLM's: of each prompt token null for the first, else {token id: {logprob, rank, decoded_token}}.
Invariants: usage counts tokens that were sampled and sent; logprobs, token_ids and usage of a choice have one length.
Must not: wait, or know HTTP.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rl_jax.http.asks import Ask, Served
from rl_jax.http.completion import Delta, End, Scored
from rl_jax.http.said import Said
from rl_jax.http.text import Detokenizer
from rl_jax.types import ToolCall

Json = dict[str, Any]


@dataclass
class Choice:
    """What came of one choice."""

    said: Said
    content: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likely: list[tuple[tuple[int, float], ...]] = field(default_factory=list)  # of each token
    num_chars: int = 0  # of text, for text_offset
    offsets: list[int] = field(default_factory=list)
    end: End | None = None
    calls: list[Json] = field(default_factory=list)


class Reply:
    """One request's answer. `object` names are OpenAI's of the interface."""

    is_chat = False

    def __init__(self, ask: Ask, served: Served, created: int, options: Json):
        """options: logprobs, top, prompt_top, token_ids, as_token_ids, usage: what the request wants to see."""
        self.ask, self.served, self.created, self.options = ask, served, created, options
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{ask.id}"
        parser = served.renderer.parser
        self.choices = [Choice(Said(parser, ask.tools, ask.forced)) for _ in range(ask.num_choices)]
        self.num_tokens = 0
        self.scored: dict[int, Scored] = {}  # by prompt
        for i, choice in enumerate(self.choices if ask.echo else ()):
            choice.content.append(
                served.renderer.tokenizer.decode(ask.prompts[i // ask.n].tolist())
            )
            choice.num_chars = len(choice.content[0])

    # --- events ---------------------------------------------------------------------------------

    def add(self, event: Delta | End | Scored) -> Iterator[Json]:
        """Account for an event; the chunks that it makes."""
        if isinstance(event, Scored):
            self.scored[event.prompt] = event
            first = event.prompt * self.ask.n
            for i in range(first, first + self.ask.n) if self.ask.echo else ():
                yield self._echo(i)
            return
        choice = self.choices[event.choice]
        if isinstance(event, Delta):
            shown = choice.said.feed(event.text)
            choice.content.append(shown)
            choice.tokens += event.tokens
            choice.logprobs += event.logprobs
            choice.likely += event.likely or [()] * len(event.tokens)
            choice.offsets += [choice.num_chars] * len(event.tokens)
            choice.num_chars += len(shown)
            self.num_tokens += len(event.tokens)
            # A chunk for tokens without text too: whoever counts on token ids gets each once.
            yield self._chunk(event.choice, self._shown(shown), event)
            return
        choice.end = event
        rest = choice.said.end()
        choice.content.append(rest)
        choice.calls = [call_body(call) for call in choice.said.calls]
        if rest:
            yield self._chunk(event.choice, self._shown(rest), None)
        if choice.calls:
            indexed = [{"index": i, **call} for i, call in enumerate(choice.calls)]
            yield self._chunk(event.choice, {"delta": {"tool_calls": indexed}}, None)
        yield self._chunk(event.choice, self._shown(""), None, end=choice)

    def first_chunks(self) -> Iterator[Json]:
        """What a stream begins with."""
        if self.ask.echo and self.ask.prompt_likely is None:
            yield from map(self._echo, range(len(self.choices)))

    def last_chunks(self) -> Iterator[Json]:
        """What a stream ends with."""
        if self.options.get("usage"):
            yield {**self._head(chunk=True), "choices": [], "usage": self.usage()}

    def body(self) -> Json:
        """The whole answer, once every choice has its End."""
        out = {
            **self._head(chunk=False),
            "choices": [self._whole(i) for i in range(len(self.choices))],
            "usage": self.usage(),
            "metadata": self._metadata(self.choices),
            "metrics": metrics_of(self.choices[0]),
        }
        if self.options.get("token_ids"):
            prompts = [p.tolist() for p in self.ask.prompts]
            out["prompt_token_ids"] = prompts[0] if len(prompts) == 1 else prompts
        if self.is_chat and self.options.get("prompt_top") is not None:
            out["prompt_logprobs"] = self.prompt_logprobs(0)
        return out

    def prompt_logprobs(self, prompt: int) -> list[Json | None]:
        """Of a prompt that was scored."""
        scored, most = self.scored[prompt], self.options["prompt_top"]
        rows = zip(
            self.ask.prompts[prompt][1:].tolist(), scored.logprobs, scored.ranks, scored.likely
        )
        out: list[Json | None] = [None]
        for token, value, rank, best in rows:
            told = {t: (v, place) for place, (t, v) in enumerate(best[:most], 1)}
            out.append(
                {
                    str(t): {"logprob": v, "rank": place, "decoded_token": self._token(t)}
                    for t, (v, place) in {**told, token: (value, rank)}.items()
                }
            )
        return out

    def usage(self) -> Json:
        prompt = self.ask.prompt_tokens
        cached = [choice.end.cached_tokens for choice in self.choices if choice.end is not None]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
        }

    # --- private --------------------------------------------------------------------------------

    def _head(self, *, chunk: bool) -> Json:
        name = "text_completion" if not self.is_chat else f"chat.completion{'.chunk' * chunk}"
        return {
            "id": self.id, "object": name, "created": self.created, "model": self.served.name,
            "system_fingerprint": self.served.renderer.template_sha256[:16],
        }  # fmt: skip

    def _metadata(self, choices: list[Choice]) -> Json:
        """Of choices that have ended."""
        spans = [
            [{"start": a, "end": b, "version": v} for a, b, v in c.end.spans]
            for c in choices
            if c.end is not None
        ]
        last = [s[-1]["version"] for s in spans if s]
        out: Json = {
            "weight_version": max(last) if last else None,
            "weight_versions": spans,
            "engine_id": choices[0].end.server if choices[0].end is not None else None,
            "logprobs_mode": "processed_logprobs"
            if self.ask.sampling.processed
            else "scaled_logprobs",
        }
        if versions := [s.version for s in self.scored.values() if s.version is not None]:
            out["prompt_weight_version"] = max(versions)
        errors = [choice.said.error for choice in choices]
        if any(errors):
            out["tool_error"] = errors if len(errors) > 1 else errors[0]
        return out

    def _chunk(self, i: int, shown: Json, event: Delta | None, end: Choice | None = None) -> Json:
        choice: Json = {"index": i, **shown, "finish_reason": None, "logprobs": None}
        if event is not None and event.tokens:
            if self.options.get("logprobs"):
                at = len(self.choices[i].tokens) - len(event.tokens)
                choice["logprobs"] = self._logprobs(self.choices[i], at)
            if self.options.get("token_ids"):
                choice["token_ids"] = list(event.tokens)
        out: Json = {**self._head(chunk=True), "choices": [choice]}
        if event is not None:
            out["weight_version"] = event.version
        if end is not None:
            choice |= self._finish(end)
            out["metadata"] = self._metadata([end])
        return out

    def _echo(self, i: int) -> Json:
        """The chunk of a choice that is its prompt."""
        choice: Json = {"index": i, "text": self.choices[i].content[0], "finish_reason": None}
        choice["logprobs"] = self._echoed(i) if self.options.get("logprobs") else None
        return {**self._head(chunk=True), "choices": [choice]}

    def _echoed(self, i: int) -> Json:
        """The logprobs of a choice's prompt."""
        number = i // self.ask.n
        scored, tokens = self.scored[number], self.ask.prompts[number].tolist()
        names = [self._token(token) for token in tokens]
        detokenizer, offsets, at = Detokenizer(self.served.renderer.tokenizer), [], 0
        for token in tokens:
            offsets.append(at)
            at += len(detokenizer.feed(token))
        top = None
        if most := self.options.get("top"):
            rows = zip(names[1:], scored.logprobs, scored.likely)
            top = [
                None,
                *({**{self._token(t): v for t, v in best[:most]}, n: v} for n, v, best in rows),
            ]
        return {
            "tokens": names,
            "token_logprobs": [None, *scored.logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _finish(self, choice: Choice) -> Json:
        assert choice.end is not None
        finish = choice.end.finish
        if choice.calls and finish == "stop":
            finish = "tool_calls"
        return {"finish_reason": finish, "stop_reason": choice.end.stop_reason}

    def _whole(self, i: int) -> Json:
        choice = self.choices[i]
        logprobs = self._logprobs(choice, 0) if self.options.get("logprobs") else None
        if self.ask.echo and logprobs is not None:
            logprobs = _behind(self._echoed(i), logprobs)
        out = {"index": i, **self._said(choice), "logprobs": logprobs, **self._finish(choice)}
        if self.options.get("token_ids"):
            out["token_ids"] = choice.tokens
        if not self.is_chat and self.options.get("prompt_top") is not None:
            out["prompt_logprobs"] = self.prompt_logprobs(i // self.ask.n)
        return out

    def _token(self, token: int) -> str:
        if self.options.get("as_token_ids"):
            return f"token_id:{token}"
        return self.served.renderer.tokenizer.decode([token])

    def _shown(self, text: str) -> Json:
        return {"text": text}

    def _said(self, choice: Choice) -> Json:
        return {"text": "".join(choice.content)}

    def _logprobs(self, choice: Choice, start: int) -> Json:
        """Of tokens from `start` on."""
        names = [self._token(token) for token in choice.tokens[start:]]
        values = choice.logprobs[start:]
        top = None
        if self.options.get("top"):
            # OpenAI's: the chosen one is among them, be it one more.
            likely = choice.likely[start:]
            top = [
                {**{self._token(t): v for t, v in best}, name: value}
                for name, value, best in zip(names, values, likely)
            ]
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": choice.offsets[start:],
        }


class ChatReply(Reply):
    is_chat = True

    def first_chunks(self) -> Iterator[Json]:
        for i in range(len(self.choices)):
            yield self._chunk(i, {"delta": {"role": "assistant", "content": ""}}, None)

    def _shown(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _said(self, choice: Choice) -> Json:
        content = "".join(choice.content)
        message: Json = {"role": "assistant", "content": content}
        if choice.calls:
            message |= {"content": content or None, "tool_calls": choice.calls}
        return {"message": message}

    def _logprobs(self, choice: Choice, start: int) -> Json:
        rows = zip(choice.tokens[start:], choice.logprobs[start:], choice.likely[start:])
        content = [
            {**self._named(token, value), "top_logprobs": [self._named(*pair) for pair in best]}
            for token, value, best in rows
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, value: float) -> Json:
        name = self._token(token)
        return {"token": name, "logprob": value, "bytes": list(name.encode("utf-8"))}


def call_body(call: ToolCall) -> Json:
    """A call as OpenAI's, with an id of ours where it has none."""
    arguments = json.dumps(dict(call.arguments), allow_nan=False)
    number = call.id or f"call_{secrets.token_hex(12)}"
    return {
        "id": number,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def metrics_of(choice: Choice) -> Json:
    """Seconds of a choice, phase by phase."""
    times = {} if choice.end is None else choice.end.times_s
    return {
        f"{name}_s": round(float(times.get(name, 0.0)), 6)
        for name in ("queue", "prefill", "decode")
    }


def _behind(first: Json, second: Json) -> Json:
    """Log-probs of a prompt and of what follows it, as one."""
    return {
        name: None if values is None else values + second[name] for name, values in first.items()
    }


Kind = Callable[[Ask, Served, int, Json], Reply]
