"""complete: an Ask's choices, sampled through the router, as one stream of events.

Of prompts that are scored, the log-probs come before all else of their choices (Scored): the first choice of a prompt
computes them, and the others' events wait here.
Life of a choice: 1 A request goes to the router, under a name of its own or its session's. 2 Blocks' tokens come while
they are sampled; text is made of them, and a stop string ends the choice there: its request is aborted, what comes
later is not looked at. 3 The router's Turn ends it; tokens that were not told before come with it. 4 Its
session is released, unless the client named it.
Invariants: every choice ends in exactly one End, or the whole stream in one ApiError; text, tokens, log-probs and
versions of a choice are those that were sampled, in order, each once; whoever stops reading ends the work: leaving the
stream aborts what is under way.
Must not: know an interface's bodies, or wait longer than the ask's deadline.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rl_jax.http.asks import Ask, Served
from rl_jax.http.errors import ApiError, of_turn
from rl_jax.http.text import Detokenizer, TextStream
from rl_jax.types import FinishReason, NewTokens, Turn, TurnError, TurnRequest

LOWEST = -9999.0  # a log-prob of -inf, which JSON has no word for
FINISHES = {
    FinishReason.STOP: "stop",
    FinishReason.EOS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


class StreamingSampler(Protocol):
    """A types.Sampler whose generate tells pieces: serve.Router or testing.FakeSampler."""

    async def generate(
        self,
        request: TurnRequest,
        on_tokens: Callable[[NewTokens], None] | None = None,
    ) -> Turn: ...
    def abort(self, uid: str, reason: str) -> None: ...
    def release(self, session: str) -> None: ...
    def version(self) -> int: ...


@dataclass(frozen=True)
class Delta:
    """What is new of a choice."""

    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    # of each token the likeliest in its place, best first: (token, log-prob); () where they were not asked for
    likely: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class Scored:
    """How likely a prompt's own tokens were, from its second on, at temperature 1."""

    prompt: int
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]  # 1 = the likeliest
    likely: tuple[tuple[tuple[int, float], ...], ...]  # as Delta.likely
    version: int | None  # None: there is one token, and nothing to compute


@dataclass(frozen=True)
class End:
    """A choice is over. No text or tokens come with it."""

    choice: int
    finish: str  # stop | length | abort
    stop_reason: (
        int | str | None
    )  # the request's own stop token or string; None for the model's end
    num_tokens: int
    cached_tokens: int
    spans: tuple[tuple[int, int, int], ...]  # (start, end, version) over its tokens
    times_s: dict[str, float]
    server: str


@dataclass
class Sessions:
    """Names of clients' conversations, whose KV the server that has it may keep between turns."""

    sampler: StreamingSampler
    most: int
    _turns: OrderedDict[str, int] = field(default_factory=OrderedDict)  # name -> next turn
    _busy: set[str] = field(default_factory=set)
    running: dict[str, str] = field(default_factory=dict)  # uid under way -> its request's id

    def take(self, name: str) -> int | None:
        """The number of its next turn; None while another one is under way, which gets no affinity."""
        if not name or name in self._busy:
            return None
        self._busy.add(name)
        turn = self._turns[name] = self._turns.pop(name, -1) + 1
        if len(self._turns) > self.most:
            oldest = next((n for n in self._turns if n not in self._busy), None)
            if oldest is not None:
                del self._turns[oldest]
                self.sampler.release(f"session/{oldest}#0")
        return turn

    def give_back(self, name: str) -> None:
        self._busy.discard(name)

    def __len__(self) -> int:
        return len(self._turns)


