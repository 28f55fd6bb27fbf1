"""ClusterPlace: workers of environments and scorers that the cluster's starter starts, wherever that puts them.

RemoteChild is one of them as its WorkerProcess sees it: the pipes and the kill of a LocalChild, through a channel to
the program beside the worker (worker_host.py). Its thread has the process started, linked, and ended.
Life of a child: 1 its thread waits until the last one of its name is gone, and starts it; what is sent meanwhile waits.
2 It is linked: what waited goes. 3 It is over: its process ended, it gave no sign of life for a lease, it was not
linked in cluster.start_timeout_s, or it is killed; what came before is delivered first, what comes after is not.
Invariants: one process of a name at a time; no line of one attempt reaches another (each has a channel and an attempt
id of its own); no restart here: the pool decides, on its own budget.
Must not: know a call.
"""

import asyncio
import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_jax.remote.channel import CallTimeout, Request
from rl_jax.remote.process import LOOK_S, RemoteProcess
from rl_jax.remote.spec import WORKER_PROGRAM, Spec
from rl_jax.remote.starter import Starter
from rl_jax.rollout.place import EXIT_S, STACK_S
from rl_jax.rollout.scorer_pool import scorer_names
from rl_jax.rollout.worker import env_names
from rl_jax.settings import ClusterSettings, Settings

TELL_S = 2.0  # for the program beside a worker to end it, and to say how it ended
GONE_S = 3 * EXIT_S  # for a starter to end a process


def worker_specs(settings: Settings) -> Sequence[Spec]:
    """The environments' workers and the scorers' of a run, for its starter."""
    cluster, rewards = settings.cluster, settings.rewards
    has_scorers = not rewards.url and any(source.scorers for source in settings.tasks.sources)
    named = [(name, cluster.env_hardware) for name in env_names(settings.rollout.env_workers)]
    if has_scorers:
        named += [(name, cluster.scorer_hardware) for name in scorer_names(rewards.workers)]
    return tuple(Spec(name=n, program=WORKER_PROGRAM, hardware=hardware) for n, hardware in named)


class ClusterPlace:
    """A Place. `start` on any thread."""

    def __init__(self, specs: Sequence[Spec], settings: ClusterSettings, starter: Starter):
        """specs: of worker_specs. starter: open by the first start."""
        self._specs = {spec.name: spec for spec in specs}
        self._settings, self._starter = settings, starter
        self._threads: dict[str, threading.Thread] = {}
        self._nums: dict[str, int] = {}

    @property
    def start_s(self) -> float:
        return self._settings.start_timeout_s

    def start(self, name: str) -> "RemoteChild":
        num = self._nums[name] = self._nums.get(name, 0) + 1
        attempt = f"{num}.{secrets.token_hex(4)}"
        before = self._threads.get(name)
        child = RemoteChild(self._specs[name], attempt, self._settings, self._starter, before)
        self._threads[name] = child.thread
        child.thread.start()
        return child


class RemoteChild:
    """A Child."""

    def __init__(
        self,
        spec: Spec,
        attempt: str,
        settings: ClusterSettings,
        starter: Starter,
        before: threading.Thread | None,
    ):
        """before: of the last child of this name."""
        self._spec, self._attempt, self._settings, self._starter = spec, attempt, settings, starter
        self._lock = threading.RLock()
        self._process: RemoteProcess | None = None
        self._is_linked = self._is_over = self._is_killed = False
        self._waiting: list[tuple[str, Any, tuple]] = []  # to be told, once it is linked
        self._came: deque[bytes] = deque()  # lines not delivered yet
        self._said = ""  # how the worker ended, by the program beside it
        self._why = ""  # why it is over, as far as can be known here
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_line: Callable[[bytes], None] = lambda line: None
        self._on_over: Callable[[], None] = lambda: None
        self.thread = threading.Thread(
            target=self._run, args=(before,), name=f"worker-{spec.name}", daemon=True
        )

    pid = None

    @property
    def is_over(self) -> bool:
        return self._is_over

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_line: Callable[[bytes], None],
        on_over: Callable[[], None],
    ) -> None:
        with self._lock:
            self._loop, self._on_line, self._on_over = loop, on_line, on_over
        self._deliver()

    def detach(self) -> None:
        with self._lock:
            self._loop = None

    def send(self, line: bytes) -> None:
        self._tell("line", None, (np.frombuffer(line, np.uint8),))

    def end_input(self) -> None:
        self._tell("end_input")

    async def stack(self) -> str:
        channel = self._process and self._process.channel
        if channel is None:
            return ""
        limit_s = STACK_S + TELL_S
        ask = lambda: channel.call("stack", deadline_s=limit_s).body["log"]
        try:
            return await asyncio.to_thread(ask)
        except (ConnectionError, CallTimeout, RuntimeError):
            return ""

    async def kill(self) -> None:
        with self._lock:
            self._is_killed = True
        if not self._is_over and self._is_linked:
            self._tell("end")
            await self._until(lambda: self._is_over, TELL_S)
        if self._process is not None:
            self._process.give_up("it was killed here")
        await self._until(lambda: not self.thread.is_alive(), GONE_S)
        self.detach()

    def how(self) -> str:
        return self._said or f"the process is lost: {self._why or 'it does not end'}"

    def open_log(self, log_dir: Path) -> None:
        """Where it runs it has one already."""

    def note(self, text: str) -> None:
        self._tell("note", {"text": text})

    # --- private -----------------------------------------------------------------------------

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while not condition() and time.monotonic() < end_s:
            await asyncio.sleep(0.01)

    def _tell(self, verb: str, body: Any = None, arrays: tuple = ()) -> None:
        """In order, whether it is linked by now or not."""
        with self._lock:
            if not self._is_linked:
                self._waiting.append((verb, body, arrays))
                return
        self._tell_now(verb, body, arrays)

    def _tell_now(self, verb: str, body: Any, arrays: tuple) -> None:
        assert self._process is not None and self._process.channel is not None, "it is linked"
        self._process.channel.tell(verb, body, arrays)

    def _run(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join(GONE_S)
        if self._is_killed:
            self._over("it was killed here")
            return
        try:
            process = self._process = RemoteProcess(
                self._spec,
                self._attempt,
                self._settings,
                self._starter,
                on_pulse=lambda process, body: None,
                on_end=self._over,
                handlers={"line": self._heard, "over": self._heard_over},
            )
        except OSError as error:  # out of processes, memory or files
            self._over(f"it cannot be started: {error}")
            return
        if self._is_killed:  # `kill` did not see the process
            process.give_up("it was killed here")
        if process.connect() is not None:
            with self._lock:
                for told in self._waiting:
                    self._tell_now(*told)
                self._waiting, self._is_linked = [], True
        while not process.wait(LOOK_S):
            pass
        how = process.end()
        if not self._said:
            self._why = how

    def _heard(self, request: Request) -> None:
        with self._lock:
            self._came.append(request.arrays[0].tobytes().removesuffix(b"\n"))
        self._soon()

    def _heard_over(self, request: Request) -> None:
        self._said = str(request.body["how"])
        self._over(self._said)

    def _over(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why
            self._is_over = True
        self._soon()

    def _soon(self) -> None:
        with self._lock, contextlib.suppress(RuntimeError):  # its loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """On the loop, in the order in which it came."""
        while self._loop is not None:
            with self._lock:
                line = self._came.popleft() if self._came else None
            if line is None:
                break
            self._on_line(line)
        if self._is_over and self._loop is not None:
            self._on_over()
