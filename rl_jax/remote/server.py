"""RemoteDecodeServer and RemotePrefillServer: what Router and WeightSync know of a server whose process is another.

They stand in the driver's process for a DecodeServer or a PrefillServer, with the same methods. A request goes to the
process as a call and comes back as its answer; its key (uid#attempt.turn) is the process's, too. Weights come as whole
arrays (weights/host_copy.py), bucket by bucket, go over there as carriers.py picks, and are staged, digested and
committed by the server's own StagedWeights. A prefix is fetched to the host by the process that computed it and goes
through the driver to the one that decodes: two hops and two copies. From shard to shard, process to process
(as transfer.py brings weights), it would be one. What router.py chooses by (serve.pd_balance, serve.affinity) is known
here: what a token and a step take as of the last answer, and how long requests wait as of the last pulse.
Invariants: every request ends in exactly one callback. A process that ends, for whatever reason, fences its server at
once, and what it was asked fails (retryable); the next process of it serves only after a commit, once it has compiled.
What was asked before a fence is never answered after it. A turn is given on only if each of its tokens has a version
that this process committed, or was just told to: no token of an unknown version gets out.
Must not: retry, move a session, or decide when weights come.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernels.kv import KVSpec
from rl_jax.remote import codec
from rl_jax.remote.carriers import Carriers
from rl_jax.remote.channel import Answer, CallTimeout
from rl_jax.remote.codec import CodecError
from rl_jax.remote.lives import Lives
from rl_jax.remote.spec import ServerSpec
from rl_jax.remote.starter import LocalStarter, Starter
from rl_jax.remote.store import Load
from rl_jax.serve.commands import OnDone, OnTokens
from rl_jax.serve.loop import Progress, answer
from rl_jax.serve.prefill_server import OnPrefix
from rl_jax.settings import ClusterSettings, EngineSettings
from rl_jax.types import Ack, Digest, Prefix, TurnError, TurnRequest
from rl_jax.waits import Wait

GRACE_S = 0.5  # a process that keeps its own deadline is heard before ours gives it up
STATS_S = 1.0  # for the counters of now; else those of the last pulse are told
MAX_SESSIONS = 1 << 16  # whose live tokens are remembered, the latest
KEPT_SYNCS = 8  # as StagedWeights keeps acknowledgements
# How much is there now; what else a server counts is cumulative.
GAUGES = frozenset(
    ("waiting", "filling", "running", "sessions", "free_slots", "pages", "free_pages", "listed_pages")
)  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteEngine:
    """What is asked of an engine from outside."""

    settings: EngineSettings
    spec: KVSpec


@dataclass(eq=False)
class _Flight:
    """A request under way."""

    done: Callable[[Answer | TurnError], None]
    on_tokens: OnTokens | None = None


class RemoteServer:
    """Implements SyncTarget. All public methods may be called from any thread; those of a sync wait."""

    def __init__(
        self,
        spec: ServerSpec,
        cluster: ClusterSettings,
        log_dir: Path,
        sync_deadline_s: float,
        starter: Starter | None = None,
        carriers: Carriers | None = None,
    ):
        """log_dir: of this host's processes. sync_deadline_s: for staging, digesting and discarding
        (weights.deadline_s). starter: None = children of this process. carriers: of the cluster; None = the channel
        alone."""
        self.kind, self.name, self.pool = spec.kind, spec.name, spec.pool
        self.tags, self.hardware = spec.tags, spec.hardware
        self.template_sha256, self.settings = spec.template_sha256, spec.serve
        self.engine = RemoteEngine(spec.engine, spec.kv)
        self.mesh, self.param_shardings = spec.mesh, spec.param_shardings
        self.version = -1  # acknowledged last
        self._deadline_s = sync_deadline_s
        self._carriers = carriers or Carriers()
        self._lock = threading.Lock()
        self._fence: str | None = None
        self._flights: set[_Flight] = set()
        self._syncs: OrderedDict[str, int] = OrderedDict()  # sync_id -> version, of the last ones
        self._versions: set[int] = set()  # that this process may answer with
        self._before: Counter[str] = Counter()  # counters of the processes before
        self._token_s: tuple[float, float] | None = None
        self._num_unasked = 0  # answers that came after their request had failed at a fence
        starter = starter or LocalStarter(cluster, log_dir)
        self._lives = Lives(spec, cluster, starter, self._ended)

    # --- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process; commits are obeyed while it compiles, requests are served after it."""
        self._lives.start()

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until all programs are compiled. Raises: TimeoutError; RuntimeError if the process died."""
        self._lives.wait_ready(deadline_s)

    def close(self) -> None:
        """Fail what is left and end the process."""
        self._lives.close(self.settings.stop_deadline_s)
        self._ended("the server is closed")

    @property
    def pid(self) -> int | None:
        """Of the process that lives, where it is one of this host that was started here, or None."""
        return self._lives.pid

    # --- requests ----------------------------------------------------------------------------

    def abort(self, uid: str, reason: str) -> None:
        """End every request of the uid that was submitted before."""
        self._tell("abort", {"uid": uid, "reason": reason})

    @property
    def fenced(self) -> str | None:
        """Why nothing is served, or None."""
        if self._fence is None and self._lives.num > 1 and not self._lives.is_ready:
            return "it compiles, as its process was started again"
        return self._fence

    @property
    def gone(self) -> str | None:
        """Why no process of it will be started any more, or None."""
        return self._lives.final

    @property
    def suspect(self) -> str | None:
        """Why the process may be dead, or None: it is silent, and its lease is not over."""
        return "its process gives no sign of life" if self._lives.is_silent else None

    def fence(self, reason: str) -> None:
        """Serve nothing more until a commit succeeds; what is under way fails now (retryable)."""
        self._fail_all(reason)
        self._tell("fence", {"reason": reason})

    def stats(self) -> dict[str, float]:
        """Cumulative counters over all processes, and how much is in the one that lives; with what the channels to them
        dropped here (channel.Channel.stats), and how often one was started again."""
        now = dict(self._lives.stats)
        if (channel := self._lives.channel) is not None:
            try:
                now = codec.stats_from_wire(channel.call("stats", deadline_s=STATS_S).body)
                self._lives.told(channel, now)
            except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
                log.info("%s does not tell its counters: %s", self.name, error)
        dropped = {f"channel_{name}": num for name, num in self._lives.dropped().items()}
        with self._lock:
            dropped["channel_unasked"] = self._num_unasked
            dropped["restarts"] = max(0, self._lives.num - 1)
            total = {name: now.get(name, 0) + self._before[name] for name in {*now, *self._before}}
        return total | dropped

    def progress(self) -> Progress:
        """How far it got, and what is being done, as of the last pulse."""
        return self._lives.progress()

    def waits(self) -> list[Wait]:
        """A process that is not ready yet, or is silent. Any thread."""
        return self._lives.waits()

    @property
    def token_s(self) -> tuple[float, float] | None:
        """Seconds that a token of a prefix takes to be computed and to be moved to its host; None: not measured yet."""
        return self._token_s

    # --- SyncTarget --------------------------------------------------------------------------

    def stage(self, sync_id: str, version: int, bucket: int, arrays: Mapping[str, Any]) -> int:
        """arrays: whole ones, of the host or to be fetched to it. Waits for a process that is being started."""
        end_s = time.monotonic() + self._deadline_s
        channel = self._lives.wait_up(self._deadline_s)
        load = Load(sync_id, version, bucket, arrays, end_s)
        num_bytes = self._carriers.carry(self.name, channel, load)
        with self._lock:
            self._syncs[sync_id] = version
            while len(self._syncs) > KEPT_SYNCS:
                self._syncs.popitem(last=False)
        return num_bytes

    def digest(self, sync_id: str) -> Digest:
        channel = self._lives.wait_up(self._deadline_s)
        told = channel.call("digest", {"sync_id": sync_id}, deadline_s=self._deadline_s)
        return codec.digest_from_wire(told.body)

    def commit(self, sync_id: str, kv: str, deadline_s: float) -> Ack:
        """As DecodeServer.commit. What it may answer with from now on is the new version, too."""
        channel = self._lives.wait_up(deadline_s)
        with self._lock:
            if sync_id not in self._syncs:
                raise KeyError(f"{self.name}: nothing is staged under sync {sync_id!r}")
            self._versions.add(self._syncs[sync_id])
        body = {"sync_id": sync_id, "kv": kv, "deadline_s": deadline_s}
        ack = codec.ack_from_wire(
            channel.call("commit", body, deadline_s=deadline_s + GRACE_S).body
        )
        with self._lock:
            if self._lives.channel is not channel:  # and another process knows nothing of it
                raise ConnectionError(f"{self.name} ended after its commit: {self._fence}")
            was_fenced, self.version, self._fence = self._fence, ack.version, None
            self._committed(kv)
        self._carriers.over(self.name, sync_id)
        if was_fenced is not None:
            log.info("%s has version %d and serves again (%s)", self.name, ack.version, was_fenced)
        return ack

    def discard(self, sync_id: str) -> None:
        """Nothing to do where no process lives."""
        self._carriers.over(self.name, sync_id)
        if (channel := self._lives.channel) is not None:
            channel.call("discard", {"sync_id": sync_id}, deadline_s=self._deadline_s)

    # --- private -----------------------------------------------------------------------------

    def _committed(self, kv: str) -> None:
        """A commit was acknowledged; the lock is held."""

    def _gone(self) -> None:
        """What the process held is lost; the lock is held."""

    def _ask_prefix(
        self, request: TurnRequest, target: Any, on_prefix: OnPrefix, held: int
    ) -> None:
        """As PrefillServer.submit; target: a RemoteDecodeServer. on_prefix gets the Prefix, with host arrays, or a
        TurnError, and the seconds of queue, prefill and transfer, on a thread of the channel, or here."""
        body, arrays = codec.request_to_wire(request)
        self._ask(
            {"request": body, "target": target.name, "held": int(held), "grace_s": GRACE_S},
            arrays,
            request.deadline_s,
            lambda result: on_prefix(*self._prefix(result)),
        )

    def _ask(
        self,
        body: Mapping[str, Any],
        arrays: tuple[np.ndarray, ...],
        deadline_s: float,
        done: Callable[[Answer | TurnError], None],
        on_tokens: OnTokens | None = None,
    ) -> None:
        """Submit a request; done gets its answer or the error exactly once, after on_tokens what came before."""
        flight = _Flight(done, on_tokens)
        with self._lock:
            why, channel = self.fenced, self._lives.channel
            if why is None and channel is not None:
                self._flights.add(flight)
        if why is not None or channel is None:
            detail = "its process is starting" if why is None else f"it is fenced: {why}"
            answer(done, TurnError("closed", self.name, detail, retryable=True))
            return
        channel.ask(
            "submit",
            dict(body),
            arrays,
            deadline_s=deadline_s + GRACE_S,
            done=lambda result: self._settled(flight, result),
            on_part=lambda part: self._piece(flight, part),
        )

    def _prefix(self, result: Answer | TurnError) -> tuple[Prefix | TurnError, dict[str, float]]:
        if isinstance(result, TurnError):
            return result, {}
        try:
            body = result.body
            times_s = {name: float(seconds) for name, seconds in body["times_s"].items()}
            if "error" in body:
                return codec.error_from_wire(body["error"]), times_s
            prefix = codec.prefix_from_wire(body["prefix"], result.arrays)
            measured = body["token_s"]
        except (CodecError, KeyError, TypeError, ValueError) as error:
            return self._unusable(error), {}
        with self._lock:
            is_known = prefix.version in self._versions
            self._token_s = None if measured is None else (measured[0], measured[1])
        if not is_known:
            error = ValueError(f"a prefix of version {prefix.version}, which was not committed")
            return self._unusable(error), times_s
        return prefix, times_s

    def _piece(self, flight: _Flight, part: Answer) -> None:
        """Tokens of a turn under way."""
        with self._lock:
            is_awaited = flight in self._flights and flight.on_tokens is not None
            self._num_unasked += not is_awaited
        if not is_awaited or flight.on_tokens is None:
            return
        try:
            piece = codec.piece_from_wire(part.body, part.arrays)
            if piece.version not in self._versions:
                raise ValueError(f"tokens of version {piece.version}, which was not committed")
        except (CodecError, ValueError) as error:
            self._unusable(error)
        else:
            answer(flight.on_tokens, piece)

    def _settled(self, flight: _Flight, result: Answer | Exception) -> None:
        with self._lock:
            if flight not in self._flights:
                self._num_unasked += 1
                return
            self._flights.remove(flight)
        if isinstance(result, Exception):
            kind = "deadline" if isinstance(result, CallTimeout) else "engine"
            result = TurnError(kind, self.name, str(result), retryable=True)
        answer(flight.done, result)

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            self._fence = reason
            flights, self._flights = self._flights, set()
        error = TurnError("engine", self.name, f"it is fenced: {reason}", retryable=True)
        for flight in flights:
            answer(flight.done, error)

    def _ended(self, why: str) -> None:
        """The process ended, or will not be started again."""
        with self._lock:
            counted = {k: v for k, v in self._lives.stats.items() if k not in GAUGES}
            self._before.update(counted)
            self._syncs.clear()
            self._versions.clear()
            self._token_s = None
            self._gone()
        self._carriers.over(self.name)
        self._fail_all(why)

    def _tell(self, verb: str, body: Mapping[str, Any]) -> None:
        if (channel := self._lives.channel) is not None:
            channel.tell(verb, dict(body))

    def _unusable(self, error: Exception) -> TurnError:
        """What it answered is no record: nothing more is asked of it until it is refitted."""
        log.error("%s is fenced: %s", self.name, error)
        self.fence(f"it answered what cannot be used: {error}")
        return TurnError("engine", self.name, str(error), retryable=True)


class RemoteDecodeServer(RemoteServer):
    """A DecodeServer of another process."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        # Session -> tokens of its history, how many of them have KV there, and the version that it is of.
        self._live: OrderedDict[str, tuple[np.ndarray, int, int]] = OrderedDict()
        self._kv = "recompute"  # of the last commit
        self._told: dict[str, Any] = {}

    def submit(
        self,
        request: TurnRequest,
        prefix: Prefix | None,
        on_done: OnDone,
        on_tokens: OnTokens | None = None,
    ) -> None:
        """Ask for one Turn, as DecodeServer.submit; its callbacks are called on a thread of the channel, or here."""
        body, arrays = codec.request_to_wire(request)
        told, pages = (None, ()) if prefix is None else codec.prefix_to_wire(prefix)
        self._ask(
            {"request": body, "prefix": told, "grace_s": GRACE_S, "streams": on_tokens is not None},
            (*arrays, *pages),
            request.deadline_s,
            lambda result: on_done(self._turn(request, result)),
            on_tokens,
        )

    def pause(self) -> None:
        """As DecodeServer's; of a process that is started again nothing is known of it."""
        self._tell("pause", {})

    def resume(self) -> None:
        """As DecodeServer's."""
        self._tell("resume", {})

    def submit_prefix(
        self, request: TurnRequest, target: Any, on_prefix: OnPrefix, held: int = 0
    ) -> None:
        """As DecodeServer.submit_prefix, for another server."""
        self._ask_prefix(request, target, on_prefix, held)

    def release(self, session: str) -> None:
        """The session's slot may be used for another one."""
        with self._lock:
            self._live.pop(session, None)
        self._tell("release", {"session": session})

    def live_tokens(self, session: str, version: int, tokens: np.ndarray | None = None) -> int:
        """Tokens of the session whose KV a turn under this version could reuse there, as of its last answer; where
        tokens i32[n] are given, of these the first ones that the session has."""
        with self._lock:
            history, num, under = self._live.get(session, (np.zeros(0, np.int32), 0, version))
            fits = self._kv == "keep" or under == version
        if not fits or tokens is None:
            return num if fits else 0
        num = min(num, len(tokens))
        differs = np.flatnonzero(history[:num] != np.asarray(tokens)[:num])
        return int(differs[0]) if len(differs) else num

    @property
    def append_token_s(self) -> float | None:
        """Seconds that a token takes that is appended to a live history; None: not measured yet."""
        return self._told.get("append_token_s")

    @property
    def step_s(self) -> float | None:
        """Seconds of a decode step; None: not measured yet."""
        return self._told.get("step_s")

    def queue_s(self, role: str) -> float:
        """As DecodeServer's, as of the last pulse."""
        return self._lives.queues_s.get(role, 0.0)

    @property
    def num_running(self) -> int:
        """Turns that generate now, as of the last answer."""
        return self._told.get("num_running", 0)

    def _turn(self, request: TurnRequest, result: Answer | TurnError) -> Any:
        """The Turn or TurnError that came."""
        if isinstance(result, TurnError):
            return result
        try:
            body = result.body
            if "error" in body:
                return codec.error_from_wire(body["error"])
            turn = codec.turn_from_wire(body["turn"], result.arrays)
            num_live, under = body["live"]
        except (CodecError, KeyError, TypeError, ValueError) as error:
            return self._unusable(error)
        with self._lock:
            unknown = sorted({span.version for span in turn.spans} - self._versions)
            if not unknown:
                history = np.concatenate([request.tokens, turn.tokens])
                self._live[request.session] = (history, int(num_live), int(under))
                self._live.move_to_end(request.session)
                while len(self._live) > MAX_SESSIONS:
                    self._live.popitem(last=False)
                self._told = body["told"]
        if unknown:
            return self._unusable(
                ValueError(
                    f"{request.key} has tokens of version {unknown[0]}, which was not committed"
                )
            )
        return turn

    def _committed(self, kv: str) -> None:
        self._kv = kv

    def _gone(self) -> None:
        self._live.clear()
        self._told = {}


class RemotePrefillServer(RemoteServer):
    """A PrefillServer of another process."""

    def submit(self, request: TurnRequest, target: Any, on_prefix: OnPrefix, held: int = 0) -> None:
        """Ask for the KV of context[:-1], of which the target has the first `held` tokens."""
        self._ask_prefix(request, target, on_prefix, held)
