"""The nouns and the protocols between parts. numpy and stdlib only; every other part may import this file.

Owns: the records that cross a part, a process or a disk (as JSON + npz, never pickle), and the protocols by which the
parts meet. Invariants: records are frozen; array fields are host numpy arrays whose shape and dtype stand beside them;
what was sampled is kept as tokens and never re-tokenised; every sampled token has exactly one version.
Must not: import jax, or hold behaviour beyond cheap derived views.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import numpy as np

SHAPING = "shaping"  # the part of a reward that is trained on and is not in its value
MAX_SUPPORT = 64  # most token ids that are kept of one token's sampled support


class FinishReason(Enum):
    """Why one Turn ended. HTTP: STOP, EOS -> "stop"; LENGTH, CONTEXT -> "length"."""

    STOP = "stop"  # a stop token id of the request
    EOS = "eos"  # the tokenizer's end-of-turn or end-of-text id
    LENGTH = "length"  # max_new_tokens reached
    CONTEXT = "context"  # the model's context is full
    ABORT = "abort"
    ERROR = "error"


class Outcome(Enum):
    """How a Trajectory ended. TRUNCATED is trained unless the algorithm masks it; FAILED and CANCELLED never are."""

    OK = "ok"  # COMPLETED in the ledger
    TRUNCATED = "truncated"
    FAILED = "failed"  # ERRORED in the ledger
    CANCELLED = "cancelled"


# --- text side -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Message:
    role: str  # system | user | assistant | tool
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Action:
    """What the policy said, parsed by rl_jax/tokens, never by the environment."""

    text: str  # all of it for a task without tools; else what stands outside the calls
    tool_calls: tuple[ToolCall, ...] = ()
    parse_error: str | None = None


@dataclass(frozen=True)
class Task:
    """One problem. `payload` (the hidden answer) never reaches the policy."""

    id: str  # stable over runs, not empty
    env: str
    tag: str
    messages: tuple[Message, ...]
    payload: Mapping[str, Any]  # as JSON
    reward: str  # "env" or a name of REWARDS
    max_turns: int  # 1 or more
    # {"type": "function", "function": {"name", "description", "parameters": a JSON schema}}, each; as JSON
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class StepResult:
    messages: tuple[Message, ...]
    # of step(): 0.0 says "no reward", None leaves an episode unscored where the task's reward is "env"
    reward: float | None = None
    done: bool = False
    state_key: str | None = None  # hash of what the agent saw (step-level advantages)
    # which role the next turn is of, where the policy plays several in one conversation; all of it is seen by each
    to_agent: str = "policy"
    info: Mapping[str, float] = field(default_factory=dict)
    new_context: bool = False  # messages are a whole conversation, in place of what was said before


@dataclass(frozen=True)
class EpisodeView:
    """What a Scorer may see of an episode."""

    messages: tuple[Message, ...]  # all that was said, the policy's turns among them
    turn_texts: tuple[str, ...]
    info: Mapping[str, float]
    step_rewards: tuple[float | None, ...]  # one a turn


# --- serving -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VersionSpan:
    """Sampled tokens [start, end) of a turn; contiguous from 0, cover it, neighbours differ in version."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class TurnRequest:
    """What rollout asks of serving. `key` is the idempotence key of every hop."""

    uid: str
    attempt: int
    turn: int
    tokens: np.ndarray  # i32[n] the WHOLE context; servers find the cached prefix themselves
    temperature: float
    top_p: float
    top_k: int  # 0 = off
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    seed: int  # sample_seed(...); token j of the turn uses fold_in(key(seed), j)
    tag: str
    adapter: str | None = None
    priority: int = 0
    min_version: int = 0
    deadline_s: float = 60.0  # seconds left when sent; each hop converts to its own monotonic clock
    # a resumed turn: sampled tokens that end `tokens`; max_new_tokens more may come
    token_index: int = 0
    place: str = ""  # of Sampler.capacity(): where its slot is held; "" = any place of the tag
    # What clients of a served model ask for, and rollout never does (JaxEngine's `likely`):
    min_new_tokens: int = 0  # before them no stop token is sampled
    likely: bool = False  # NewTokens.likely
    scores: bool = False  # log-probs of its own tokens, as the first NewTokens
    salt: str = ""  # KV is shared with requests of the same salt only

    @property
    def key(self) -> str:
        return f"{self.uid}#{self.attempt}.{self.turn}"

    @property
    def session(self) -> str:
        """Names the live history whose KV a server may keep between turns."""
        return f"{self.uid}#{self.attempt}"


