"""DecodeServer: one thread round one engine; sole owner of its DecodeState and of the order of what happens to it.

One iteration of the loop, between any two of which commands are obeyed:
1. Commands: requests, aborts, releases, pause, drain, commit, fence.
2. Deadlines. 3. Waiting turns get slots and pages; what the prefix tree has of their history is shared, and a
Prefix handed over is used if its version allows it.
4. At most one chunk extends KV: suffixes and contexts that came without a Prefix,
   rebuilding after a swap.
5. Turns whose KV is complete are armed (Started); prefixes for other servers, which it computes in the
   role of a prefill server (roles.py), are moved instead and end (Finished).
6. One block is generated, unless other turns still wait for KV and serve.chunks_per_block is not
   reached: a block costs much the same for few as for many. Its tokens (Tokens) and ends (Finished)
   are written to the event stream, each with the version of the weights that made them.
So a commit waits for one block and one chunk, never for a turn. Under `recompute` a swap parks all generating turns;
each decodes again as soon as its own KV is rebuilt. Under `keep` they go on at once and their tokens are marked mixed.
Invariants: every accepted request ends in exactly one on_done, on this thread; a request refused at the door (closed,
fenced) is answered on the caller's. Nothing waits without a deadline, and an idle loop sleeps until a command or a
deadline comes.
Must not: hold a lock while it computes; know text, environments, or of other servers more than where a prefix goes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from kernels.kv import NO_PAGE
from rl_jax.clock import now_s
from rl_jax.engine.chunks import Piece, pack
from rl_jax.engine.state import FINISH_REASONS, RUNNING
from rl_jax.serve import commands
from rl_jax.serve.commands import (
    Add,
    Command,
    Commit,
    Drain,
    OnDone,
    OnPrefix,
    OnTokens,
    PrefixJob,
)
from rl_jax.serve.events import Event, EventStream, Finished, Parked, Started, Swapped, Tokens
from rl_jax.serve.handover import batches, first_missing, send
from rl_jax.serve.loop import Loop, Progress, answer
from rl_jax.serve.new_tokens import score
from rl_jax.serve.paging import Paging
from rl_jax.serve.rates import RATE_TOKENS, AppendRate, Rate
from rl_jax.serve.request_table import RequestTable
from rl_jax.serve.sessions import ActiveTurn, common_prefix
from rl_jax.serve.spans import tell_block, tell_chunk
from rl_jax.serve.staging import StagedWeights
from rl_jax.settings import ServeSettings
from rl_jax.timeline import Track
from rl_jax.types import Ack, BlockTokens, Digest, FinishReason, Prefix, TurnError, TurnRequest

IDLE_S = 1.0  # longest sleep of an idle loop; every command ends it at once


class DecodeServer:
    """Implements SyncTarget. All public methods may be called from any thread."""

    kind = "decode"

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
        """engine: types.Engine with mesh, param_shardings, settings, spec, zero_params, pack, compile_steps.
        template_sha256: of the Renderer that it is started for. loop: what runs it.

        Starts without weights.
        """
        self.template_sha256 = template_sha256
        self.name, self.pool, self.engine, self.settings = name, pool, engine, settings
        self.tags, self.hardware = tuple(tags), hardware
        self.version = -1  # of the weights in use; written by the server's thread
        size = engine.settings
        self._paging = Paging(engine.spec, size.slots, size.table_pages)
        self._table = RequestTable(
            name, pool, size, settings, self._paging,
            fresh_apart=engine.packs_fresh, has_extras=engine.num_likely > 0,
        )  # fmt: skip
        self._events = EventStream(self._table.consume)
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
        self._state: Any = None
        self._epoch = 0
        self._is_paused = False
        self._chunks_in_row = 0  # since the last block
        self._drains: list[Drain] = []  # not empty: requests are refused until `resume`
        self._append_rate = AppendRate()
        self._prefix_rate, self._move_rate = Rate(RATE_TOKENS), Rate(RATE_TOKENS)
        self._times = {"block_s": 0.0, "chunk_s": 0.0, "host_s": 0.0, "transfer_s": 0.0}

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
        """Fail what is left (TurnError closed) and join the thread.

        Raises: TimeoutError if it is stuck.
        """
        self._loop.close()

    # --- requests ---------------------------------------------------------------------------

    def submit(
        self,
        request: TurnRequest,
        prefix: Prefix | None,
        on_done: OnDone,
        on_tokens: OnTokens | None = None,
    ) -> None:
        """Ask for one Turn. prefix: KV of context[:-1], or of the end of it, on this server's mesh, or None.
        on_tokens: told, on the server's thread and before on_done, of each block's tokens.

        on_done gets the Turn or a TurnError exactly once, on the server's thread (on the caller's
        if the server is closed or fenced); it must return at once.
        """
        add = Add(request, prefix, on_done, now_s(), on_tokens=on_tokens)
        if self._loop.fenced is None:
            self._loop.put(add)
        else:
            self._refuse(add, self._loop.error())

    def submit_prefix(
        self, request: TurnRequest, target: Any, on_prefix: OnPrefix, held: int = 0
    ) -> None:
        """As PrefillServer.submit: ask for the KV of context[:-1] on the target's mesh. It takes a slot, under a key
        and a session of its own, while it is computed.
        """
        start = first_missing(held, len(request.tokens) - 1, self.engine.spec.page_size)
        job = PrefixJob(self.name, target, start, on_prefix)
        # The turn itself may come here too, when its server is lost: no attempt is negative.
        plain = {"min_new_tokens": 0, "likely": False}
        ask = replace(
            request, attempt=-1 - request.attempt, max_new_tokens=1, token_index=0, **plain
        )
        add = Add(ask, None, job.done, now_s(), job)
        if self._loop.fenced is None:
            self._loop.put(add)
        else:
            self._refuse(add, self._loop.error())

    def abort(self, uid: str, reason: str) -> None:
        """End every turn of the uid that was submitted before, with finish=ABORT and what was
        sampled.
        """
        self._loop.put(commands.Abort(uid, reason))

    def release(self, session: str) -> None:
        """The session's slot may be used for another one."""
        self._loop.put(commands.Release(session))

    def live_tokens(self, session: str, version: int, tokens: np.ndarray | None = None) -> int:
        """Tokens of the session whose KV a turn under this version could reuse here, as of now; where tokens i32[n]
        are given, of these the first ones that the session has.
        """
        held = self._table.sessions.get(session)
        if held is None:
            return 0
        fits = self._table.kv_policy == "keep" or not held.is_mixed(version)
        num = held.kv_tokens if fits else 0
        return num if tokens is None else common_prefix(held.tokens[:num], tokens)

    @property
    def append_token_s(self) -> float | None:
        """Seconds that a token takes that is appended to a live history; None: not measured yet."""
        return self._append_rate.token_s

    @property
    def step_s(self) -> float | None:
        """Seconds of a decode step, whatever it generates for; None: not measured yet."""
        block_s = self._append_rate.block_s
        return None if block_s is None else block_s / self.engine.settings.steps_per_block

    @property
    def token_s(self) -> tuple[float, float] | None:
        """As PrefillServer's: seconds that a token of a prefix for another server takes to be computed and moved."""
        compute_s, move_s = self._prefix_rate.unit_s, self._move_rate.unit_s
        return None if compute_s is None or move_s is None else (compute_s, move_s)

    def queue_s(self, role: str) -> float:
        """Seconds for which the longest-waiting request of the role (prefill: a prefix for another server; decode: a
        turn) has been in the line for a slot and pages.
        """
        return self._table.longest_wait_s(role == "prefill", now_s())

    @property
    def num_running(self) -> int:
        """Turns that generate now."""
        return self._table.num_running

    # --- control ----------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop after the block under way; commands are still obeyed."""
        self._loop.put(commands.Pause())

    def resume(self) -> None:
        """End a pause or a drain."""
        self._loop.put(commands.Resume())

    def drain(self, deadline_s: float) -> bool:
        """Refuse new requests until `resume` and wait for those under way; what is left at the
        deadline is aborted.

        Returns: whether all ended by themselves. Raises: TimeoutError if the server does not even
        abort.
        """
        drain = Drain()
        self._loop.put(drain)
        try:
            return drain.reply.wait(deadline_s, f"{self.name}: drain")
        except TimeoutError:
            abort = Drain(abort=True)
            self._loop.put(abort)
            abort.reply.wait(self.settings.stop_deadline_s, f"{self.name}: abort of what is left")
            return False

    @property
    def fenced(self) -> str | None:
        """Why nothing is served, or None."""
        return self._loop.fenced

    def fence(self, reason: str) -> None:
        """Serve nothing more: what is here fails (retryable), what comes is refused, until a commit
        succeeds.
        """
        self._loop.fence(reason)
        self._loop.put(commands.Fence(reason))

    def stats(self) -> dict[str, float]:
        """Cumulative counters and seconds, and how much is here now."""
        return {**self._table.counters, **self._times, **self._table.gauges()}

    def progress(self) -> Progress:
        """How far it got, and what is being done."""
        return self._loop.progress()

    def events(self) -> tuple[tuple[int, Event], ...]:
        """The last events of the stream, numbered."""
        return self._events.recent()

    # --- SyncTarget -------------------------------------------------------------------------

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.engine.mesh

    @property
    def param_shardings(self) -> Mapping[str, Any]:
        return self.engine.param_shardings

    def stage(self, sync_id: str, version: int, bucket: int, arrays: Mapping[str, Any]) -> None:
        """Keep arrays (on this mesh, in param_shardings) beside the weights in use. Raises:
        ValueError.
        """
        self._staged.stage(sync_id, version, bucket, arrays)

    def digest(self, sync_id: str) -> Digest:
        return self._staged.digest(sync_id)

    def commit(self, sync_id: str, kv: str, deadline_s: float) -> Ack:
        """Use the staged weights from the next block on.

        Raises: TimeoutError (the swap will not happen, unless it was under way), KeyError,
        ValueError, RuntimeError.
        """
        return self._staged.commit(sync_id, kv, deadline_s, self._loop.put)

    def discard(self, sync_id: str) -> None:
        self._staged.discard(sync_id)

    # --- one iteration ----------------------------------------------------------------------

    def _prepare(self) -> Iterator[str]:
        yield from self.engine.compile_steps(self.engine.zero_params())
        self._state = self.engine.init_state()

    def _idle_s(self) -> float:
        """How long to wait for a command: not at all while there is work."""
        if self._can_serve and self._table.has_work:
            return 0.0
        return max(0.0, min(IDLE_S, self._table.next_deadline_s - now_s()))

    @property
    def _can_serve(self) -> bool:
        is_able = self._params is not None and self._state is not None  # None while it compiles
        return is_able and not self._is_paused and self._loop.fenced is None

    def _step(self, new: Sequence[Command]) -> None:
        start, waited = now_s(), self._times["block_s"] + self._times["chunk_s"]
        table = self._table
        table.now_s = now_s()
        for command in new:
            self._obey(command)
        for turn in table.overdue():
            self._end([turn], FinishReason.ERROR, table.deadline_error(turn))
        if self._can_serve:
            table.admit(self.version)
            self._copy()
            self._extend()
            self._hand_over()
            self._arm()
            if not table.num_filling or self._chunks_in_row >= self.settings.chunks_per_block:
                self._generate()
        if self._drains and not table.turns:
            self._drained(True)
        waited = self._times["block_s"] + self._times["chunk_s"] - waited
        self._times["host_s"] += now_s() - start - waited

    def _copy(self) -> None:
        """Pages that admitted turns share in part, before anybody writes to them."""
        if (pages := self._paging.take_copies()) is not None:
            self._state = self.engine.copy(self._state, *pages)

    def _extend(self) -> None:
        turns, pieces = self._table.pieces()
        if not turns:
            return
        self._loop.doing = f"extending {len(turns)} histories"
        start = now_s()
        tables = self._paging.tables[np.array([turn.session.slot for turn in turns])]
        bad: list[ActiveTurn] = []
        if turns[0].wants_scores:
            work = list(zip(turns, pieces))
            self._state, bad = score(
                self.engine, self._params, self._state, tables, work, self.version
            )
        else:
            self._append(turns, pieces, tables, start)
        self._times["chunk_s"] += now_s() - start
        self._table.filled(turns, pieces, self.version)
        whole = (turn.request for turn in turns if turn.missing_kv == 0)
        tell_chunk(self._loop.track, start, pieces, whole)
        for turn in bad:
            self._end([turn], FinishReason.ERROR, self._nan_error(turn))
        self._chunks_in_row += 1
        self._loop.num_done += 1

    def _append(
        self,
        turns: Sequence[ActiveTurn],
        pieces: Sequence[Piece],
        tables: np.ndarray,
        start: float,
    ) -> None:
        chunk = pack(pieces, self.engine.settings.chunk_sizes)
        self._state = self.engine.append(self._params, self._state, tables, chunk)
        num_tokens = sum(len(piece.tokens) for piece in pieces)
        if any(turn.job is not None for turn in turns):  # no block may follow that would pace it
            jax.block_until_ready(self._state)
            self._prefix_rate.add(num_tokens, now_s() - start)
        self._append_rate.chunk(num_tokens, start)

    def _nan_error(self, turn: ActiveTurn) -> TurnError:
        detail = f"{turn.request.key}: non-finite logits under version {self.version}"
        return TurnError("nan", self.name, detail)

    def _hand_over(self) -> None:
        """Move prefixes for other servers that are complete."""
        for batch in batches(self._table.take_whole(), self.engine.move_buckets[-1]):
            self._loop.doing = f"moving {len(batch)} prefixes to {batch[0].target.name}"
            start = now_s()
            prefixes = send(self.engine, self._state, batch, self.version)
            took_s = now_s() - start
            num_tokens = sum(len(one.tokens) - one.start for one in batch)
            self._move_rate.add(num_tokens, took_s)
            self._times["transfer_s"] += took_s
            self._loop.track.add("transfer", start, start + took_s, to=batch[0].target.name)
            self._table.counters["sent_tokens"] += num_tokens
            self._loop.num_done += 1
            for one, prefix in zip(batch, prefixes):
                turn = one.owner
                turn.armed_s, turn.job.prefix, turn.job.transfer_s = start, prefix, took_s
                self._events.write(Finished(turn.request.key, FinishReason.LENGTH))

    def _arm(self) -> None:
        turns = self._table.take_ready()
        if not turns:
            return
        epochs = list(range(self._epoch, self._epoch + len(turns)))
        self._epoch += len(turns)
        slots = np.array([turn.session.slot for turn in turns], np.int32)
        self._insert([turn for turn in turns if turn.prefix is not None])
        sampling = self._table.sampling(turns, epochs)
        self._state = self.engine.arm(self._state, slots, sampling)
        for turn, epoch, slot in zip(turns, epochs, slots.tolist()):
            self._events.write(Started(turn.request.key, slot, epoch, self.version))

    def _insert(self, turns: Sequence[ActiveTurn]) -> None:
        """The pages that came with these turns to those of their slots, once for all that share arrays."""
        spec = self.engine.spec
        sources: dict[int, tuple[Any, np.ndarray]] = {}
        for turn in turns:
            prefix = turn.prefix
            assert prefix is not None
            if not spec.same_pages(prefix.spec):
                raise ValueError(
                    f"{self.name}: a prefix of {prefix.spec} does not fit the cache of {spec}; "
                    "prefill and decode servers must serve the same model in pages of one size"
                )
            empty = np.full(prefix.kv[0][0].shape[0], NO_PAGE, np.int32)
            _, pages = sources.setdefault(id(prefix.kv), (prefix.kv, empty))
            begin, end = prefix.start // spec.page_size, spec.pages_of(prefix.num_tokens)
            table = self._paging.tables[turn.session.slot]
            pages[prefix.first : prefix.first + end - begin] = table[begin:end]
        for kv, pages in sources.values():
            self._state = self.engine.insert(self._state, kv, pages)

    def _make_room(self) -> None:
        """See that every running slot has pages for what a block writes; who came last gives way."""
        table, paging, log = self._table, self._paging, self._table.log
        needs = np.minimum(log.num_tokens + table.lead, self.engine.settings.context)
        short = np.flatnonzero(log.is_running & (paging.room < needs)).tolist()
        for turn in sorted(map(table.running_turn, short), key=lambda turn: turn.order):
            while turn.is_running:
                if paging.grow(turn.session.slot, int(needs[turn.session.slot])):
                    break
                last = table.last_admitted()
                if last.is_running:
                    self._stop_slots([last.session.slot])
                self._events.write(Parked(last.request.key))

    def _generate(self) -> None:
        self._chunks_in_row = 0
        self._make_room()
        if not self._table.num_running:
            self._append_rate.forget()
            return
        self._loop.doing = f"generating for {self._table.num_running} requests"
        start = now_s()
        is_running = self._table.log.is_running[:, None]
        tables = np.where(is_running, self._paging.tables, np.int32(NO_PAGE))
        asked = {} if (held := self._table.held()) is None else {"held": held}
        self._state, block = self.engine.generate(self._params, self._state, tables, **asked)
        block = fetched(block)
        end = now_s()
        self._append_rate.block(start, end)
        self._times["block_s"] += end - start
        self._table.count_block()
        self._table.now_s = now_s()
        tell_block(self._loop.track, start, end, block, self._table, self.version)
        self._deliver(block)
        self._loop.num_done += 1

    def _deliver(self, block: BlockTokens) -> None:
        """Tokens and ends of one block, to the event stream."""
        counts, epochs = block.valid.sum(axis=1), block.slot_epoch.copy()
        self._events.write(Tokens(self.version, epochs, counts, block))
        for slot in np.flatnonzero(block.finish != RUNNING).tolist():
            self._ended(block, slot)

    def _ended(self, block: BlockTokens, slot: int) -> None:
        """The device ended what the slot generated."""
        turn = self._table.running_turn(slot)
        if turn is None or turn.epoch != block.slot_epoch[slot]:
            return
        error = self._nan_error(turn) if block.nan[slot] else None
        reason = FINISH_REASONS[int(block.finish[slot])]
        self._events.write(Finished(turn.request.key, reason, error))

    # --- commands ---------------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        table = self._table
        if isinstance(command, Add):
            if self._loop.fenced is not None:
                self._refuse(command, self._loop.error())
            elif self._drains:
                why = TurnError("closed", self.name, "the server is being drained", retryable=True)
                self._refuse(command, why)
            else:
                table.add(command)
        elif isinstance(command, commands.Abort):
            self._end(table.aborted_by(command.uid), FinishReason.ABORT)
        elif isinstance(command, commands.Release):
            table.release(command.session)
        elif isinstance(command, Commit):
            self._commit(command)
        elif isinstance(command, commands.Pause):
            self._is_paused = True
        elif isinstance(command, commands.Resume):
            self._is_paused = False
            self._drained(False)
        elif isinstance(command, Drain):
            self._drains.append(command)
            if command.abort:
                self._end(list(table.turns.values()), FinishReason.ABORT)
        else:
            self._loop.fence(command.reason)  # a commit that came before it may have lifted it
            self._fail(self._loop.error())

    def _end(
        self, turns: Sequence[ActiveTurn], finish: FinishReason, error: TurnError | None = None
    ) -> None:
        """End turns from outside the device, whatever they are doing."""
        self._stop_slots([turn.session.slot for turn in turns if turn.is_running])
        for turn in turns:
            self._events.write(Finished(turn.request.key, finish, error))

    def _stop_slots(self, slots: Sequence[int | None]) -> None:
        if slots and not self._loop.is_dead:  # the state of a dead engine is gone
            self._state = self.engine.free(self._state, np.array(slots, np.int32))

    def _commit(self, commit: Commit) -> None:
        start = now_s()
        staged = self._staged.claim(commit)
        if staged is None:
            return
        version, params = staged
        self._loop.doing = f"swapping to version {version}"
        if commit.kv == "recompute":
            self._stop_slots(self._table.running_slots())
        retired, self._params, self.version = self._params, params, version
        self._loop.fence(None)
        self._events.write(Swapped(version, commit.sync_id, commit.kv))
        blocks = int(self._table.counters["blocks"])
        self._loop.track.add("swap", start, now_s(), version=version)
        ack = Ack(self.name, version, blocks, now_s() - start)
        self._staged.acknowledge(commit, ack, retired)
        self._loop.num_done += 1

    def _drained(self, is_empty: bool) -> None:
        """Answer those who wait for the drain; with False (`resume`) requests are accepted again."""
        for drain in self._drains:
            drain.reply.set(is_empty)
        if not is_empty:
            self._drains = []

    def _fail(self, error: TurnError) -> None:
        """End all turns and forget all sessions."""
        self._end(list(self._table.turns.values()), FinishReason.ERROR, error)
        for name in list(self._table.sessions):
            self._table.release(name)
        if self._drains:
            self._drained(True)

    def _refuse(self, command: Command, error: TurnError) -> None:
        if isinstance(command, Add):
            answer(command.on_done, error)
        elif isinstance(command, Commit):
            command.reply.fail(RuntimeError(str(error)))
        elif isinstance(command, Drain):
            command.reply.set(True)


def fetched(block: BlockTokens) -> BlockTokens:
    """The block's arrays on the host; waits for the device."""
    whole = {**vars(block), "likely": None}
    host: dict[str, Any] = {n: None if a is None else np.asarray(a) for n, a in whole.items()}
    if block.likely is not None:
        host["likely"] = tuple(map(np.asarray, block.likely))
    return BlockTokens(**host)
