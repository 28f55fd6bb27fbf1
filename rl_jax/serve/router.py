"""Router: the Sampler that rollout sees; picks servers for each turn and moves results to the event
loop.

Owns: which decode server each live session is on. Runs on the asyncio thread and makes no JAX call;
servers answer from their threads through `call_soon_threadsafe`. Life of a turn:
1. Its session stays on the decode server that holds its history; a new session goes to the pool
   that its slot was taken in, without one to the preferred pools of its tag (MeshPlan.pools_for), where
   all slots of these are held to any pool with a free one; there to the server that was sent the same
   context before, unless that has AFFINITY_SLACK of its slots more live sessions than another, else to
   the one with the fewest live sessions.
2. Where prefill servers exist, and the decode server holds no KV for the session that this version may
   read or the suffix behind it is longer than engine.append_limit (or costs more there), a prefill server
   gets the whole context, computes what its own prefix tree lacks, and hands over the pages that the
   decode server lacks: the one that has it first by what it was sent before (prefill_choice.py). Who
   comes with the same context meanwhile waits for that, and finds it in the decode server's prefix tree.
   Else the decode server extends its own KV, in chunks (suffixes over the limit are counted there as
   long_appends). If a prefill server fails, the decode server does it all.
3. The decode server answers, or the deadline passes and the turn is aborted there, or the server makes
   no progress for serve.progress_timeout_s (liveness.py): then it is fenced, and what waits for it ends
   with a retryable TurnError (a prefix is computed by the decode server instead).
   From half of that time on, or while its process gives no sign of life, it is suspect: no new session and no
   prefix goes to it then, where another one could have it; its sessions stay, and what waits for it goes on waiting.
The preferred pools of a tag are the plan's, or under serve.affinity=auto those of the hardware class that affinity.py
assigned it, from what turns cost; that changes for new sessions only.
Which servers prefill and which decode may change meanwhile (serve.pd_balance, roles.py), for new sessions and new
prefixes only: a session on a server that prefills now stays there, and that one makes its prefixes itself.
Invariants: generate never outlives the deadline; a session whose server is fenced starts anew on
another one, until a commit lifts the fence; every server was started for the renderer whose tokens come here.
Must not: retry a turn (the episode does, once), or wait in abort and release.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl_jax.clock import now_s
from rl_jax.serve.affinity import Affinity, Price
from rl_jax.serve.balance import Balance
from rl_jax.serve.decode_server import DecodeServer
from rl_jax.serve.liveness import Liveness, interval_s
from rl_jax.serve.prefill_choice import Context, Costs, PrefillLine, appends, choose_line
from rl_jax.serve.prefill_server import PrefillServer
from rl_jax.serve.roles import Roles
from rl_jax.types import NewTokens, Prefix, Turn, TurnError, TurnRequest
from rl_jax.waits import Wait

log = logging.getLogger(__name__)

COUNTERS = (
    "turns", "prefilled", "prefilled_suffixes", "prefill_fallbacks", "prefill_shared", "moved_sessions",
    "stalled_servers", "suspect_servers", "deadlines", "errors",
)  # fmt: skip
AFFINITY_SLACK = 0.25  # of a server's slots
MAX_CONTEXTS = 4096  # remembered for affinity, the latest


@dataclass(eq=False)
class Placed:
    """Where a live session is."""

    server: DecodeServer
    known: int = 0  # tokens of the context after the last turn, for sessions that lose their server


@dataclass(eq=False)
class Flight:
    """One generate() under way."""

    request: TurnRequest
    decode: DecodeServer
    prefill: PrefillServer | DecodeServer | None = None
    aborted: str | None = None
    times_s: dict[str, float] = field(default_factory=dict)
    on_sent: Callable[[], None] | None = None  # once, when the decode server has the request
    on_tokens: Callable[[NewTokens], None] | None = None
    waits: asyncio.Future | None = (
        None  # for a prefix that is computed for another, or for an abort
    )

    def sent(self) -> None:
        on_sent, self.on_sent = self.on_sent, None
        if on_sent is not None:
            on_sent()


def context_hash(request: TurnRequest) -> int:
    """Of the tokens whose KV a turn needs before it samples, and of who may share it."""
    return hash((request.salt, np.asarray(request.tokens[:-1], np.int32).tobytes()))


class TemplateMismatch(ValueError):
    """A server was started for another chat template than the one that is rendered here."""


class Router:
    """types.Sampler over servers of this process, or the proxies of others (remote/server.py).

    All methods belong to the asyncio thread; `stats` may be called anywhere.
    """

    def __init__(
        self,
        decode: Sequence[DecodeServer],
        prefill: Sequence[PrefillServer | DecodeServer],
        plan: Any,
        template_sha256: str = "",
        balance: Balance | None = None,
        affinity: Affinity | None = None,
    ):
        """plan: MeshPlan; only its pools_for is used. template_sha256: of the Renderer whose tokens are sent.
        balance: serve.pd_balance=auto; all servers are DecodeServers then, and begin in the roles as given.
        affinity: serve.affinity=auto, in place of the plan's tags.

        Raises: ValueError without a decode server, or of Roles; TemplateMismatch for a server of another template.
        """
        if not decode:
            raise ValueError(
                "the router has no decode server; add a decode or colocated pool to the mesh"
            )
        for server in (*prefill, *decode):
            if server.template_sha256 != template_sha256:
                raise TemplateMismatch(
                    f"server {server.name} was started for the chat template {server.template_sha256 or 'of none'}, but"
                    f" this run renders with {template_sha256 or 'none'}; start it with the same model.tokenizer,"
                    " template files and rollout.tool_parser"
                )
        self._roles, self._plan = Roles(decode, prefill, balance), plan
        self._affinity = affinity
        # Told of each assignment of serve.affinity=auto, on the asyncio thread: (kind, fields).
        self.tell: Callable[..., None] = lambda kind, **fields: None
        computes = prefill if balance is None else self._roles.holders
        self._lines = {server.name: PrefillLine(server) for server in computes}
        self._sessions: dict[str, Placed] = {}
        self._flights: dict[str, list[Flight]] = {}  # by uid
        # Hash of a session's first context -> the decode server that it went to, the latest last.
        self._homes: OrderedDict[int, str] = OrderedDict()
        # (decode server, its version, hash of the context) -> done when the prefix is with the decode server
        self._computing: dict[tuple[str, int, int], asyncio.Future] = {}
        # By server: answers that are waited for.
        self._servers = (*prefill, *decode)
        self._awaited: dict[str, set[asyncio.Future]] = {s.name: set() for s in self._servers}
        self._liveness = Liveness()
        self._suspects: set[str] = set()
        self._look_s = min(interval_s(s.settings) for s in self._servers)
        self._looks_in: asyncio.AbstractEventLoop | None = None  # where the next look will be
        self._counters = dict.fromkeys(COUNTERS, 0)
        # Told of each turn that ended well, on the asyncio thread.
        self.on_turn: Callable[[Turn], None] = lambda turn: None

    async def generate(
        self,
        request: TurnRequest,
        on_tokens: Callable[[NewTokens], None] | None = None,
    ) -> Turn:
        """One turn. on_tokens: told, on the loop, of its tokens as blocks make them. Raises: TurnError."""
        deadline = now_s() + request.deadline_s
        placed, moved = self._place(request)
        flight = Flight(request, placed.server, on_tokens=on_tokens)
        self._flights.setdefault(request.uid, []).append(flight)
        self._counters["turns"] += 1
        try:
            prefix = await self._prefix(flight, deadline)
            turn = await self._decode_turn(flight, prefix, deadline)
        except (TurnError, asyncio.CancelledError) as error:
            # Whoever still works on the turn need not: its answer would reach nobody.
            self._abort(flight, "cancelled" if flight.aborted is None else flight.aborted)
            self._counters["errors"] += isinstance(error, TurnError)
            raise
        finally:
            flight.sent()
            flights = self._flights[request.uid]
            flights.remove(flight)
            if not flights:
                del self._flights[request.uid]
        if moved:
            sampled = len(request.tokens) - request.token_index
            turn = replace(turn, prompt_tokens=request.tokens[placed.known : sampled])
        placed.known = len(request.tokens) + len(turn.tokens)
        if self._affinity is not None:
            computed = max(0, len(request.tokens) - 1 - turn.cached_prompt)
            self._affinity = self._affinity.turn(request.tag, computed, len(turn.tokens))
        if flight.times_s:
            queue_s = turn.times_s["queue"] + flight.times_s["queue"]
            turn = replace(turn, times_s={**turn.times_s, **flight.times_s, "queue": queue_s})
        self.on_turn(turn)
        return turn

    def abort(self, uid: str, reason: str) -> None:
        """End the uid's turns under way with finish=ABORT and what was sampled."""
        for flight in self._flights.get(uid, ()):
            self._abort(flight, reason)

    def release(self, session: str) -> None:
        placed = self._sessions.pop(session, None)
        if placed is not None:
            placed.server.release(session)

    def version(self) -> int:
        """Lowest version any live decode server uses now; -1 before the first commit or with none
        live.
        """
        return min((s.version for s in self._roles.holders if s.fenced is None), default=-1)

    def capacity(self) -> Mapping[str, int]:
        """Live sessions that fit on the live servers of each pool; a slot is one pool's, whichever
        tags prefer that.
        """
        return self._roles.capacity()

    def places(self, tag: str) -> tuple[str, ...]:
        """Pools where sessions of the tag may live now."""
        return tuple(dict.fromkeys(server.pool for server in self._choices(tag, self._homes_now())))

    def stats(self) -> dict[str, float]:
        moves = 0 if self._affinity is None else self._affinity.moves
        return {
            **self._counters, "role_moves": self._roles.moves, "affinity_moves": moves,
            "sessions": len(self._sessions),
        }  # fmt: skip

    def waits(self) -> list[Wait]:
        """Servers that stand still over a turn. Any thread."""
        return self._liveness.waits()

    # --- choosing ---------------------------------------------------------------------------

    def _choices(self, tag: str, servers: Sequence[Any]) -> list[Any]:
        """Live servers of the tag's preferred pools, else all live ones."""
        live = [server for server in servers if server.fenced is None]
        if self._affinity is not None:
            name = self._affinity.assigned.get(tag)
            return [server for server in live if server.hardware == name] or live
        pools = self._plan.pools_for(tag)
        return [server for server in live if server.pool in pools] or live

    def _homes_now(self) -> list[DecodeServer]:
        """Live servers that take new sessions: those that decode, without one any that can."""
        live = [server for server in self._roles.decode if server.fenced is None]
        return live or [server for server in self._roles.holders if server.fenced is None]

    def _well(self, servers: Sequence[Any]) -> list[Any]:
        """Those that are not suspect; all of them where none is left."""
        return [server for server in servers if not self._is_suspect(server)] or list(servers)

    def _is_suspect(self, server: Any) -> bool:
        why = self._liveness.suspects(server.name) or getattr(server, "suspect", None)
        if why is not None and server.name not in self._suspects:
            log.warning("%s is suspect, and gets nothing new: %s", server.name, why)
            self._counters["suspect_servers"] += 1
            self._suspects.add(server.name)
        elif why is None and server.name in self._suspects:
            log.info("%s is not suspect any more", server.name)
            self._suspects.discard(server.name)
        return why is not None

    def _place(self, request: TurnRequest) -> tuple[Placed, bool]:
        """The session's server, and whether the session lost another one since its last turn."""
        placed = self._sessions.get(request.session)
        if placed is not None and placed.server.fenced is None:
            return placed, False
        live = self._well(self._homes_now())
        held = self._live_sessions()
        load = {s.name: held[s.name] / s.engine.settings.slots for s in live}
        choices = [server for server in live if server.pool == request.place]
        choices = choices or self._choices(request.tag, live)
        if min((load[s.name] for s in choices), default=0.0) >= 1 and request.place == "":
            choices = [s for s in live if load[s.name] < 1] or choices  # its pools are full
        if not choices:
            why = "; ".join(f"{s.name}: {s.fenced}" for s in self._roles.holders)
            raise TurnError("closed", "router", f"no decode server is live: {why}")
        least = min(load[server.name] for server in choices)
        before = self._homes.get(context := context_hash(request))
        server = min(
            choices,
            key=lambda s: (s.name != before or load[s.name] > least + AFFINITY_SLACK, load[s.name]),
        )
        self._homes[context] = server.name
        self._homes.move_to_end(context)
        if len(self._homes) > MAX_CONTEXTS:
            self._homes.popitem(last=False)
        known = 0 if placed is None else placed.known
        self._counters["moved_sessions"] += placed is not None
        self._sessions[request.session] = Placed(server, known)
        return self._sessions[request.session], placed is not None

    def _live_sessions(self) -> Counter[str]:
        """How many each server holds."""
        return Counter(placed.server.name for placed in self._sessions.values())

    # --- the hops ---------------------------------------------------------------------------

    async def _prefix(self, flight: Flight, deadline: float) -> Prefix | None:
        """The context's KV from a prefill server, or None where the decode server shall make it."""
        request, decode = flight.request, flight.decode
        servers = self._well(self._choices(request.tag, self._roles.prefill))
        if (
            not servers
            or decode in self._roles.prefill
            or len(request.tokens) < 2
            or request.max_new_tokens <= 0
            or request.scores  # who computes them computes all of it
        ):
            return None
        needed = np.asarray(request.tokens[:-1], np.int32)
        held = decode.live_tokens(request.session, decode.version, needed)
        limit, suffix = decode.engine.settings.append_limit, len(needed) - held
        if held and limit and appends(limit, suffix, 0, None):
            return None
        context = Context.of(needed, servers[0].engine.spec.page_size, request.salt)
        line = choose_line([self._lines[server.name] for server in servers], context)
        if held and self._appends(decode, line, context, suffix):
            return None
        key = (decode.name, decode.version, context_hash(request))
        if (other := self._computing.get(key)) is not None:
            what = f"the prefix of {request.key}, computed for another"
            flight.waits = waits = asyncio.get_running_loop().create_future()
            other.add_done_callback(lambda _: waits.done() or waits.set_result(None))
            await self._within(waits, deadline, what)
            self._counters["prefill_shared"] += flight.aborted is None
            return None
        done = self._computing[key] = asyncio.get_running_loop().create_future()
        flight.on_sent = lambda: self._sent_prefix(key, done)
        result, times_s = await self._ask_prefill(flight, line, context, held, deadline)
        if isinstance(result, Prefix):
            self._counters["prefilled"] += 1
            self._counters["prefilled_suffixes"] += held > 0
            flight.times_s = dict(times_s)
            return result
        if result.kind in ("context", "unsupported", "deadline"):
            raise result
        self._counters["prefill_fallbacks"] += flight.aborted is None
        return None

    def _appends(
        self, decode: DecodeServer, line: PrefillLine, context: Context, suffix: int
    ) -> bool:
        """Whether the decode server appends the suffix itself, by limit or cost."""
        costs, append_s, prefill_s = None, decode.append_token_s, line.server.token_s
        if append_s is not None and prefill_s is not None:
            costs = Costs(append_s, decode.num_running, *prefill_s)
        line_tokens = line.tokens + line.missing(context)
        return appends(decode.engine.settings.append_limit, suffix, line_tokens, costs)

    async def _ask_prefill(
        self, flight: Flight, line: PrefillLine, context: Context, held: int, deadline: float
    ) -> tuple[Prefix | TurnError, Mapping[str, float]]:
        """What the line's server answers. held: tokens that the decode server has."""
        request = flight.request
        flight.prefill = server = line.server
        submit = server.submit if server.kind == "prefill" else server.submit_prefix
        missing, result = line.send(context), None
        ask = replace(request, deadline_s=max(0.0, deadline - now_s()))
        try:
            result, times_s = await self._call(
                lambda answer: submit(ask, flight.decode, lambda *result: answer(result), held),
                server,
                deadline,
                f"{server.name} to compute the prefix of {request.key}",
            )
        except TurnError as error:
            if error.kind != "engine":
                raise
            result, times_s = error, {}
        finally:
            line.answered(context, missing, isinstance(result, Prefix))
        flight.prefill = None
        return result, times_s

    def _sent_prefix(self, key: tuple[str, int, int], done: asyncio.Future) -> None:
        """The prefix is with the decode server, or will never be: who waits for it goes on."""
        del self._computing[key]
        if not done.done():
            done.set_result(None)

    async def _decode_turn(self, flight: Flight, prefix: Prefix | None, deadline: float) -> Turn:
        request, server = flight.request, flight.decode
        ask = replace(request, deadline_s=max(0.0, deadline - now_s()))
        loop = asyncio.get_running_loop()

        def told(piece: NewTokens) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(flight.on_tokens, piece)

        def send(answer: Callable[[Any], None]) -> None:
            if flight.on_tokens is None:
                server.submit(ask, prefix, answer)
            else:
                server.submit(ask, prefix, answer, told)
            flight.sent()
            if flight.aborted is not None:  # while its prefix was computed
                server.abort(request.uid, flight.aborted)

        what = f"{server.name} to answer {request.key}"
        result = await self._call(send, server, deadline, what)
        if isinstance(result, TurnError):
            raise result
        return result

    async def _call(
        self,
        send: Callable[[Callable[[Any], None]], None],
        server: DecodeServer | PrefillServer,
        deadline: float,
        what: str,
    ) -> Any:
        """What a server's thread answers. Raises: TurnError deadline, or engine where the server stands still."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def settle(result: Any) -> None:
            if not future.done():
                future.set_result(result)

        def tell(result: Any) -> None:
            try:
                loop.call_soon_threadsafe(settle, result)
            except RuntimeError:
                if not loop.is_closed():  # its caller ended first, and nobody waits
                    raise

        awaited = self._awaited[server.name]
        awaited.add(future)
        self._look_later()
        try:
            send(tell)
            return await self._within(future, deadline, what)
        finally:
            awaited.discard(future)

    async def _within(self, future: asyncio.Future, deadline: float, what: str) -> Any:
        """Its result. Raises: TurnError deadline."""
        try:
            async with asyncio.timeout(max(0.0, deadline - now_s())):
                return await future
        except TimeoutError:
            self._counters["deadlines"] += 1
            raise TurnError("deadline", "router", f"waited for {what}", retryable=True) from None

    # --- liveness ---------------------------------------------------------------------------

    def _look_later(self) -> None:
        """See that the servers are looked at while answers are waited for."""
        loop = asyncio.get_running_loop()
        if self._looks_in is not loop:
            self._looks_in = loop
            loop.call_later(self._look_s, self._look)

    def _look(self) -> None:
        """Fence servers that stand still, and end what waits for them; see who waits for what."""
        self._looks_in = None
        looked_s = now_s()
        for server in self._servers:
            awaited = self._awaited[server.name]
            why = None
            if awaited:
                self._look_later()
                why = self._liveness.look(server.name, server.progress(), server.settings, looked_s)
            if not awaited or why is not None:
                self._liveness.forget(server.name)
            if why is not None:
                self._give_up(server, why)
        held = self._live_sessions()
        self._roles.look(lambda s: held[s.name], lambda s: self._lines[s.name].tokens)
        self._look_at_prices()

    def _look_at_prices(self) -> None:
        """Under serve.affinity=auto: what servers take by class, and perhaps another assignment."""
        if self._affinity is None:
            return
        live = [server for server in self._roles.holders if server.fenced is None]
        mean = lambda found: sum(found) / len(found) if found else None
        prices = {}
        for name in dict.fromkeys(server.hardware for server in live):
            of_class = [server for server in live if server.hardware == name]
            token_s = [s.append_token_s for s in of_class if s.append_token_s is not None]
            step_s = [s.step_s for s in of_class if s.step_s is not None]
            prices[name] = Price(mean(token_s), mean(step_s), len(of_class))
        running = [server.num_running for server in live]
        before, self._affinity = self._affinity, self._affinity.look(prices, mean(running) or 0.0)
        if self._affinity.moves != before.moves:
            assigned = dict(self._affinity.assigned)
            log.info("tags prefer other hardware: %s, before %s", assigned, dict(before.assigned))
            self.tell("affinity", assigned=assigned, before=dict(before.assigned))

    def _give_up(self, server: DecodeServer | PrefillServer, why: str) -> None:
        log.error("%s is fenced: %s", server.name, why)
        self._counters["stalled_servers"] += 1
        server.fence(why)
        error = TurnError("engine", server.name, f"it is fenced: {why}", retryable=True)
        for future in self._awaited[server.name]:
            if not future.done():
                future.set_exception(error)

    def _abort(self, flight: Flight, reason: str) -> None:
        flight.aborted = reason
        if flight.waits is not None and not flight.waits.done():
            flight.waits.set_result(None)
        server = flight.decode if flight.prefill is None else flight.prefill
        server.abort(flight.request.uid, reason)
