"""Session: the host's account of one live history. ActiveTurn: one request under way on it.

Invariants: a session has a slot, and pages there, only while a turn of it is admitted; the KV in them
is that of its first `kv_tokens` tokens, computed under versions between `kv_oldest` and `kv_newest`.
Between turns its KV is in the prefix tree, under `listed`, as long as there is room.
`tokens[:reported]` is what its client has been told or has sent. A turn's sampled tokens are the last
`num_sampled` of the session's tokens. Everything a Turn says (what was added, what was cached,
versions, mixed context) is derived from these numbers when it ends, never counted beside them.
Must not: touch device state, or be used from two threads.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from rl_jax.engine.prefix_tree import Origin
from rl_jax.serve.block_log import Made
from rl_jax.serve.commands import OnDone, OnTokens, PrefixJob
from rl_jax.types import FinishReason, NewTokens, Prefix, Turn, TurnRequest, VersionSpan


class Session:
    """Names follow TurnRequest.session."""

    def __init__(self, name: str, context: int):
        self.name = name
        self.tokens = np.zeros(context, np.int32)
        self.num_tokens = 0
        self.reported = 0
        self.kv_tokens = 0
        self.kv_oldest = self.kv_newest = -1
        self.salt = ""  # of the last turn's request
        self.computed = 0  # tokens whose KV was computed before, perhaps under another version
        self.slot: int | None = None
        self.listed: Origin | None = None  # where its KV was listed last
        # Oldest and newest of what was listed for this session alone.
        self._listed_versions = (-1, -1)
        self.released = False
        self.turn: ActiveTurn | None = None

    def set_context(self, tokens: np.ndarray) -> None:
        """The client's whole context; KV of tokens that changed is not counted any more."""
        known = self.tokens[: self.num_tokens]
        common = common_prefix(known, tokens)
        self.kv_tokens = min(self.kv_tokens, common)
        self.computed = min(self.computed, common)
        self.reported = min(self.reported, common)
        self.num_tokens = len(tokens)
        self.tokens[common : self.num_tokens] = tokens[common:]

    def wrote_kv(self, end: int, version: int) -> None:
        """KV of tokens [kv_tokens, end) was computed under this version."""
        if self.kv_tokens == 0:
            self.kv_oldest = self.kv_newest = version
        elif end > self.kv_tokens:
            self.kv_oldest = min(self.kv_oldest, version)
            self.kv_newest = max(self.kv_newest, version)
        self.kv_tokens = end
        self.computed = max(self.computed, end)

    def found_kv(self, num_tokens: int, origin: Origin) -> None:
        """KV of the first num_tokens tokens was found, listed under this origin."""
        self.kv_tokens = num_tokens
        if origin.owner is None:
            self.kv_oldest = self.kv_newest = origin.version
        else:  # it is this session's own
            self.kv_oldest, self.kv_newest = self._listed_versions

    def list_kv(self) -> Origin:
        """The KV is listed from now on; what it is listed under."""
        self.listed = self.origin
        if self.listed.owner is not None:
            self._listed_versions = (self.kv_oldest, self.kv_newest)
        return self.listed

    @property
    def origin(self) -> Origin:
        """What the KV depends on: of one version it is anybody's, of several it is this session's only."""
        is_pure = self.kv_oldest == self.kv_newest
        return Origin(self.kv_oldest, owner=None if is_pure else self.name, salt=self.salt)

    def drop_kv(self) -> None:
        """What the slot holds is of no use; `computed` remembers that it was there."""
        self.kv_tokens = 0

    def is_mixed(self, version: int) -> bool:
        """Whether a token sampled now under this version sees KV of another one."""
        return self.kv_tokens > 0 and not self.kv_oldest == self.kv_newest == version


class Phase(Enum):
    WAITING = "waiting for a slot and pages"
    FILLING = "extending its KV"
    READY = "waiting for the next block"
    RUNNING = "generating"