@dataclass(frozen=True)
class Turn:
    """One model call. N sampled tokens after P added ones."""

    # i32[P] only what was ADDED since the previous turn (observation, template)
    prompt_tokens: np.ndarray
    tokens: np.ndarray  # i32[N] sampled
    # f32[N] natural log, under the distribution that is trained (temperature, no top-p/top-k)
    logprobs: np.ndarray
    # f32[N] under the distribution sampled from, where that differs
    sampled_logprobs: np.ndarray | None
    spans: tuple[VersionSpan, ...]
    # bool[N] any KV behind the token came from another version than the token's
    context_mixed: np.ndarray
    finish: FinishReason
    cached_prompt: int  # tokens of the context whose KV was reused
    server: str
    pool: str
    # queue, prefill, transfer, decode; first_token: of decode, until the first token was on the host
    times_s: Mapping[str, float]
    routing: np.ndarray | None = None  # i16[P + N, layers, k], -1 unknown (MoE)
    # i32[N, k] the ids that top-k and top-p left of the vocabulary, -1 padding; None = not cut, or not kept
    support: np.ndarray | None = None

    @property
    def versions(self) -> np.ndarray:
        """i32[N], the version of each sampled token."""
        out = np.full(len(self.tokens), -1, np.int32)
        for span in self.spans:
            out[span.start : span.end] = span.version
        return out


@dataclass(frozen=True)
class NewTokens:
    """Tokens that one block sampled for a turn under way; all pieces of a turn in a row are its tokens."""

    tokens: np.ndarray  # i32[n], n >= 1
    logprobs: np.ndarray  # f32[n] as Turn.logprobs
    sampled_logprobs: np.ndarray  # f32[n] under the distribution sampled from
    version: int
    likely: tuple[np.ndarray, np.ndarray] | None = None  # likeliest (ids i32[n, A], log-probs)
    # i32[n] places by likelihood, from 1: these are the request's own tokens from its second on, at temperature 1
    ranks: np.ndarray | None = None


class SourceLost(RuntimeError):
    """Whoever has the trained weights is gone for good: no sync of them can succeed any more."""


class TurnError(Exception):
    """A turn that could not be made. `kind`: deadline | queue_full | context | unsupported | nan | closed | engine."""

    def __init__(self, kind: str, server: str, detail: str, retryable: bool = False):
        super().__init__(f"{kind} at {server}: {detail}")
        self.kind, self.server, self.detail, self.retryable = kind, server, detail, retryable


@runtime_checkable
class Sampler(Protocol):
    """All that rollout knows of serving: serve.Router or testing.FakeSampler."""

    async def generate(self, request: TurnRequest) -> Turn:
        """Raises TurnError; never outlives request.deadline_s."""
        ...

    def abort(self, uid: str, reason: str) -> None:
        """Non-blocking; a generate() under way then returns finish=ABORT with what was sampled."""
        ...

    def release(self, session: str) -> None:
        """The episode ended: KV that serves it alone is of no use any more."""
        ...

    def version(self) -> int:
        """Lowest version any live server would use now."""
        ...

    def capacity(self) -> Mapping[str, int]:
        """Live episodes each place (a pool of servers) can hold now. A slot is in one place, whoever may use it."""
        ...

    def places(self, tag: str) -> tuple[str, ...]:
        """Keys of capacity(): where episodes of the tag may live now."""
        ...


