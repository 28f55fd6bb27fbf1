"""RequestTable: which requests one decode server holds, what each waits for, and whose slot is
whose.

Owns: sessions, slots, their pages (paging.py) and new tokens (block_log.py), the waiting line, every
turn under way; its writer is the server's thread. It learns what happened on the device only from the
server's event stream (`consume`).
Invariants: a turn has a slot and pages from its admission to its end; every turn accepted by `add`
ends in exactly one `on_done`; KV of one version is never read under another one where the policy is
`recompute`; the waiting line goes by priority, then by arrival, and nobody overtakes who waits for
pages.
Life of a turn: 1 `add` checks it and makes its session. 2 `admit` gives it a slot, and pages: those
of its history that the prefix tree has, and new ones. One that needs what another turn is computing
just now waits for that. 3 `pieces` and `filled` extend the KV, chunk by chunk; then it is listed in
the tree. 4 Started: its slot's tokens are its own. 5 Tokens add up in the block log. 6 Finished takes
them, builds the Turn and lists its KV; slot and pages are free. A swap under `recompute`, and Parked
where pages ran out, send a turn back to 2 with its sampled tokens kept.
Must not: call JAX, block, or read a clock (times are arguments).
"""

import bisect
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rl_jax.engine.chunks import Chooser, Piece
from rl_jax.engine.prefix_tree import Origin
from rl_jax.serve import new_tokens
from rl_jax.serve.block_log import BlockLog
from rl_jax.serve.commands import Add, OnDone, PrefixJob
from rl_jax.serve.events import Event, Finished, Parked, Started, Swapped, Tokens
from rl_jax.serve.handover import Outgoing
from rl_jax.serve.loop import answer
from rl_jax.serve.paging import Found, Paging, chain
from rl_jax.serve.refusals import refusal
from rl_jax.serve.sessions import ActiveTurn, Phase, Session
from rl_jax.serve.transfer import tokens_sha
from rl_jax.settings import EngineSettings, ServeSettings
from rl_jax.types import FinishReason, NewTokens, SlotSampling, Turn, TurnError

COUNTERS = (
    "requests", "finished", "failed", "refused", "deadlines",
    "prefill_tokens", "append_tokens", "recompute_tokens", "decode_tokens", "received_tokens",
    "cached_tokens", "found_tokens", "sent_tokens", "long_appends", "refused_prefixes", "parked", "preempted",
    "stale_tokens", "callback_errors", "blocks", "chunks", "swaps",
    # Sums over blocks of what was there: requests that ran, that waited for a slot; pages held, and all pages.
    "block_running", "block_waiting", "block_held_pages", "block_pages",
)  # fmt: skip


