"""PrefillServer: one thread round one engine that only computes prefixes and hands their KV to
decode servers.

Life of a job: 1 `submit` names the decode server that will generate. 2 Jobs are begun by priority, then
arrival, as many as the next chunk takes: each gets pages of this server's cache, those first that the
prefix tree has of its context; one whose next page a job before it is computing waits for that.
3 What the tree lacks is packed into chunks; a context longer than a chunk goes on in the next one.
4 When context[:-1] is there it is listed in the tree, and copies of its pages, of those that the decode
server lacks, are moved to that one's mesh, those of requests that one chunk completed together, once per
target. 5 `on_prefix` gets
the Prefix with version and hash, on this thread. A commit happens between two chunks; half-done
prefixes start again, so a Prefix never mixes versions.
Invariants: every job ends in exactly one on_prefix; KV is found again under the version that computed
it only, whatever a commit's `kv`; what the tree keeps is there to be taken, the least recently used
first; a thread that dies fails what it holds and fences the server.
Must not: block on a decode server.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from rl_jax.clock import now_s
from rl_jax.engine.chunks import Chooser, Piece, pack
from rl_jax.engine.prefix_tree import Origin
from rl_jax.serve.commands import Abort, Commit, Fence, OnPrefix
from rl_jax.serve.handover import Outgoing, batches, first_missing, send
from rl_jax.serve.loop import Loop, Progress, answer
from rl_jax.serve.paging import Found, Paging, chain
from rl_jax.serve.rates import RATE_TOKENS, Rate
from rl_jax.serve.spans import tell_chunk
from rl_jax.serve.staging import StagedWeights
from rl_jax.settings import ServeSettings
from rl_jax.timeline import Track
from rl_jax.types import Ack, Digest, Prefix, TurnError, TurnRequest

IDLE_S = 1.0  # longest sleep of an idle loop; every command ends it at once
# How much faster a chunk of whole contexts is than one that reads pages, where packs_fresh (benchmarks/README.md).
FRESH_SPEEDUP = 1.6
COUNTERS = (
    "requests", "finished", "failed", "aborted", "deadlines", "prefill_tokens", "found_tokens", "recompute_tokens",
    "sent_tokens", "chunks", "swaps", "callback_errors",
    "prompt_chunks", "chunk_prompts",  # chunks, apart from decode servers'; prompts that were here at each
)  # fmt: skip


@dataclass(eq=False)
class Job:
    request: TurnRequest
    target: Any  # DecodeServer: its engine's prefix_sharding says where the KV goes
    on_prefix: OnPrefix
    arrived_s: float
    deadline_s: float  # on the monotonic clock
    tokens: np.ndarray  # i32[n - 1] the context without its last token
    chain: list[int]  # paging.chain of them
    start: int  # the first token whose KV the decode server lacks, at a page's begin
    num_done: int = 0  # tokens whose KV is in its pages
    num_found: int = 0  # of these, what the tree had
    row: int | None = None  # of the server's page tables, while it is begun
    started_s: float = 0.0
    times_s: dict[str, float] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.num_done


class PrefillServer:
    """Implements SyncTarget. All public methods may be called from any thread."""

    kind = "prefill"

    def __init__(
        self,
        name: str,
        pool: str,
        engine: Any,
        settings: ServeSettings,
        *,
        tags: Sequence[str] = (),
        hardware: str = "",
        template_sha256: str = "",
        loop: type[Loop] = Loop,
    ):
        """template_sha256: of the Renderer that it is started for. loop: what runs it."""
        self.template_sha256 = template_sha256
        self.name, self.pool, self.engine, self.settings = name, pool, engine, settings
        self.tags, self.hardware = tuple(tags), hardware
        self.version = -1
        self._staged = StagedWeights(name, engine.param_shardings, engine.pack)
        self._loop = loop(
            name,
            settings.stop_deadline_s,
            prepare=self._prepare,
            idle_s=self._idle_s,
            step=self._step,
            fail=self._fail,
            refuse=self._refuse,
        )
        self._params: dict[str, Any] | None = None
        self._state: Any = None  # None while it compiles
        size = engine.settings
        self._paging = Paging(engine.spec, size.slots, size.table_pages)
        self._chooser = Chooser(size.chunk_sizes[-1], size.chunk_requests, engine.packs_fresh)
        self._free_rows = list(range(size.slots))
        self._computing: dict[int, Job] = {}  # hash of a page (paging.chain) -> who computes it now
        self._may_begin = False  # something changed since the line was last walked
        self._compute_rate, self._move_rate = Rate(RATE_TOKENS), Rate(RATE_TOKENS)
        self._jobs: list[Job] = []  # by priority, then arrival
        self._counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._counters |= {"chunk_s": 0.0, "transfer_s": 0.0}

    # --- life -------------------------------------------------------------------------------

    def trace(self, track: Track) -> None:
        """Have a timeline know what it does. Before `start`."""
        self._loop.track = track

    def start(self) -> None:
        """Start the thread; commits are obeyed while it compiles, requests are served after it."""
        self._loop.start()

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until all programs are compiled.

        Raises: TimeoutError; RuntimeError if the thread died.
        """
        self._loop.wait_ready(deadline_s)

    def close(self) -> None:
        """Fail what is left and join the thread. Raises: TimeoutError if it is stuck."""
        self._loop.close()

    # --- requests ---------------------------------------------------------------------------

    def submit(self, request: TurnRequest, target: Any, on_prefix: OnPrefix, held: int = 0) -> None:
        """Ask for the KV of context[:-1] on the target's mesh, which has that of the first `held` tokens.

        on_prefix gets the Prefix or a TurnError, and the seconds of queue, prefill and transfer,
        exactly once, on this server's thread (on the caller's if the server is closed or fenced).
        """
        now = now_s()
        tokens = np.asarray(request.tokens[:-1], np.int32)
        page_size = self.engine.spec.page_size
        job = Job(
            request,
            target,
            on_prefix,
            arrived_s=now,
            deadline_s=now + request.deadline_s,
            tokens=tokens,
            chain=chain(tokens, page_size, request.salt),
            start=first_missing(held, len(tokens), page_size),
        )
        if self._loop.fenced is None:
            self._loop.put(job)
        else:
            self._refuse(job, self._loop.error())

    def abort(self, uid: str, reason: str) -> None:
        """End the uid's jobs with TurnError closed."""
        self._loop.put(Abort(uid, reason))

    @property
    def fenced(self) -> str | None:
        """Why nothing is computed, or None."""
        return self._loop.fenced

    def fence(self, reason: str) -> None:
        """Compute nothing more until a commit succeeds; what is here fails (retryable)."""
        self._loop.fence(reason)
        self._loop.put(Fence(reason))

    def stats(self) -> dict[str, float]:
        return {**self._counters, "waiting": len(self._jobs), **self._paging.gauges()}

    @property
    def token_s(self) -> tuple[float, float] | None:
        """Seconds that a token takes to be computed and, by the host's clock, to be moved; None: not measured yet."""
        compute_s, move_s = self._compute_rate.unit_s, self._move_rate.unit_s
        return None if compute_s is None or move_s is None else (compute_s, move_s)

    def progress(self) -> Progress:
        """How far it got, and what is being done."""
        return self._loop.progress()

    # --- SyncTarget -------------------------------------------------------------------------

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.engine.mesh

    @property
    def param_shardings(self) -> Mapping[str, Any]:
        return self.engine.param_shardings

    def stage(self, sync_id: str, version: int, bucket: int, arrays: Mapping[str, Any]) -> None:
        self._staged.stage(sync_id, version, bucket, arrays)

    def digest(self, sync_id: str) -> Digest:
        return self._staged.digest(sync_id)

    def commit(self, sync_id: str, kv: str, deadline_s: float) -> Ack:
        """Use the staged weights from the next chunk on.

        `kv` means nothing here: what older weights computed is not found any more.
        """
        return self._staged.commit(sync_id, kv, deadline_s, self._loop.put)

    def discard(self, sync_id: str) -> None:
        self._staged.discard(sync_id)

    # --- the thread -------------------------------------------------------------------------

    def _prepare(self) -> Iterator[str]:
        yield from self.engine.compile_steps(self.engine.zero_params(), decode=False)
        self._state = self.engine.init_state()

    def _idle_s(self) -> float:
        """How long to wait for a command: not at all while there is work."""
        if self._can_serve and (self._may_begin or self._begun()):
            return 0.0
        nearest = min((job.deadline_s for job in self._jobs), default=float("inf"))
        return max(0.0, min(IDLE_S, nearest - now_s()))

    @property
    def _can_serve(self) -> bool:
        is_able = self._params is not None and self._state is not None  # None while it compiles
        return is_able and self._loop.fenced is None

    def _begun(self) -> list[Job]:
        return [job for job in self._jobs if job.row is not None]

    def _step(self, new: Sequence[Any]) -> None:
        for command in new:
            self._obey(command)
        self._expire()
        if self._can_serve:
            self._begin()
            if jobs := self._begun():
                self._compute(jobs)

    # --- beginning --------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin jobs, in line, until the next chunk is full; hand over what the tree has whole."""
        self._may_begin = False
        size = self.engine.settings
        left, num, is_fresh, whole = size.chunk_sizes[-1], size.chunk_requests, None, []
        for job in self._jobs:
            if left <= 0 or num == 0 or (job.row is None and not self._free_rows):
                break
            if job.request.min_version > self.version:
                continue
            if job.row is None:
                found = self._find(job)
                if found is None:
                    continue
                if not self._admit(job, found):
                    break  # nobody overtakes who waits for pages
            if job.missing == 0:
                whole.append(job)
                continue
            is_fresh = job.num_done == 0 if is_fresh is None else is_fresh
            if not self.engine.packs_fresh or is_fresh == (job.num_done == 0):
                left, num = left - job.missing, num - 1
        if (pages := self._paging.take_copies()) is not None:
            self._state = self.engine.copy(self._state, *pages)
        self._hand_over(whole)

    def _find(self, job: Job) -> Found | None:
        """What the tree has of the context, as far as that saves time; None while a job before it computes more."""
        found = self._paging.find([self._origin(job)], job.tokens)
        page_size = self.engine.spec.page_size
        first = end = found.num_tokens // page_size
        while end < len(job.chain) and self._is_before(self._computing.get(job.chain[end]), job):
            end += 1
        if end > first and self._saves(job, min(end * page_size, len(job.tokens))):
            return None
        return found if self._saves(job, found.num_tokens) else found.first(0, page_size)

    def _saves(self, job: Job, num_found: int) -> bool:
        """Whether computing what is not found costs less than the whole context."""
        speedup = FRESH_SPEEDUP if self.engine.packs_fresh else 1.0
        return num_found > 0 and (len(job.tokens) - num_found) * speedup <= len(job.tokens)

    def _is_before(self, other: Job | None, job: Job) -> bool:
        return other is not None and other.request.priority >= job.request.priority

    def _origin(self, job: Job) -> Origin:
        return Origin(self.version, job.request.adapter, salt=job.request.salt)

    def _admit(self, job: Job, found: Found) -> bool:
        """False: there are too few pages."""
        admitted = self._paging.admit(self._free_rows[-1], found, len(job.tokens))
        if admitted is None:
            return False
        job.row = self._free_rows.pop()
        job.started_s = job.started_s or now_s()
        job.num_done = job.num_found = admitted.num_tokens
        self._counters["found_tokens"] += admitted.num_tokens
        for page in job.chain[admitted.num_tokens // self.engine.spec.page_size :]:
            self._computing.setdefault(page, job)
        return True

    def _leave(self, job: Job) -> None:
        """The job gives up its row and pages, if it has any."""
        if job.row is None:
            return
        for page in job.chain:
            if self._computing.get(page) is job:
                del self._computing[page]
        self._paging.drop(job.row)
        self._free_rows.append(job.row)
        job.row, job.num_done, job.num_found = None, 0, 0
        self._may_begin = True

    # --- computing --------------------------------------------------------------------------

    def _compute(self, waiting: list[Job]) -> None:
        """One chunk; those whose prefix is whole are handed over."""
        start = now_s()
        sizes = self.engine.settings.chunk_sizes
        chosen = self._chooser.choose([(job.num_done, job.missing) for job in waiting])
        jobs, taken = [waiting[i] for i, _ in chosen], [n for _, n in chosen]
        self._loop.doing = f"computing prefixes of {len(jobs)} requests"
        ranges = [(job.num_done, job.num_done + n) for job, n in zip(jobs, taken)]
        pieces = [Piece(job.tokens[at:end], at) for job, (at, end) in zip(jobs, ranges)]
        tables = self._paging.tables[np.array([job.row for job in jobs])]
        self._state = self.engine.append(self._params, self._state, tables, pack(pieces, sizes))
        jax.block_until_ready(self._state)  # paces the queue, and makes the times true
        end = now_s()
        self._counters["chunks"] += 1
        self._counters["prompt_chunks"] += 1
        self._counters["chunk_prompts"] += len(self._jobs)
        self._counters["chunk_s"] += end - start
        self._compute_rate.add(sum(taken), end - start)
        self._loop.num_done += 1
        for job, n in zip(jobs, taken):
            self._counters["prefill_tokens"] += n
            job.num_done += n
        whole = (job.request for job in jobs if job.missing == 0)
        tell_chunk(self._loop.track, start, pieces, whole)
        self._hand_over([job for job in jobs if job.missing == 0])

    def _hand_over(self, whole: Sequence[Job]) -> None:
        """List what is complete, and move it."""
        outgoing = []
        for job in whole:
            assert job.row is not None
            self._paging.share(job.row, self._origin(job), job.tokens)
            pages = self._paging.pages_of(job.row, job.start, len(job.tokens))
            outgoing.append(Outgoing(job, job.target, job.tokens, job.start, pages))
        for batch in batches(outgoing, self.engine.move_buckets[-1]):
            self._move(batch)

    def _move(self, batch: Sequence[Outgoing]) -> None:
        start = now_s()
        prefixes = send(self.engine, self._state, batch, self.version)
        end = now_s()
        self._counters["transfer_s"] += end - start
        self._loop.track.add("transfer", start, end, to=batch[0].target.name)
        num_tokens = sum(len(one.tokens) - one.start for one in batch)
        self._move_rate.add(num_tokens, end - start)
        self._loop.num_done += 1  # where the tree has everything, nothing else is done
        self._counters["sent_tokens"] += num_tokens
        for one, prefix in zip(batch, prefixes):
            job = one.owner
            job.times_s = {
                "queue": job.started_s - job.arrived_s,
                "prefill": start - job.started_s,
                "transfer": end - start,
            }
            self._drop(job, prefix)

    # --- commands ---------------------------------------------------------------------------

    def _obey(self, command: Any) -> None:
        if isinstance(command, Job):
            self._add(command)
        elif isinstance(command, Abort):
            error = TurnError("closed", self.name, f"aborted: {command.reason}")
            for job in [job for job in self._jobs if job.request.uid == command.uid]:
                self._counters["aborted"] += 1
                self._drop(job, error)
        elif isinstance(command, Commit):
            self._commit(command)
        elif isinstance(command, Fence):
            self._loop.fence(command.reason)  # a commit that came before it may have lifted it
            self._fail(self._loop.error())

    def _add(self, job: Job) -> None:
        n, context = len(job.request.tokens), self.engine.settings.context
        self._counters["requests"] += 1
        error = None
        if not 2 <= n < context:
            kind = "context" if n >= context else "unsupported"
            detail = f"{job.request.key} has {n} tokens; a prefix needs 2 to engine.context={context} - 1"
            error = TurnError(kind, self.name, detail)
        elif len(self._jobs) >= self.settings.queue_size:
            detail = f"serve.queue_size={self.settings.queue_size} requests are here already"
            error = TurnError("queue_full", self.name, detail, retryable=True)
        elif self._loop.fenced is not None:
            error = self._loop.error()
        if error is not None:
            self._finish(job, error)
            return
        self._jobs.append(job)
        self._jobs.sort(key=lambda j: -j.request.priority)  # stable: arrival within a priority
        self._may_begin = True

    def _commit(self, commit: Commit) -> None:
        start = now_s()
        staged = self._staged.claim(commit)
        if staged is None:
            return
        retired, (self.version, self._params) = self._params, staged
        self._loop.fence(None)
        self._may_begin = True
        for job in self._begun():
            computed = job.num_done - job.num_found
            self._counters["recompute_tokens"] += computed
            self._counters["prefill_tokens"] -= computed  # they will be counted again
            self._counters["found_tokens"] -= job.num_found
            self._leave(job)
        self._counters["swaps"] += 1
        chunks = int(self._counters["chunks"])
        self._loop.track.add("swap", start, now_s(), version=self.version)
        ack = Ack(self.name, self.version, chunks, now_s() - start)
        self._staged.acknowledge(commit, ack, retired)

    # --- ending jobs ------------------------------------------------------------------------

    def _expire(self) -> None:
        now = now_s()
        for job in [job for job in self._jobs if job.deadline_s <= now]:
            detail = f"{job.request.key} passed its deadline before its prefix was computed"
            self._counters["deadlines"] += 1
            self._drop(job, TurnError("deadline", self.name, detail, retryable=True))

    def _fail(self, error: TurnError) -> None:
        for job in list(self._jobs):
            self._drop(job, error)

    def _drop(self, job: Job, result: Prefix | TurnError) -> None:
        self._jobs.remove(job)
        self._leave(job)
        self._finish(job, result)

    def _refuse(self, command: Any, error: TurnError) -> None:
        if isinstance(command, Job):
            self._finish(command, error)
        elif isinstance(command, Commit):
            command.reply.fail(RuntimeError(str(error)))

    def _finish(self, job: Job, result: Prefix | TurnError) -> None:
        self._counters["failed" if isinstance(result, TurnError) else "finished"] += 1
        self._counters["callback_errors"] += not answer(job.on_prefix, result, job.times_s)