@dataclass(frozen=True)
class PrefillChunk:
    """Packed ragged tokens of R requests. C comes from a fixed bucket list; padding has segment -1."""

    tokens: np.ndarray  # i32[C]
    segment: np.ndarray  # i32[C] index of the request, -1 padding
    position: np.ndarray  # i32[C] position in the request's context
    lengths: np.ndarray  # i32[R] tokens of each request in this chunk


@dataclass(frozen=True)
class SlotSampling:
    """How R slots sample their next turn; arrays of length R."""

    # i32[R] first input of generate: the context's last token, whose KV is not computed yet
    last_token: np.ndarray
    context_length: np.ndarray  # i32[R] tokens of the context, last_token included
    seed: np.ndarray  # u64[R]
    token_index: np.ndarray  # i32[R] tokens of this turn already sampled (0 unless resumed)
    max_new_tokens: np.ndarray  # i32[R] of the whole turn
    temperature: np.ndarray  # f32[R] 0 = greedy
    top_p: np.ndarray  # f32[R]
    top_k: np.ndarray  # i32[R] 0 = off
    stop_token_ids: np.ndarray  # i32[R, num_stop] -1 padding
    epoch: np.ndarray  # i32[R] slot epoch: which request the slot's tokens belong to


@dataclass(frozen=True)
class Prefix:
    """KV of tokens [start, num_tokens) of a context, in pages on one server's devices: what moves between servers."""

    # per layer (k, v), device arrays [pages padded to a bucket, page_size, K, Dh]; requests prefilled together share
    # them, so that they move as one
    kv: tuple[tuple[Any, Any], ...]
    first: int  # this one's first page there
    start: int  # a multiple of the page size; the KV before it is where the pages go to
    num_tokens: int
    version: int
    adapter: str | None
    tokens_sha: str  # of tokens [0, num_tokens): all that the KV was computed from
    spec: Any  # kernels.kv.KVSpec
    routes: np.ndarray | None = None


@dataclass(frozen=True)
class BlockTokens:
    """What one generate() of k steps made; device arrays, fetched by one asynchronous copy a block."""

    tokens: Any  # i32[S, k]
    logprobs: Any  # f32[S, k]
    sampled_logprobs: Any  # f32[S, k]
    valid: Any  # bool[S, k]
    finish: Any  # i8[S] index into FinishReason order + 1, 0 = still running
    slot_epoch: Any  # i32[S]
    nan: Any  # bool[S]
    routes: Any = None
    support: Any = None  # i32[S, k, K] ids each token was sampled from, -1 padding; None = not kept
    likely: Any = None  # (i32[S, k, A] ids, f32[S, k, A] log-probs), best first


class Engine(Protocol):
    """The device side of serving: no threads, queues or text; donates the state it is given.

    JetStream's verbs over a paged cache: its prefill is `append` to pages of a prefill server and `extract`, its insert
    is `insert` and `arm`. Tables list the pages of a context in order (i32, kernels.kv.NO_PAGE behind the last); their
    owner is the host.
    """

    def init_state(self) -> Any: ...
    def append(self, params, state, tables: np.ndarray, chunk: PrefillChunk) -> Any: ...
    def arm(self, state, slots: np.ndarray, sampling: SlotSampling) -> Any: ...
    def generate(self, params, state, tables: np.ndarray) -> tuple[Any, BlockTokens]: ...
    def free(self, state, slots: np.ndarray) -> Any: ...
    def extract(self, state, pages: np.ndarray) -> Any: ...
    def insert(self, state, kv: Any, pages: np.ndarray) -> Any: ...
    def copy(self, state, source: np.ndarray, target: np.ndarray) -> Any: ...


# --- trajectories --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    boundary: str  # env | reward | serve | sandbox | rollout
    kind: str
    charged_to: str  # policy | infra
    detail: str


