"""ScorerPool: scorers in worker processes that can be killed, as many as there are calls, 0 to N.

Owns: the worker processes that hold scorers (process.py), the queue of calls that wait for one, and their replacement.

Invariants
    A worker does one call at a time; the others wait in the order in which they came. A call has a deadline of its own
    from when a worker takes it, and the worker is killed when it passes: who waits loses nothing by it.
    A scorer is pure: a call whose worker died in it is made again (SCORER_LIVES). Only what hangs, raises or dies each
    time has no score, and that is a status, never a zero.
    A worker that ended is replaced, the first two times at once, then with a growing pause. With max_endings, a place
    that ended more often than that without a score in between sets `failed`, and every later call is told.
    With keep_alive_s nothing runs until it is asked for: a worker is started for a call that finds none free, and
    ended when it had no call for so long. Without it all workers start at once and stay.
    Where they run is a Place's (place.py): this host, or the nodes of a cluster, by the same code.

There is no pool of threads: a thread cannot be killed, so a scorer in one that hangs (a regex, SymPy) is there for
good; a call of a worker costs a fraction of a millisecond (benchmarks/reward_service.py), which is what threads save.

Life: spawn() starts what stays; await check() until it is imported, on any loop; move() if they are to run elsewhere;
start() on the loop's thread; score(); close(). Must not: know the ledger, or what a reward is used for.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rl_jax.clock import now_s
from rl_jax.rewards.check import failed
from rl_jax.rollout import wire
from rl_jax.rollout.place import LocalPlace, Place
from rl_jax.rollout.process import Limit, WorkerFault, WorkerProcess, told
from rl_jax.settings import RewardSettings
from rl_jax.types import EpisodeView, Reward, Task
from rl_jax.waits import Wait

SCORER_LIVES = 3  # workers that may die in one call before the scorer is blamed
FREE_RESTARTS = 2  # replacements without a pause
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # before the later ones; doubles each time
LIMIT = "rewards.timeout_s"


class Answer(NamedTuple):
    """What a scorer said, and how long it worked at it."""

    reward: Reward
    seconds: float  # of the scorer alone: waits, retries and the network are not in it


class Scorers(Protocol):
    """Where scorers run: worker processes here, or a service."""

    counts: Counter[str]

    async def score(
        self,
        name: str,
        task: Task,
        view: EpisodeView,
        *,
        turn: int | None = None,
        limit_s: float | None = None,
    ) -> Answer:
        """turn: score_turn() of it instead of score(). limit_s: for the scorer alone; None = rewards.timeout_s.

        Raises nothing: what goes wrong is the status of a reward without a value.
        """
        ...


def scorer_names(num: int) -> list[str]:
    """Of the places of so many workers."""
    return [f"reward_{i}" for i in range(num)]


def pause_s(num_endings: int) -> float:
    """Seconds before a place whose worker ended so many times in a row has another one."""
    late = num_endings - FREE_RESTARTS - 1
    return min(FIRST_PAUSE_S * 2**late, MAX_PAUSE_S) if late >= 0 else 0.0


class ScorerPool:
    """Scorers; all methods after check() on one loop's thread."""

    def __init__(
        self,
        scorers: Mapping[str, str],
        settings: RewardSettings,
        start_limit: Limit,
        *,
        max_endings: int | None = None,
        keep_alive_s: float | None = None,
        counts: Counter[str] | None = None,
        of_turns: Iterable[str] = (),
        scouts: int | None = None,
    ):
        """scorers: name -> "package.module:attribute". counts: reward_env_timeout, ..., restarts, reward_restarts.

        of_turns: names of those that must score turns. scouts: most workers before move(); None = all.
        """
        self.failed: str | None = None
        self.on_failed: Callable[[str], None] = lambda detail: None
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.log_dir: Path | None = None
        self.of_turns: frozenset[str] = frozenset()  # that have score_turn(); known after check()
        self.busy_s = 0.0  # all calls together
        self._limit = Limit(settings.timeout_s, LIMIT)
        self._start_limit, self._max_endings, self._keep_alive_s = (
            start_limit,
            max_endings,
            keep_alive_s,
        )
        self._init = {
            "sources": [],
            "scorers": dict(scorers),
            "options": {name: dict(settings.options.get(name, {})) for name in scorers},
            "of_turns": sorted(of_turns),
            "max_obs_bytes": 0,
        }
        self._place: Place = LocalPlace()
        self._places = scorer_names(settings.workers) if scorers else []
        self._scouts = len(self._places) if scouts is None else scouts
        self._workers: dict[str, WorkerProcess] = {}
        self._taken: set[WorkerProcess] = set()
        self._waiting: deque[asyncio.Future[WorkerProcess]] = deque()
        self._endings: Counter[str] = Counter()
        self._starts: dict[str, asyncio.Task] = {}  # of a place
        self._ends: set[asyncio.Task] = set()  # of workers that were idle
        self._idle_timers: dict[str, asyncio.TimerHandle] = {}
        self._is_started = self._is_closed = False

    # --- life ---------------------------------------------------------------------------------------------------------

    def spawn(self) -> None:
        """Start what stays; returns at once."""
        if self._keep_alive_s is None:
            for name in self._places[: self._scouts]:
                if name not in self._workers:
                    self._workers[name] = self._new_worker(name)

    async def check(self) -> None:
        """Wait until the scorers are imported. Raises: WorkerFault naming the scorer and its own error."""
        self.spawn()
        for name in self._places[:1]:  # of those that start on demand, one tells what can be told
            self._workers.setdefault(name, self._new_worker(name))
        for worker in self._workers.values():
            worker.attach(on_death=lambda worker: None)
        for worker in self._workers.values():
            await worker.ready()
            self.of_turns = frozenset((worker.offers or {})["of_turns"])
        for worker in self._workers.values():
            worker.detach()

    async def move(self, place: Place) -> None:
        """Between check() and start(): those that there are end, and what stays is started there."""
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))
        self._workers, self._place, self._scouts = {}, place, len(self._places)
        self.spawn()

    async def start(self) -> None:
        """Take the workers onto the running loop."""
        self._is_started = True
        for name, worker in self._workers.items():
            worker.attach(self._died)
            if self.log_dir is not None:
                worker.open_log(self.log_dir)
            self._is_free(name)

    async def close(self) -> None:
        """End all processes; who waits is told. Idempotent."""
        self._is_closed = True
        for timer in self._idle_timers.values():
            timer.cancel()
        for start in self._starts.values():
            start.cancel()
        self._tell_waiting()
        await asyncio.gather(*(worker.close() for worker in self._workers.values()), *self._ends)

    @property
    def workers(self) -> Mapping[str, WorkerProcess]:
        return self._workers

    @property
    def num_waiting(self) -> int:
        """Calls that no worker has taken yet."""
        return len(self._waiting)

    @property
    def num_busy(self) -> int:
        return len(self._taken)

    def waits(self) -> list[Wait]:
        """What each busy worker works at. Any thread."""
        return [wait for worker in list(self._workers.values()) if (wait := worker.wait)]

    # --- calls --------------------------------------------------------------------------------------------------------

    async def score(
        self,
        name: str,
        task: Task,
        view: EpisodeView,
        *,
        turn: int | None = None,
        limit_s: float | None = None,
        on_taken: Callable[[], None] = lambda: None,
    ) -> Answer:
        """As Scorers; the wait for a worker is the caller's to bound. on_taken: when one takes the call."""
        limit = self._limit if limit_s is None else Limit(limit_s, LIMIT)
        payload: dict[str, Any] = {
            "name": name,
            "task": wire.task_to_wire(task),
            "view": wire.view_to_wire(view),
        }
        if turn is not None:
            payload["turn"] = turn
        num_died = 0
        while True:
            worker = await self._take()
            if worker is None:
                detail = self.failed or "the workers of scorers are closed"
                return Answer(failed("error", detail, name), 0.0)
            on_taken()
            start_s = now_s()
            future = worker.call("score", task.id, limit, **payload)
            future.add_done_callback(partial(self._give_back, worker, start_s))
            try:
                # A caller that is cancelled leaves the worker at its call, and it is free when that has ended.
                said = await asyncio.shield(future)
            except WorkerFault as fault:
                self.counts[f"reward_{fault.kind}"] += 1
                num_died += fault.kind == "env_died"
                if fault.kind == "env_lost" or 0 < num_died < SCORER_LIVES:
                    continue
                status = "timeout" if fault.kind == "env_timeout" else "error"
                return Answer(
                    failed(status, told(fault, worker.name, self.log_dir), name), now_s() - start_s
                )
            self._endings[worker.name] = 0
            return Answer(wire.reward_from_wire(said), now_s() - start_s)

    async def _take(self) -> WorkerProcess | None:
        """A worker without a call, which is the caller's until it gives an answer; None = there will be none."""
        if self.failed is not None or self._is_closed:
            return None
        future: asyncio.Future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._serve_waiting()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (worker := future.result()):
                self._taken.discard(worker)
                self._is_free(worker.name)
            raise

    def _give_back(self, worker: WorkerProcess, start_s: float, future: asyncio.Future) -> None:
        if not future.cancelled():
            future.exception()  # read, for callers that have gone
        self.busy_s += now_s() - start_s
        self._taken.discard(worker)
        self._is_free(worker.name)

    def _is_free(self, name: str) -> None:
        """Serve who waits; a worker that nobody needs is ended in a while, if it is to be."""
        self._serve_waiting()
        worker = self._workers.get(name)
        if self._keep_alive_s is None or self._is_closed or worker is None or worker in self._taken:
            return
        if timer := self._idle_timers.pop(name, None):
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._idle_timers[name] = loop.call_later(self._keep_alive_s, self._retire, name)

    def _serve_waiting(self) -> None:
        free = (w for w in self._workers.values() if w.is_usable and w not in self._taken)
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
            elif (worker := next(free, None)) is not None:
                self._taken.add(worker)
                if timer := self._idle_timers.pop(worker.name, None):
                    timer.cancel()
                self._waiting.popleft().set_result(worker)
            else:
                break
        if self._is_started and self._keep_alive_s is not None and not self._is_closed:
            coming = {name for name, start in self._starts.items() if not start.done()}
            vacant = [n for n in self._places if n not in self._workers and n not in coming]
            for name in vacant[: max(0, len(self._waiting) - len(coming))]:
                self._starts[name] = asyncio.get_running_loop().create_task(self._begin(name))

    def _tell_waiting(self) -> None:
        while self._waiting:
            if not (future := self._waiting.popleft()).done():
                future.set_result(None)

    # --- workers ------------------------------------------------------------------------------------------------------

    def _new_worker(self, name: str) -> WorkerProcess:
        return WorkerProcess(name, self._init, self._start_limit, self._place)

    async def _begin(self, name: str) -> None:
        """A worker of this place, after the pause that its endings have earned."""
        await asyncio.sleep(pause_s(self._endings[name]))
        worker = self._workers[name] = self._new_worker(name)
        worker.attach(self._died)
        if self.log_dir is not None:
            worker.open_log(self.log_dir)
        self.counts["reward_starts"] += 1
        with suppress(WorkerFault):  # _died has been told, and decides anew
            await worker.ready()
        self._is_free(name)

    def _retire(self, name: str) -> None:
        """End a worker that had no call for keep_alive_s."""
        worker = self._workers.get(name)
        if worker is None or worker in self._taken or self._is_closed:
            return
        del self._workers[name]
        self.counts["reward_retired"] += 1
        end = asyncio.get_running_loop().create_task(worker.close())
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)

    def _died(self, worker: WorkerProcess) -> None:
        """Replace a worker that ended, unless its place has used up its budget."""
        if self._is_closed or self._workers.get(worker.name) is not worker:
            return
        name = worker.name
        self._endings[name] += 1
        if self._max_endings is not None and self._endings[name] > self._max_endings:
            self.failed = (
                f"worker {name} ended {self._endings[name]} times in a row"
                f" (rollout.max_env_failures={self._max_endings}) without a score; the last: {worker.fault}"
            )
            self._tell_waiting()
            self.on_failed(self.failed)
            return
        self.counts["restarts"] += 1
        self.counts["reward_restarts"] += 1
        self._starts[name] = asyncio.get_running_loop().create_task(self._begin(name))
