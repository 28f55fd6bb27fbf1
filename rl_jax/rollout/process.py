"""One worker process as the driver sees it: the calls waiting on it, their deadlines, its end.

Owns: the child process (place.py says where it runs) and the order of its calls. A worker answers in order, so the
oldest call without an answer (the head) is the one it works at. Only the head's deadline runs, from the moment it
became the head: a hang is blamed on the episode that hangs, however many wait behind it.

Life
    1. the constructor starts the child, and asks it to import
    2. attach() to a loop; ready() when the imports are done; call() from then on. detach() and attach() again move it
    3. the child dies, breaks the protocol, or its head passes its deadline: it is killed with all it started (a hung
       one after it wrote its stack to the log); the head's call fails with the reason, the others with env_lost
    4. on_death runs, once. close() instead ends a healthy child, after its environments were closed

Must not: know an environment, or start anything anew (worker.py does).
"""

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rl_jax.rollout import wire
from rl_jax.rollout.place import Place
from rl_jax.timeline import OFF, Track
from rl_jax.waits import Wait

CLOSE_S = 2.5  # for a closed worker to close its environments (env_process.CLOSE_S and some)
LEAST_S = 2e-4  # of a call that the timeline shows by itself: many environments take microseconds
LOGGED = ("env_error", "env_timeout", "env_died")  # faults that leave a trace in a worker's log


class WorkerFault(Exception):
    """A call without a result.

    kind: env_error | bad_task | bad_observation | env_import (the worker's own answer), env_timeout | env_died (it
    ended in this call), env_lost (it ended in another call).
    """

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


def told(fault: WorkerFault, worker: str, log_dir: Path | None) -> str:
    """What is wrong, and which file has the traceback, or the stack of a call that hung. worker: its name."""
    if log_dir is None or fault.kind not in LOGGED:
        return fault.detail
    return f"{fault.detail}; the traceback is in {log_dir / worker}.log"


class Limit(NamedTuple):
    """A deadline and the setting it comes from."""

    seconds: float
    setting: str


class Call(NamedTuple):
    """A request without an answer yet."""

    number: int
    what: str  # "step of r/0/1/2"
    limit: Limit
    done: Callable[[Any, WorkerFault | None], None]