@dataclass(frozen=True)
class Reward:
    """`value` only if status is "scored": a failure is a status, never a zero."""

    value: float | None
    parts: Mapping[str, float]
    turn_values: tuple[float | None, ...]
    status: str  # scored | timeout | error | schema
    scorer_version: str
    detail: str = ""  # why it is not scored, one line: a status alone does not say what to mend


@dataclass(frozen=True)
class Trajectory:
    """A closed episode; text is a view of tokens."""

    uid: str
    attempt: int
    group: str
    task_id: str
    epoch: int
    index: int
    sample: int
    tag: str
    tokens: np.ndarray  # i32[T]
    loss_mask: np.ndarray  # bool[T] True exactly on sampled tokens that may be trained
    logprobs: np.ndarray  # f32[T] behaviour: sampled_logprobs if present else logprobs; 0 off mask
    versions: np.ndarray  # i32[T] -1 where not sampled
    context_mixed: np.ndarray  # bool[T]
    turn_ids: np.ndarray  # i16[T] -1 before the first turn's tokens
    turn_rewards: np.ndarray  # f32[num_turns] NaN = none
    state_keys: tuple[str, ...]  # one a turn
    turns: tuple[Turn, ...]
    reward: Reward
    outcome: Outcome
    truncated_by: str | None  # length | context | turn_limit | tool_limit
    failure: Failure | None
    start_version: int
    agent: str = "policy"
    parent: str | None = None
    # where each context begins in `tokens`, ascending from 0: more than one where a chat template rewrote what had been
    # seen, so that what was sampled before and after it never stood in one context
    sample_starts: tuple[int, ...] = (0,)
    support: np.ndarray | None = None  # i32[T, k] as Turn.support; -1 where not sampled
    # one a turn: which of its roles the policy played (StepResult.to_agent before the turn); () = none was named
    roles: tuple[str, ...] = ()

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def num_sampled(self) -> int:
        """Of all turns, trained or not."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest trained token; start_version if nothing was sampled."""
        trained = self.versions[self.loss_mask]
        return int(trained.min()) if len(trained) else self.start_version


@dataclass(frozen=True)
class Group:
    """The trajectories of one Task: unit of scheduling, advantage and dropping."""

    uid: str
    task_id: str
    tag: str
    epoch: int
    index: int
    trajectories: tuple[Trajectory, ...]

    @property
    def oldest_version(self) -> int:
        return min(t.oldest_version for t in self.trajectories)


# --- weights -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digest:
    """Two uint32 per parameter: sum(bits_i * (2i+1)) and sum((bits_i ^ (bits_i >> 7)) * (2i+1)), mod 2^32."""

    values: Mapping[str, tuple[int, int]]

    def differing(self, other: "Digest") -> tuple[str, ...]:
        names = sorted(set(self.values) | set(other.values))
        return tuple(n for n in names if self.values.get(n) != other.values.get(n))


@dataclass(frozen=True)
class Ack:
    server: str
    version: int
    block: int  # decode blocks the server had made when it swapped
    pause_s: float


@dataclass(frozen=True)
class SyncResult:
    state: str  # PUBLISHED | ABORTED | PARTIAL | FAILED
    version: int
    acked: tuple[str, ...]
    fenced: tuple[str, ...]
    num_bytes: int
    stage_s: float
    pause_s: float  # longest pause of any server
    detail: str = ""  # what failed, server by server; "" if PUBLISHED
    link_bytes: int = 0  # of weights that went through sockets
    digest: str = ""  # of all parameters as served (kernels.digest.of_all), once it was known