async def complete(
    ask: Ask, served: Served, sampler: StreamingSampler, sessions: Sessions
) -> AsyncIterator[Delta | End | Scored]:
    """Raises: ApiError, and then no more comes. Close it (aclose) to end the work early."""
    if sampler.version() < ask.min_version:
        raise ApiError(
            409,
            f"min_weight_version: is {ask.min_version}, but version {sampler.version()} is served; ask again later",
            "min_weight_version",
            "weight_version_too_old",
        )
    # Bounded by max tokens, as is what waits.
    events: asyncio.Queue[Delta | End | Scored | BaseException] = asyncio.Queue()
    waiting = {i: [] for i in range(len(ask.prompts)) if ask.prompt_likely is not None}
    tasks = [
        asyncio.create_task(_Choice(i, ask, served, sampler, sessions, events.put_nowait).run())
        for i in range(ask.num_choices)
    ]
    try:
        left = len(tasks)
        while left:
            event = await events.get()
            if isinstance(event, BaseException):
                raise event
            left -= isinstance(event, End)
            if isinstance(event, Scored):
                yield event
                for later in waiting.pop(event.prompt):
                    yield later
            elif (held := waiting.get(event.choice // ask.n)) is not None:
                held.append(event)
            else:
                yield event
        if waiting:
            raise ApiError(503, "the prompt was not scored", None, "engine_unavailable", 1)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Choice:
    """One choice under way."""

    def __init__(
        self,
        number: int,
        ask: Ask,
        served: Served,
        sampler: StreamingSampler,
        sessions: Sessions,
        tell: Callable[[Any], None],
    ):
        self.number, self.ask, self.sampler, self.sessions, self.tell = (
            number, ask, sampler, sessions, tell,
        )  # fmt: skip
        sampling = ask.sampling
        hidden = served.hidden if sampling.skips_special else frozenset()
        self.text = TextStream(
            Detokenizer(served.renderer.tokenizer, hidden),
            sampling.stop,
            shows_stop=sampling.shows_stop,
            num_free=sampling.min_new_tokens,
        )
        self.scores = ask.prompt_likely is not None and number % ask.n == 0
        self.num_tokens = 0  # that were told
        self.last_token = -1
        self.versions: list[list[int]] = []  # [start, end, version]
        self.is_over = False  # a stop string came
        self.uid = ""

    async def run(self) -> None:
        session = self.ask.session if self.ask.num_choices == 1 else ""
        turn_number = self.sessions.take(session)
        self.uid = f"http/{secrets.token_hex(8)}" if turn_number is None else f"session/{session}"
        request = self._request(turn_number or 0)
        self.sessions.running[self.uid] = self.ask.id
        if self.scores and len(request.tokens) == 1:
            self.tell(Scored(self.number // self.ask.n, (), (), (), None))
        try:
            self._end(await self.sampler.generate(request, self._piece))
        except TurnError as error:
            self.tell(of_turn(error))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the boundary to whatever samples; the stream must not wait
            self.tell(error)
        finally:
            del self.sessions.running[self.uid]
            if turn_number is None:
                self.sampler.release(request.session)
            else:
                self.sessions.give_back(session)

    def _request(self, turn: int) -> TurnRequest:
        ask, sampling = self.ask, self.ask.sampling
        return TurnRequest(
            uid=self.uid,
            attempt=0,
            turn=turn,
            tokens=ask.prompts[self.number // ask.n],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=max(1, sampling.max_new_tokens),  # a server samples at least one
            stop_token_ids=sampling.stop_token_ids,
            stop=(),
            seed=ask.seed_of(self.number),
            tag="",
            priority=ask.priority,
            min_version=ask.min_version,
            deadline_s=ask.deadline_s,
            min_new_tokens=sampling.min_new_tokens,
            likely=sampling.num_likely > 0 or bool(self.scores and ask.prompt_likely),
            scores=self.scores,
            salt=ask.salt,
        )

    def _piece(self, piece: NewTokens) -> None:
        if piece.ranks is not None:
            return self._scored(piece, piece.ranks)
        if self.is_over or not self.ask.sampling.max_new_tokens:
            return
        logprobs = piece.sampled_logprobs if self.ask.sampling.processed else piece.logprobs
        self._tell_tokens(piece.tokens, logprobs, piece.version, piece.likely)

    def _scored(self, piece: NewTokens, ranks: np.ndarray) -> None:
        num, most = len(piece.tokens), self.ask.prompt_likely or 0
        values = np.nan_to_num(piece.logprobs.astype(float), neginf=LOWEST).tolist()
        best = () if not most or piece.likely is None else tuple(_pairs(piece.likely, num, most))
        prompt = self.number // self.ask.n
        told = tuple(values), tuple(ranks.tolist()), best or ((),) * num
        self.tell(Scored(prompt, *told, piece.version))

    def _tell_tokens(
        self, tokens: np.ndarray, logprobs: np.ndarray, version: int, likely: Any = None
    ) -> None:
        """A Delta of tokens of one version, up to a stop string."""
        shown, num, sampling = [], 0, self.ask.sampling
        for token in tokens.tolist():
            num += 1
            self.last_token = token
            if token in sampling.stop_token_ids and not sampling.shows_stop:
                continue  # it is the last one, and says nothing
            shown.append(self.text.feed(token))
            if self.text.stopped_by is not None:
                self.is_over = True
                break
        values = np.nan_to_num(logprobs[:num].astype(float), nan=LOWEST, neginf=LOWEST)
        start = self.num_tokens
        self.num_tokens += num
        if self.versions and self.versions[-1][2] == version:
            self.versions[-1][1] = self.num_tokens
        else:
            self.versions.append([start, self.num_tokens, version])
        given = tuple(tokens[:num].tolist())
        best = () if likely is None else tuple(_pairs(likely, num, sampling.num_likely))
        self.tell(Delta(self.number, "".join(shown), given, tuple(values.tolist()), version, best))
        if self.is_over:
            self.sampler.abort(self.uid, "stop string")

    def _end(self, turn: Turn) -> None:
        """Tokens of the Turn that no piece told, the rest of the text, and the End."""
        logprobs = turn.logprobs
        if self.ask.sampling.processed and turn.sampled_logprobs is not None:
            logprobs = turn.sampled_logprobs
        shown = turn.spans if self.ask.sampling.max_new_tokens else ()
        for span in shown:
            start = max(span.start, self.num_tokens)
            if start < span.end and not self.is_over:
                rows = slice(start, span.end)
                self._tell_tokens(turn.tokens[rows], logprobs[rows], span.version)
        finish, reason = FINISHES[turn.finish] if shown == turn.spans else "length", None
        if not self.is_over and (rest := self.text.end()):
            version = self.versions[-1][2] if self.versions else self.sampler.version()
            self.tell(Delta(self.number, rest, (), (), version))
        if self.text.stopped_by is not None:
            finish, reason = "stop", self.text.stopped_by
        elif finish == "stop" and self.last_token in self.ask.sampling.own_stops:
            reason = self.last_token
        spans = tuple((start, end, version) for start, end, version in self.versions)
        self.tell(
            End(
                self.number,
                finish,
                reason,
                self.num_tokens,
                turn.cached_prompt,
                spans,
                dict(turn.times_s),
                turn.server,
            )  # fmt: skip
        )


def _pairs(likely: Any, num: int, most: int) -> Iterator[tuple[tuple[int, float], ...]]:
    """Of the first num tokens the `most` likeliest."""
    ids, logprobs = (x[:num, :most] for x in likely)
    values = np.nan_to_num(logprobs.astype(float), nan=LOWEST, neginf=LOWEST)
    for row in zip(ids.tolist(), values.tolist()):
        yield tuple(zip(*row))