@dataclass(eq=False)  # a turn is itself, whatever it holds
class ActiveTurn:
    request: TurnRequest
    session: Session
    on_done: OnDone
    prefix: Prefix | None
    arrived_s: float
    deadline_s: float  # on the monotonic clock
    prompt_tokens: np.ndarray  # i32[P] added since the last turn
    order: tuple[int, int]  # (-priority, arrival): who goes first
    job: PrefixJob | None = None  # its KV goes to another server, and nothing is generated
    on_tokens: OnTokens | None = None  # told of each block's tokens
    phase: Phase = Phase.WAITING
    waits_from_s: float = 0.0  # since when it is in the line, on the monotonic clock
    epoch: int = -1
    chain: list[int] | None = (
        None  # paging.chain of the context without its last token, while it waits
    )
    fills: tuple[int, ...] = ()  # of these, what it computes now, or brings
    cached_prompt: int = 0
    admitted_s: float = 0.0
    armed_s: float = 0.0
    first_s: float = 0.0  # its first token was on the host
    num_sampled: int = 0
    scored: list[NewTokens] = field(default_factory=list)  # in order; new_tokens.py
    is_scored: bool = False  # and it was told
    logprobs: list[np.ndarray] = field(default_factory=list)
    sampled_logprobs: list[np.ndarray] = field(default_factory=list)
    support: list[np.ndarray] = field(default_factory=list)
    # (tokens, version, mixed); two in a row differ in version or mixed
    versions: list[tuple[int, int, bool]] = field(default_factory=list)
    is_filtered: bool = field(init=False)  # sampled from another distribution than is trained

    def __post_init__(self):
        request = self.request
        self.is_filtered = request.temperature > 0 and (request.top_p < 1 or request.top_k > 0)

    @property
    def wants_scores(self) -> bool:
        """Whether log-probs of its own tokens are still to be computed."""
        return self.request.scores and not self.is_scored

    @property
    def is_running(self) -> bool:
        return self.phase is Phase.RUNNING

    @property
    def missing_kv(self) -> int:
        """Tokens whose KV must be there before the turn can be armed: all but the context's last."""
        return self.session.num_tokens - 1 - self.session.kv_tokens

    def add(self, made: Made) -> None:
        """Account for tokens that blocks made; their inputs' KV is in the slot now."""
        tokens, version, session, runs = made.tokens, made.version, self.session, self.versions
        n, start = len(tokens), session.num_tokens
        self.first_s = self.first_s or made.first_s
        is_mixed = session.is_mixed(version)
        if runs and runs[-1][1] == version and runs[-1][2] == is_mixed:
            runs[-1] = (runs[-1][0] + n, version, is_mixed)
        else:
            runs.append((n, version, is_mixed))
        session.wrote_kv(start + n - 1, version)
        session.tokens[start : start + n] = tokens
        session.num_tokens = start + n
        self.num_sampled += n
        self.logprobs.append(made.logprobs)
        if made.sampled_logprobs is not None:
            self.sampled_logprobs.append(made.sampled_logprobs)
        if made.support is not None and 0 < self.request.top_k <= made.support.shape[1]:
            self.support.append(made.support)

    def turn(self, finish: FinishReason, server: str, pool: str, now_s: float) -> Turn:
        """The finished Turn."""
        session = self.session
        admitted_s, armed_s = self.admitted_s or now_s, self.armed_s or now_s
        first_s = self.first_s or now_s
        return Turn(
            prompt_tokens=self.prompt_tokens,
            tokens=session.tokens[
                session.num_tokens - self.num_sampled : session.num_tokens
            ].copy(),
            logprobs=joined(self.logprobs),
            sampled_logprobs=joined(self.sampled_logprobs) if self.is_filtered else None,
            spans=spans_of(self.versions),
            context_mixed=np.repeat(
                np.array([mixed for _, _, mixed in self.versions], bool),
                [n for n, _, _ in self.versions],
            ),
            finish=finish,
            cached_prompt=self.cached_prompt,
            server=server,
            pool=pool,
            times_s={
                "queue": admitted_s - self.arrived_s,
                "prefill": armed_s - admitted_s,
                "transfer": 0.0,
                "decode": now_s - armed_s,
                "first_token": first_s - armed_s,
            },
            support=np.concatenate(self.support) if self.is_filtered and self.support else None,
        )


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def spans_of(versions: list[tuple[int, int, bool]]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    end = 0
    for n, version, _ in versions:
        start, end = end, end + n
        if spans and spans[-1].version == version:
            start = spans.pop().start
        spans.append(VersionSpan(start, end, version))
    return tuple(spans)