class SyncTarget(Protocol):
    """A prefill or decode server as weights/ sees it; every call is idempotent under its sync_id."""

    name: str
    kind: str  # prefill | decode
    mesh: Any  # jax.sharding.Mesh, or AbstractMesh where it is another process's
    # name -> NamedSharding on mesh; staged arrays come so, or whole where the mesh is another process's
    param_shardings: Mapping[str, Any]

    # Returns: bytes that went through a socket for it; None where nothing could
    def stage(
        self, sync_id: str, version: int, bucket: int, arrays: Mapping[str, Any]
    ) -> int | None: ...
    def digest(self, sync_id: str) -> Digest: ...
    def commit(self, sync_id: str, kv: str, deadline_s: float) -> Ack: ...
    def discard(self, sync_id: str) -> None: ...
    def fence(self, reason: str) -> None: ...  # it missed a version: take no new work; never blocks


# --- environments and rewards --------------------------------------------------------------------------------------


class Environment(Protocol):
    """Plain blocking Python, one live episode an instance; the worker makes it asynchronous, bounded and killable."""

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """len() and [i], deterministic; the eval split is disjoint from train."""
        ...

    def reset(self, task: Task, seed: int) -> StepResult: ...
    def step(self, action: Action) -> StepResult: ...
    def close(self) -> None: ...


class Scorer(Protocol):
    """Stateless; runs where it can be killed. A scorer of turns (TaskSource.turn_reward) has score_turn as well.

    score_turn(task, episode, turn) is called when a turn is over, with what was said until then.
    """

    def score(self, task: Task, episode: EpisodeView) -> Reward: ...


# --- scheduling ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupView:
    group: str
    task_id: str
    tag: str
    want: int  # scored members that complete it
    started: int
    scored: int
    num_tokens: tuple[int, ...]
    oldest_version: int  # of any member, by rollout.age_of; the current one if none has begun
    issued_s: float
    deferred: bool = False
    extra: int = 0  # members beyond `want` that may run, so that it is complete sooner
    source: str = ""  # the tag of its task, where `tag` is a share that groups of any tag have


@dataclass(frozen=True)
class View:
    """All a SchedulerPolicy may know."""

    now_s: float
    version: int
    step: int
    need_groups: int  # groups the driver wants per batch
    free: Mapping[str, int]  # episodes that may start now, by place
    groups: tuple[GroupView, ...]  # in flight
    buffered: int  # complete groups waiting
    oldest_unconsumed: int  # version of the oldest group issued and not consumed; version if none
    taken: int = 0  # groups taken by a step that is not published yet: issued and not consumed
    held: Mapping[str, int] = field(default_factory=dict)  # buffered + taken, by tag
    # where episodes of a tag may start, best place first; absent = the place of its name, else ""
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    room: int | None = None  # episodes that may start in all; None = as many as are free
    # episodes that may start of a task's tag, for those that have a limit of their own (tasks.sources[..].max_live)
    limits: Mapping[str, int] = field(default_factory=dict)
    # batches that the run takes until its end and no published version has consumed; None = no end is known
    batches_left: int | None = None
    # versions that a batch may be old now; None = SchedulerConfig.max_staleness
    bound: int | None = None


@dataclass(frozen=True)
class NeedBatch:
    step: int


@dataclass(frozen=True)
class Done:
    uid: str
    outcome: Outcome
    num_tokens: int


@dataclass(frozen=True)
class Scored:
    uid: str
    value: float | None


@dataclass(frozen=True)
class Dropped:
    group: str
    reason: str


@dataclass(frozen=True)
class Published:
    version: int


@dataclass(frozen=True)
class Tick:
    pass


Event = NeedBatch | Done | Scored | Dropped | Published | Tick


@dataclass(frozen=True)
class Start:
    """Start `members` more episodes of a group (None = a new group of `tag`)."""

    group: str | None
    members: int
    tag: str


@dataclass(frozen=True)
class Cancel:
    uid: str
    reason: str


@dataclass(frozen=True)
class Drop:
    group: str
    reason: str


SchedulerAction = Start | Cancel | Drop


class SchedulerPolicy(Protocol):
    """Pure: state in, state out; the same object under the real clock and under a simulator's."""

    def init(self, cfg: Any) -> Any: ...
    def decide(self, state: Any, view: View, event: Event) -> tuple[Any, list[SchedulerAction]]: ...
