"""A types.Sampler without a model: scripted or seeded tokens, versions, latency, faults. For tests of all that samples.

Owns: one policy version, the live sessions, and what every request was. Invariants: token j of a turn depends only on
(seed, j) or on the script, never on what else runs, so an aborted and resumed turn equals the uninterrupted one; every
token carries the version that was current when it was made; a session counts as live from its first request to its
release. Life of a turn: 1 `fail` may refuse it. 2 Tokens are made in blocks of `block`, each after `latency(request)`
seconds of the injected `sleep`. 3 It ends at a stop token, max_new_tokens, the context, or an abort. 4 The Turn holds
what is new since the session's last turn as prompt_tokens.
Must not: block the event loop, or read a clock.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_jax.types import FinishReason, NewTokens, Turn, TurnError, TurnRequest, VersionSpan


@dataclass
class FakeSampler:
    """Implements types.Sampler. Fields are the behaviour; a test may change them while it runs."""

    script: Callable[[TurnRequest], Sequence[int]] | None = (
        None  # tokens of the turn; None = seeded
    )
    alphabet: Sequence[int] = tuple(range(8, 264))  # seeded tokens are drawn from it
    latency: Callable[[TurnRequest], float] = lambda request: 0.0  # seconds a block
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    fail: Callable[[TurnRequest], TurnError | None] = lambda request: None
    block: int = 4  # tokens between two looks at version and abort
    context: int = 256  # tokens a slot holds
    slots: Mapping[str, int] = field(default_factory=lambda: {"": 64})  # by place
    # absent = the place of the tag's name, else ""
    tag_places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    on_block: Callable[[TurnRequest, int], None] = lambda request, num_tokens: None
    # What happened, for assertions:
    requests: list[TurnRequest] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    aborted: list[tuple[str, str]] = field(default_factory=list)
    peak_live: int = 0

    def __post_init__(self):
        self._version = 0
        self._context_end: dict[str, int] = {}  # live session -> tokens of its context
        self._oldest: dict[str, int] = {}  # live session -> version of its oldest KV
        self._running: dict[str, list[bool]] = {}  # uid -> [abort asked] of the turn under way

    def publish(self, version: int) -> None:
        """Every token made from now on has this version."""
        self._version = version

    def version(self) -> int:
        return self._version

    def capacity(self) -> Mapping[str, int]:
        return self.slots

    def places(self, tag: str) -> tuple[str, ...]:
        return self.tag_places.get(tag) or ((tag,) if tag in self.slots else ("",))

    @property
    def live(self) -> tuple[str, ...]:
        return tuple(self._context_end)

    def abort(self, uid: str, reason: str) -> None:
        self.aborted.append((uid, reason))
        if uid in self._running:
            self._running[uid][0] = True

    def release(self, session: str) -> None:
        self.released.append(session)
        self._context_end.pop(session, None)
        self._oldest.pop(session, None)

    async def generate(
        self,
        request: TurnRequest,
        on_tokens: Callable[[NewTokens], None] | None = None,
    ) -> Turn:
        """on_tokens: as Router's, without the likeliest and scores.

        Raises TurnError as `fail` says, or kind "context" if the context is full already.
        """
        self.requests.append(request)
        error = self.fail(request)
        if error is not None:
            raise error
        room = self.context - len(request.tokens)
        if room <= 0:
            raise TurnError("context", "fake", f"{len(request.tokens)} tokens of {self.context}")
        known = self._context_end.get(request.session, 0)
        self._context_end[request.session] = len(request.tokens)
        self._oldest.setdefault(request.session, self._version)
        self.peak_live = max(self.peak_live, len(self._context_end))
        abort = self._running[request.uid] = [False]
        try:
            tokens, versions, mixed, finish = await self._sample(request, room, abort, on_tokens)
        finally:
            self._running.pop(request.uid, None)
        if request.session in self._context_end:  # not released meanwhile
            self._context_end[request.session] += len(tokens)
        return Turn(
            prompt_tokens=request.tokens[known:],
            tokens=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -np.log(len(self.alphabet)), np.float32),
            sampled_logprobs=None,
            spans=spans_of(versions),
            context_mixed=np.array(mixed, bool),
            finish=finish,
            cached_prompt=known,
            server="fake",
            pool="fake",
            times_s=dict.fromkeys(("queue", "prefill", "transfer", "decode", "first_token"), 0.0),
        )

    async def _sample(self, request: TurnRequest, room: int, abort: list[bool], on_tokens):
        whole = self.tokens_of(request)[request.token_index :]
        tokens: list[int] = []
        versions: list[int] = []
        mixed: list[bool] = []
        finish = None
        while finish is None:
            await self.sleep(self.latency(request))
            if abort[0]:
                finish = FinishReason.ABORT
                break
            self.on_block(request, len(tokens))
            num_before = len(tokens)
            for _ in range(self.block):
                token = int(whole[len(tokens)])
                tokens.append(token)
                versions.append(self._version)
                mixed.append(self._oldest.get(request.session, self._version) != self._version)
                if token in request.stop_token_ids:
                    is_end = token == request.stop_token_ids[0]
                    finish = FinishReason.STOP if is_end else FinishReason.EOS
                elif len(tokens) == room:
                    finish = FinishReason.CONTEXT
                elif len(tokens) == request.max_new_tokens:
                    finish = FinishReason.LENGTH
                if finish is not None:
                    break
            if on_tokens is not None:
                new = np.array(tokens[num_before:], np.int32)
                logprobs = np.full(len(new), -np.log(len(self.alphabet)), np.float32)
                on_tokens(NewTokens(new, logprobs, logprobs, versions[-1]))
        return tokens, versions, mixed, finish

    def tokens_of(self, request: TurnRequest) -> np.ndarray:
        """i32, the turn's tokens if nothing cuts it: the script's (then seeded ones), from token 0 of the turn."""
        num = request.token_index + request.max_new_tokens
        seeded = np.random.default_rng(request.seed).choice(np.asarray(self.alphabet), num)
        if self.script is not None:
            script = np.asarray(self.script(request), np.int32)[:num]
            seeded[: len(script)] = script
        return seeded.astype(np.int32)


def spans_of(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """The shortest spans that give each token its version."""
    spans: list[VersionSpan] = []
    for i, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(spans[-1].start, i + 1, version)
        else:
            spans.append(VersionSpan(i, i + 1, version))
    return tuple(spans)