class WorkerProcess:
    """One child. All methods on one thread at a time: the attached loop's."""

    def __init__(self, name: str, init: Mapping[str, Any], limit: Limit, place: Place):
        """limit: of the imports, once the process is there. Raises: OSError where none can be started."""
        self.name = name
        self.num_live = 0  # environments opened and not closed; the pool counts them
        self.offers: dict[str, Any] | None = None  # of env_process.Worker, once imported
        self.fault: WorkerFault | None = None  # why it takes no more calls
        self.track: Track = OFF
        self._num_short, self._short_s = 0, 0.0  # calls that the timeline was not told one by one
        self._calls: deque[Call] = deque()
        self._head_since_s = 0.0
        self._num_calls = 0
        self._ready: list[asyncio.Future] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.TimerHandle | None = (
            None  # fires when the head's time may be over, or earlier
        )
        self._ending: asyncio.Task | None = None
        self._on_death: Callable[[WorkerProcess], None] = lambda worker: None
        self._child = place.start(name)
        if place.start_s:
            setting = f"cluster.start_timeout_s={place.start_s:g} and {limit.setting}"
            limit = Limit(place.start_s + limit.seconds, setting)
        self._post("init", f"import in {name}", limit, self._imported, init)

    @property
    def pid(self) -> int | None:
        """Where it is one of this host."""
        return self._child.pid

    @property
    def num_waiting(self) -> int:
        """Calls without an answer."""
        return len(self._calls)

    @property
    def is_usable(self) -> bool:
        """Imported, and not ended."""
        return self.offers is not None and self.fault is None

    @property
    def wait(self) -> Wait | None:
        """What it works at now; None when idle. Any thread."""
        try:
            head = self._calls[0]
        except IndexError:
            return None
        limit = f"{head.limit.setting}={head.limit.seconds:g}"
        where = "" if head.what.endswith(self.name) else f" in {self.name}"
        return Wait(f"{head.what}{where}", self._head_since_s, limit)

    def attach(self, on_death: Callable[["WorkerProcess"], None]) -> None:
        """Work on the running loop from now on. on_death: once, after every waiting call has failed."""
        self._loop, self._on_death = asyncio.get_running_loop(), on_death
        over = lambda: self._begin_end("env_died")
        self._child.attach(self._loop, self._answered, over)
        self._watch_head()

    def detach(self) -> None:
        """Leave the loop; no call may be waiting but that for the imports."""
        self._child.detach()
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._loop = None

    def open_log(self, log_dir: Path) -> None:
        """Keep what it prints from now on."""
        self._child.open_log(log_dir)

    async def ready(self) -> None:
        """Wait until the imports are done. Raises WorkerFault."""
        if self._ending is not None:
            await self._ending
        if self.fault is not None:
            raise self.fault
        if self.offers is None:
            self._ready.append(asyncio.get_running_loop().create_future())
            await self._ready[-1]

    def call(self, verb: str, owner: str, limit: Limit, **payload: Any) -> asyncio.Future:
        """The future of the result; it raises WorkerFault. The answer to a cancelled call is dropped."""
        future = asyncio.get_running_loop().create_future()
        if self.fault is not None:
            future.set_exception(self._lost())
        else:
            self._post(verb, f"{verb} of {owner}", limit, _settle(future), payload)
        return future

    async def close(self) -> None:
        """End the child: its environments are closed, then it and all it started are killed. Waiting calls fail."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._close())
        await self._ending

    async def _close(self) -> None:
        self.fault = self.fault or WorkerFault("env_lost", f"{self.name} was closed")
        self.detach()
        self._child.end_input()
        deadline_s = time.monotonic() + CLOSE_S
        while not self._child.is_over and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        await self._child.kill()
        self._fail_calls(self.fault, self.fault)

    def _post(
        self,
        verb: str,
        what: str,
        limit: Limit,
        done: Callable[[Any, WorkerFault | None], None],
        payload: Mapping[str, Any],
    ) -> None:
        line = wire.dumps({"i": self._num_calls, "v": verb, "t": limit.seconds, **payload})
        self._calls.append(Call(self._num_calls, what, limit, done))
        self._num_calls += 1
        if len(self._calls) == 1:
            self._new_head()
        self._child.send(line)

    def _answered(self, line: bytes) -> None:
        """One answer settles the head; anything else breaks the protocol."""
        if self.fault is not None:
            return
        try:
            answer = wire.loads(line)
            call, failed = self._calls[0], answer.get("x")
            if answer["i"] != call.number:
                raise ValueError(f"answer {answer['i']} to call {call.number}")
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            self._child.note(f"broken protocol: {error} in {line[:200]!r}")
            self._begin_end("env_died")
            return
        self._calls.popleft()
        self._tell(call)
        self._new_head()
        call.done(answer.get("r"), WorkerFault(*failed) if failed else None)

    def _imported(self, offers: Any, fault: WorkerFault | None) -> None:
        """The init call is done."""
        self.offers = offers
        self.fault = self.fault or fault
        ready, self._ready = self._ready, []
        for future in ready:
            _settle(future)(None, fault)

    def _tell(self, call: Call, fault: str = "") -> None:
        """The timeline, of a call that is over: from when the worker took it. Short ones are summed up in the next."""
        if not self.track.is_on:
            return
        now = time.monotonic()
        if now - self._head_since_s < LEAST_S and not fault:
            self._num_short += 1
            self._short_s += now - self._head_since_s
            return
        verb, _, owner = call.what.partition(" of ")
        more: dict[str, Any] = {"fault": fault} if fault else {}
        if self._num_short:
            more |= {"short": self._num_short, "short_s": self._short_s}
            self._num_short, self._short_s = 0, 0.0
        if self._calls:
            more["queued"] = len(self._calls)  # behind it, now that it is over
        self.track.add(verb, self._head_since_s, now, of=owner, **more)

    def _new_head(self) -> None:
        self._head_since_s = time.monotonic()
        if self._loop is not None and self._calls:
            due_s = self._loop.time() + self._calls[0].limit.seconds
            # One timer for all calls; it is set anew only for a head whose time is over sooner.
            if self._watch is None or self._watch.when() > due_s:
                self._watch_head()

    def _watch_head(self) -> None:
        """End the worker if the head's time is over, else look again when it is."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._calls and self._ending is None:
            left_s = self._head_since_s + self._calls[0].limit.seconds - time.monotonic()
            if left_s <= 0:
                self._begin_end("env_timeout")
            else:
                self._watch = asyncio.get_running_loop().call_later(left_s, self._watch_head)

    def _begin_end(self, kind: str) -> None:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(kind))

    async def _end(self, kind: str) -> None:
        is_import = self.offers is None
        import_fault = self.fault  # the worker's own words, which are better than its exit code
        self.fault = self.fault or WorkerFault(
            kind, f"{self.name} is being killed"
        )  # no new call from now on
        self.detach()
        stack = await self._child.stack() if kind == "env_timeout" else ""
        await self._child.kill()
        detail = self._end_detail(kind, stack)
        self.fault = import_fault or WorkerFault("env_import" if is_import else kind, detail)
        self._fail_calls(self.fault, self._lost())
        self._on_death(self)

    def _end_detail(self, kind: str, stack: str) -> str:
        head = self._calls[0] if self._calls else None
        what = head.what if head else f"{self.name} while idle"
        if kind == "env_timeout" and head is not None:
            took = f"{what} took more than {head.limit.setting}={head.limit.seconds:g}"
            return f"{took}; it was at {_stack_head(stack)}"
        return f"{what}: {self._child.how()}"

    def _fail_calls(self, head: WorkerFault, others: WorkerFault) -> None:
        calls, self._calls = self._calls, deque()
        if calls:
            self._tell(calls[0], head.kind)
        for i, call in enumerate(calls):
            call.done(None, head if i == 0 else others)

    def _lost(self) -> WorkerFault:
        return WorkerFault("env_lost", f"its worker ended in another call ({self.fault})")


def _settle(future: asyncio.Future) -> Callable[[Any, WorkerFault | None], None]:
    def done(result: Any, fault: WorkerFault | None) -> None:
        if future.done():
            return  # its caller was cancelled
        if fault is None:
            future.set_result(result)
        else:
            future.set_exception(fault)

    return done


def _stack_head(log: str) -> str:
    """The innermost line of the main thread in faulthandler's output."""
    found = re.search(r'File "([^"]*)", line (\d+) in (\S+)', log.rpartition("Current thread")[2])
    if not found:
        return "an unknown line (it wrote no stack)"
    return f"{os.path.basename(found[1])}:{found[2]} in {found[3]}"