class RequestTable:
    def __init__(
        self,
        server: str,
        pool: str,
        engine: EngineSettings,
        serve: ServeSettings,
        paging: Paging,
        *,
        fresh_apart: bool = False,
        has_extras: bool = False,
    ):
        """paging: of the engine's cache. fresh_apart: of chunks.Chooser, as the engine likes it. has_extras: whether
        the engine has the programs for what clients of a served model ask for.
        """
        self._has_extras = has_extras
        self.paging = paging
        self.server, self.pool, self.engine, self.serve = server, pool, engine, serve
        self._chooser = Chooser(engine.chunk_sizes[-1], engine.chunk_requests, fresh_apart)
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.counters |= {f"finish_{reason.value}": 0 for reason in FinishReason}
        self.sessions: dict[str, Session] = {}
        self.turns: dict[str, ActiveTurn] = {}  # by request key
        self.kv_policy = "recompute"
        self.version = -1
        self.log = BlockLog(engine.slots)
        self.lead = engine.steps_per_block  # tokens that a slot has pages for beyond its history
        self.now_s = 0.0  # set by the server before it acts
        self._waiting: list[ActiveTurn] = []  # sorted by their order
        self._arrivals = 0
        self._filling: list[ActiveTurn] = []
        self._ready: list[ActiveTurn] = []
        self._running: dict[int, ActiveTurn] = {}  # by slot
        self._streamed: set[int] = set()  # of these, slots whose turns are told of each block
        self._asking: set[int] = set()  # and those that need Engine.generate's `held`
        self._free_slots = list(range(engine.slots - 1, -1, -1))
        self._filled_now: Counter[int] = (
            Counter()
        )  # hashes of the pages that _filling turns compute
        self._can_admit = False  # something changed since the line was last walked
        self._next_deadline_s = float("inf")

    # --- requests come and go ---------------------------------------------------------------

    def add(self, command: Add) -> TurnError | None:
        """Take a request in, or answer it at once with the reason why not, which is returned too."""
        error = self._refuse(command)
        if error is None:
            self._add_turn(command)
        else:
            self.counters["refused"] += 1
            self._answer(command.on_done, error)
        return error

    def aborted_by(self, uid: str) -> list[ActiveTurn]:
        return [turn for turn in self.turns.values() if turn.request.uid == uid]

    def release(self, name: str) -> None:
        """The episode ended: its slot is free once no turn of it is under way."""
        session = self.sessions.get(name)
        if session is not None:
            session.released = True
            if session.turn is None:
                self._remove(session)

    def overdue(self) -> list[ActiveTurn]:
        """Turns past their deadline."""
        if self.now_s < self._next_deadline_s:
            return []
        late = [turn for turn in self.turns.values() if turn.deadline_s <= self.now_s]
        rest = (t.deadline_s for t in self.turns.values() if t.deadline_s > self.now_s)
        self._next_deadline_s = min(rest, default=float("inf"))
        return late

    def deadline_error(self, turn: ActiveTurn) -> TurnError:
        detail = f"{turn.request.key} passed its deadline of {turn.request.deadline_s:.3g} s while "
        detail += turn.phase.value
        if turn.phase is Phase.WAITING and turn.request.min_version > self.version:
            detail += f" under version {turn.request.min_version} or later"
        elif turn.phase is Phase.WAITING:
            pages = self.paging.gauges()
            detail += (
                f": {len(self._free_slots)} of {self.engine.slots} slots and {pages['free_pages']} of {pages['pages']}"
                " pages are free; run fewer episodes at once, or raise engine.slots or engine.num_pages"
            )
        return TurnError("deadline", self.server, detail, retryable=True)

    @property
    def next_deadline_s(self) -> float:
        return self._next_deadline_s

    # --- from waiting to generating ---------------------------------------------------------

    def admit(self, version: int) -> None:
        """Give slots and pages to waiting turns, in order."""
        self.version = version
        if not self._can_admit:
            return
        self._can_admit = False
        left, is_full = [], False
        for i, turn in enumerate(self._waiting):
            if is_full or not self._free_slots:
                left += self._waiting[i:]
                break
            if turn.request.min_version > version:
                left.append(turn)
                continue
            found = self._find(turn)
            if self._waits_for_another(turn, found):
                left.append(turn)
            elif not self._admit(turn, found):
                is_full = True
                left.append(turn)
        self._waiting = left

    def pieces(self) -> tuple[list[ActiveTurn], list[Piece]]:
        """The next chunk: whose KV is extended, by which tokens."""
        filling = self._filling
        scores = bool(filling) and filling[0].wants_scores  # by another program than the others
        filling = [turn for turn in filling if turn.wants_scores == scores]
        waiting = [(turn.session.kv_tokens, turn.missing_kv) for turn in filling]
        chosen = self._chooser.choose(waiting)
        turns, pieces = [filling[i] for i, _ in chosen], []
        for turn, (_, n) in zip(turns, chosen):
            start = turn.session.kv_tokens
            pieces.append(Piece(turn.session.tokens[start : start + n].copy(), start))
        return turns, pieces

    def filled(self, turns: Sequence[ActiveTurn], pieces: Sequence[Piece], version: int) -> None:
        """The chunk was computed under this version."""
        self.counters["chunks"] += 1
        for turn, piece in zip(turns, pieces):
            session, end = turn.session, piece.start + len(piece.tokens)
            again = max(0, min(end, session.computed) - piece.start)
            is_append = turn.cached_prompt > 0 and turn.job is None
            new = "append_tokens" if is_append else "prefill_tokens"
            self.counters["recompute_tokens"] += again
            self.counters[new] += len(piece.tokens) - again
            session.wrote_kv(end, version)
            if turn.missing_kv == 0:
                self._filling.remove(turn)
                self._share(session)
                self._made(turn)
                if turn.wants_scores:
                    turn.is_scored = True
                    self._tell(turn, new_tokens.of_scores(turn))
                turn.phase = Phase.READY
                self._ready.append(turn)

    def take_whole(self) -> list[Outgoing]:
        """Prefixes for other servers that are complete; the server moves them and writes Finished for each."""
        whole = [turn for turn in self._ready if turn.job is not None]
        return [self._outgoing(turn, turn.job) for turn in whole if turn.job is not None]

    def take_ready(self) -> list[ActiveTurn]:
        """Turns to arm now; the server writes Started for each."""
        ready, self._ready = self._ready, []
        return ready

    def sampling(self, turns: Sequence[ActiveTurn], epochs: Sequence[int]) -> SlotSampling:
        """How the slots of these turns go on sampling."""
        requests, sessions = [t.request for t in turns], [t.session for t in turns]
        ints, floats = (lambda x: np.array(x, np.int32)), (lambda x: np.array(x, np.float32))
        index = [r.token_index for r in requests]
        stops = np.full((len(turns), self.engine.num_stop_tokens), -1, np.int32)
        for row, request in zip(stops, requests):
            row[: len(request.stop_token_ids)] = request.stop_token_ids
        return SlotSampling(
            last_token=ints([s.tokens[s.num_tokens - 1] for s in sessions]),
            context_length=ints([s.num_tokens for s in sessions]),
            seed=np.array([r.seed & (2**64 - 1) for r in requests], np.uint64),
            token_index=ints([i + t.num_sampled for i, t in zip(index, turns)]),
            max_new_tokens=ints([i + r.max_new_tokens for i, r in zip(index, requests)]),
            temperature=floats([r.temperature for r in requests]),
            top_p=floats([r.top_p for r in requests]),
            top_k=ints([r.top_k for r in requests]),
            stop_token_ids=stops,
            epoch=ints(epochs),
        )

    # --- the event stream -------------------------------------------------------------------

    def consume(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self._tokens(event)
        elif isinstance(event, Started):
            self._started(event)
        elif isinstance(event, Finished):
            self._finished(event)
        elif isinstance(event, Parked):
            self._park(self.turns[event.key])
        else:
            self._swapped(event)

    def running_slots(self) -> list[int]:
        """Slots that are generating."""
        return list(self._running)

    def running_turn(self, slot: int) -> ActiveTurn | None:
        """The turn that generates in the slot. Its tokens are in `log` until it leaves."""
        return self._running.get(slot)

    def held(self) -> np.ndarray | None:
        """Engine.generate's, while a turn asks for what only that does."""
        if not self._asking:
            return None
        out = np.zeros(self.engine.slots, np.int32)
        for slot in tuple(self._asking):
            request = self._running[slot].request
            out[slot] = request.token_index + request.min_new_tokens
            sampled = self.log.num_tokens[slot] - len(request.tokens)
            if not request.likely and sampled >= request.min_new_tokens:
                self._asking.discard(slot)
        return out

    def last_admitted(self) -> ActiveTurn:
        """Whose turn it is to give way where pages run out."""
        return max((*self._running.values(), *self._filling), key=lambda turn: turn.order)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_filling(self) -> int:
        """Turns in a slot that lack KV."""
        return len(self._filling)

    def longest_wait_s(self, of_jobs: bool, now_s: float) -> float:
        """Of the turns that wait for a slot and pages, or else of the prefixes for others; any thread may ask."""
        return max(
            (
                now_s - turn.waits_from_s
                for turn in tuple(self._waiting)
                if (turn.job is not None) == of_jobs and turn.request.min_version <= self.version
            ),
            default=0.0,
        )

    @property
    def has_work(self) -> bool:
        """Whether the next iteration could do anything."""
        return bool(self._filling or self._ready or self._running or self._can_admit)

    def count_block(self) -> None:
        """A block runs for what is here now. The server's thread only."""
        seen, paging = self.counters, self.paging
        seen["blocks"] += 1
        seen["block_running"] += len(self._running)
        seen["block_waiting"] += len(self._waiting)
        seen["block_held_pages"] += paging.num_held
        seen["block_pages"] += paging.pool.num_pages

    def gauges(self) -> dict[str, int]:
        return {
            "waiting": len(self._waiting),
            "filling": self.num_filling,
            "running": len(self._running),
            "sessions": len(self.sessions),
            "free_slots": len(self._free_slots),
            **self.paging.gauges(),
        }

    # --- private ----------------------------------------------------------------------------

    def _refuse(self, command: Add) -> TurnError | None:
        request = command.request
        why = refusal(command, self.engine, self._has_extras)
        session = self.sessions.get(request.session)
        if why is None and len(self.turns) >= self.serve.queue_size:
            detail = f"serve.queue_size={self.serve.queue_size} requests are here already"
            return TurnError("queue_full", self.server, f"{request.key}: {detail}", retryable=True)
        if why is None and session is not None and session.turn is not None:
            why = "unsupported", "comes while another turn of its session is under way"
        return why and TurnError(why[0], self.server, f"{request.key} {why[1]}")

    def _add_turn(self, command: Add) -> None:
        request = command.request
        session = self.sessions.get(request.session)
        if session is None:
            session = self.sessions[request.session] = Session(request.session, self.engine.context)
        session.released = command.job is not None  # nobody comes back to it
        if session.salt != request.salt:
            self._forget(session)
            session.salt = request.salt
        session.set_context(np.asarray(request.tokens, np.int32))
        added = session.tokens[session.reported : session.num_tokens - request.token_index]
        turn = ActiveTurn(
            request=request,
            session=session,
            on_done=command.on_done,
            prefix=command.prefix,
            arrived_s=command.arrived_s,
            deadline_s=command.arrived_s + request.deadline_s,
            prompt_tokens=added.copy(),
            order=(-request.priority, self._arrivals),
            job=command.job,
            on_tokens=command.on_tokens,
        )
        self._arrivals += 1
        session.turn = turn
        self.turns[request.key] = turn
        self.counters["requests"] += 1
        self._next_deadline_s = min(self._next_deadline_s, turn.deadline_s)
        if request.max_new_tokens <= 0:  # nothing to sample: a Turn without tokens, at once
            self._finished(Finished(request.key, FinishReason.LENGTH))
            return
        self._wait(turn)

    def _wait(self, turn: ActiveTurn) -> None:
        turn.phase, turn.chain, turn.waits_from_s = Phase.WAITING, None, self.now_s
        bisect.insort(self._waiting, turn, key=lambda turn: turn.order)
        self._can_admit = True

    def _outgoing(self, turn: ActiveTurn, job: PrefixJob) -> Outgoing:
        session = turn.session
        assert session.slot is not None
        tokens = session.tokens[: session.num_tokens - 1].copy()
        pages = self.paging.pages_of(session.slot, job.start, len(tokens))
        return Outgoing(turn, job.target, tokens, job.start, pages)

    def _origins(self, turn: ActiveTurn) -> list[Origin]:
        """Where KV that the turn may read now is listed; the best first. What goes to others is of one version."""
        session, origins = turn.session, [Origin(self.version, salt=turn.request.salt)]
        keeps = self.kv_policy == "keep" and turn.job is None
        if keeps and session.listed not in (None, origins[0]):
            origins.append(session.listed)
        return origins

    def _find(self, turn: ActiveTurn) -> Found:
        """What the tree has of the turn's history; nothing where all of it is to be scored."""
        session, num = turn.session, 0 if turn.wants_scores else turn.session.num_tokens - 1
        return self.paging.find(self._origins(turn), session.tokens[:num])

    def _chain(self, turn: ActiveTurn) -> list[int]:
        if turn.chain is None:
            tokens = turn.session.tokens[: turn.session.num_tokens - 1]
            turn.chain = chain(tokens, self.paging.spec.page_size, turn.request.salt)
        return turn.chain

    def _waits_for_another(self, turn: ActiveTurn, found: Found) -> bool:
        """Whether the next page that the tree lacks is being computed for another turn."""
        if not self._filled_now or turn.prefix is not None or turn.wants_scores:
            return False
        if found.num_tokens == turn.session.num_tokens - 1:
            return False
        return self._chain(turn)[found.num_tokens // self.paging.spec.page_size] in self._filled_now

    def _admit(self, turn: ActiveTurn, found: Found) -> bool:
        """False: there are too few pages."""
        session, context = turn.session, self.engine.context
        page_size = self.paging.spec.page_size
        usable = self._usable(turn, found)
        if usable and found.num_tokens < session.num_tokens - 1:
            assert turn.prefix is not None
            found = found.first(
                turn.prefix.start // page_size, page_size
            )  # the rest comes with the turn
        slot, room = self._free_slots[-1], min(session.num_tokens + self.lead, context)
        if (admitted := self.paging.admit(slot, found, room)) is None:
            return False
        if (
            usable and admitted != found
        ):  # it fits behind what was found, and would be written over the rest
            usable = False
        session.slot = self._free_slots.pop()
        turn.admitted_s = turn.admitted_s or self.now_s
        self._begin(turn, admitted, usable)
        return True

    def _begin(self, turn: ActiveTurn, found: Found, usable: bool) -> None:
        """With its slot and pages: count what is there, and what is missing. usable: of its prefix."""
        session, prefix = turn.session, turn.prefix
        is_whole = found.num_tokens == session.num_tokens - 1
        if prefix is not None and (is_whole or not usable):
            self.counters["refused_prefixes"] += not usable
            session.computed = max(session.computed, prefix.num_tokens)
            turn.prefix = prefix = None
        session.found_kv(found.num_tokens, found.origin)
        turn.scored = [] if turn.wants_scores else turn.scored
        turn.cached_prompt = found.num_tokens
        counter = "cached_tokens" if turn.job is None else "found_tokens"
        self.counters[counter] += found.num_tokens
        if prefix is not None:
            session.wrote_kv(prefix.num_tokens, prefix.version)
            self.counters["received_tokens"] += prefix.num_tokens - prefix.start
        limit = self.engine.append_limit  # 0: the router chose by cost
        is_long = turn.cached_prompt > 0 and 0 < limit < turn.missing_kv and turn.job is None
        self.counters["long_appends"] += is_long
        if found.num_tokens < session.num_tokens - 1:
            first = found.num_tokens // self.paging.spec.page_size
            turn.fills = tuple(self._chain(turn)[first:])
        self._filled_now.update(turn.fills)
        if turn.missing_kv:
            turn.phase = Phase.FILLING
            self._filling.append(turn)
        else:
            turn.phase = Phase.READY
            self._ready.append(turn)

    def _made(self, turn: ActiveTurn) -> None:
        """What the turn computed, or brought, is there or given up: nobody waits for it any more."""
        for page in turn.fills:
            self._filled_now[page] -= 1
            if not self._filled_now[page]:
                del self._filled_now[page]
        self._can_admit |= bool(turn.fills)
        turn.fills = ()

    def _usable(self, turn: ActiveTurn, found: Found) -> bool:
        """Whether the turn's prefix may be read here, behind what was found."""
        prefix, session = turn.prefix, turn.session
        if prefix is None or turn.wants_scores:
            return False
        n = session.num_tokens - 1
        # The key of cached KV holds all it was computed from: tokens, adapter, version.
        is_same = prefix.num_tokens == n and prefix.adapter is None
        is_same = is_same and prefix.tokens_sha == tokens_sha(session.tokens[:n])
        is_same = is_same and prefix.start <= found.num_tokens
        return is_same and (prefix.version == self.version or self.kv_policy == "keep")

    def _share(self, session: Session) -> None:
        """Others, and the session's next turn, may read the KV that the slot has."""
        if session.slot is not None and session.kv_tokens:
            self.paging.share(session.slot, session.list_kv(), session.tokens[: session.kv_tokens])

    def _leave(self, turn: ActiveTurn, keeps: bool) -> None:
        """The turn gives up its slot and pages; keeps: its KV is worth to be listed."""
        session = turn.session
        self._made(turn)
        if turn.phase is Phase.FILLING:
            self._filling.remove(turn)
        elif turn.phase is Phase.READY:
            self._ready.remove(turn)
        elif session.slot is not None:
            del self._running[session.slot]
            self._streamed.discard(session.slot)
            self._asking.discard(session.slot)
            for made in self.log.stop(session.slot, is_filtered=turn.is_filtered):
                turn.add(made)
        if session.slot is None:
            return
        if keeps and turn.prefix is None:  # else it was never inserted
            self._share(session)
        else:
            session.drop_kv()
        self.paging.drop(session.slot)
        self._free_slots.append(session.slot)
        session.slot = None
        self._can_admit = True

    def _park(self, turn: ActiveTurn) -> None:
        self.counters["preempted"] += 1
        self._leave(turn, keeps=True)
        self._wait(turn)

    def _started(self, event: Started) -> None:
        turn = self.turns[event.key]
        had_prefix = turn.prefix is not None
        turn.phase, turn.epoch, turn.prefix = Phase.RUNNING, event.epoch, None
        turn.armed_s = turn.armed_s or self.now_s
        self._running[event.slot] = turn
        if turn.on_tokens is not None:
            self._streamed.add(event.slot)
        if turn.request.likely or turn.request.min_new_tokens > 0:
            self._asking.add(event.slot)
        self.log.start(event.slot, event.epoch, turn.session.num_tokens)
        if had_prefix:
            self._share(turn.session)
        self._made(turn)

    def _tokens(self, event: Tokens) -> None:
        num, stale = self.log.add(event, self.now_s)
        for slot in self._streamed:
            turn = self._running[slot]
            if (piece := new_tokens.of_block(turn, event)) is not None:
                self._tell(turn, piece)
        self.counters["decode_tokens"] += num
        self.counters["stale_tokens"] += stale

    def _tell(self, turn: ActiveTurn, piece: NewTokens) -> None:
        if turn.on_tokens is not None:
            self.counters["callback_errors"] += not answer(turn.on_tokens, piece)

    def _finished(self, event: Finished) -> None:
        turn = self.turns.pop(event.key)
        session = turn.session
        if turn.phase is Phase.WAITING:
            self._waiting = [other for other in self._waiting if other is not turn]
        else:
            self._leave(turn, keeps=event.error is None or event.error.kind != "nan")
        session.turn = None
        if event.error is None:
            self.counters["finished"] += 1
            self.counters[f"finish_{event.finish.value}"] += 1
            session.reported = session.num_tokens
            result = turn.turn(event.finish, self.server, self.pool, self.now_s)
        else:
            self.counters["failed"] += 1
            self.counters["deadlines"] += event.error.kind == "deadline"
            result = event.error
        if session.released:
            self._remove(session)
        self._answer(turn.on_done, result)

    def _swapped(self, event: Swapped) -> None:
        self.counters["swaps"] += 1
        self.kv_policy = event.kv
        self._can_admit = True
        parked = [*self._running.values(), *self._ready, *self._filling]
        if event.kv == "keep":  # a prefix for another server, and scores, are of one version
            parked = [turn for turn in parked if turn.job is not None or turn.wants_scores]
        self.counters["parked"] += sum(turn.is_running for turn in parked)
        for turn in parked:
            self._leave(turn, keeps=False)
            turn.prefix, turn.cached_prompt = None, 0
            self._wait(turn)
        for session in self.sessions.values() if event.kv != "keep" else ():
            session.drop_kv()

    def _remove(self, session: Session) -> None:
        del self.sessions[session.name]
        self._forget(session)

    def _forget(self, session: Session) -> None:
        """What is listed for nobody else goes."""
        session.drop_kv()
        if session.listed is not None and session.listed.owner is not None:
            self.paging.tree.forget(session.listed)
        session.listed = None

    def _answer(self, on_done: OnDone, result: Turn | TurnError) -> None:
        self.counters["callback_errors"] += not answer(on_done, result)
