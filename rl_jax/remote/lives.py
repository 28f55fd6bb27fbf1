"""The processes of one server, one after the other: started, watched, ended, and started again while the budget lasts.

Life of a process: 1 it is started, is linked and told what to build; 2 once that is built its channel is there to be
used; 3 its pulses say how far it got, and that its programs are compiled; 4 it ends, or its server's thread does, or it
gives no sign of life for a lease, or is not built in time: `on_end` is called at once, the process is killed, and
another one is started after a pause. A server whose first process ends before it was ready is not started again: what
that died of, the next one would die of. Each process has an attempt id of its own, which every message carries.
Invariants: at most one process is linked; no process outlives this one (its link is its death pipe); what is asked of a
process that ended fails.
Must not: know weights or turns, or say when a new process may serve (server.py).
"""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from rl_jax.remote.channel import CallTimeout, Channel
from rl_jax.remote.process import LOOK_S, RemoteProcess
from rl_jax.remote.spec import Spec
from rl_jax.remote.starter import Starter
from rl_jax.serve.loop import Progress
from rl_jax.settings import ClusterSettings
from rl_jax.waits import Wait

PAUSE_S, MAX_PAUSE_S = 0.2, 10.0  # before a new process; it doubles while none gets ready
STARTING = Progress(0, "its process is starting", is_compiling=True, is_idle=False)

log = logging.getLogger(__name__)


class ServerGone(ConnectionError):
    """The server has no process that could be asked."""


class Lives:
    """Sole owner of the server's processes. Public methods from any thread."""

    def __init__(
        self,
        spec: Spec,
        settings: ClusterSettings,
        starter: Starter,
        on_end: Callable[[str], None],
    ):
        """on_end: a process ended, why; called again when that was the last one."""
        self.spec, self.settings = spec, settings
        self.num = 0  # processes started
        self.final: str | None = None  # why no other process will be started
        self.stats: dict[str, Any] = {}  # of the process that lives, as it told last
        self.queues_s: dict[str, float] = {}  # likewise: by role, how long a request waits there
        self._starter, self._on_end = starter, on_end
        self._changed = threading.Condition()
        self._channel: Channel | None = None  # of a process that is built and lives
        self._process: RemoteProcess | None = None
        self._progress, self._num_done = STARTING, 0  # num_done of the processes before
        self._dropped: Counter[str] = Counter()  # of the processes before
        self._is_ready = self._got_ready = self._was_ready = False  # now, this process, any
        self._is_away = False  # a person may start another process, or never
        self._closing = False
        self._started_s = time.monotonic()  # of the process that lives
        self._thread = threading.Thread(target=self._run, name=f"lives-{spec.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def channel(self) -> Channel | None:
        """Of the process that lives and is built, or None."""
        return self._channel

    @property
    def pid(self) -> int | None:
        """Of the process that lives, or None."""
        return None if self._process is None else self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether the process that lives has compiled its programs."""
        return self._is_ready

    @property
    def is_silent(self) -> bool:
        """Whether the process that lives has given no sign of life for longer than it should."""
        channel = self._channel
        return channel is not None and channel.is_silent

    def wait_up(self, deadline_s: float) -> Channel:
        """The channel of a process that is built. Raises: ServerGone where none is by the deadline, or ever will be, or
        nobody knows when."""
        with self._changed:
            is_known = self._changed.wait_for(
                lambda: self._channel or self.final or self._is_away, deadline_s
            )
            if self._channel is not None:
                return self._channel
            why = self.final or "its process ended, and nobody has started another one"
            why = why if is_known else f"its process was not up after {deadline_s:g} s"
            raise ServerGone(f"{self.spec.name}: {why}")

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until the process that lives has compiled. Raises: TimeoutError; RuntimeError once there is none."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_ready or self.final, deadline_s):
                doing = self._progress.doing
                raise TimeoutError(
                    f"{self.spec.name}: not compiled after {deadline_s:g} s ({doing})"
                )
            if self.final is not None:
                raise RuntimeError(f"{self.spec.name}: {self.final}")

    def progress(self) -> Progress:
        """As of the last pulse; num_done over all processes."""
        with self._changed:
            now = self._progress
            return now._replace(num_done=self._num_done + now.num_done)

    def waits(self) -> list[Wait]:
        """A process that is not ready yet, or is silent. Any thread."""
        with self._changed:
            process, is_ready, now = self._process, self._is_ready, self._progress
        if process is None or self._closing:
            return []
        waits = [] if process.channel is None else process.channel.waits()
        if not is_ready:
            waits.append(Wait(f"the start of {self.spec.name}", self._started_s, "", now.doing))
        return waits

    def told(self, channel: Channel, stats: dict[str, Any]) -> None:
        """What the process of this channel counted by now, if it lives: what was told once is not forgotten."""
        with self._changed:
            if self._channel is channel:
                self.stats = stats

    def dropped(self) -> Counter[str]:
        """What the channels to all processes dropped here, by cause."""
        with self._changed:
            total, process = Counter(self._dropped), self._process
        if process is not None and process.channel is not None:
            total.update(process.channel.stats())
        return total

    def close(self, deadline_s: float) -> None:
        """End the process: its server is closed first, for which it has the deadline. No other one is started."""
        with self._changed:
            self._closing = True
            self.final = self.final or "the server is closed"
            channel, process = self._channel, self._process
            self._changed.notify_all()
        self._starter.retire(self.spec)
        if channel is not None:
            try:
                channel.call("close", deadline_s=deadline_s)
            except (ConnectionError, TimeoutError, RuntimeError) as error:
                log.warning("%s is killed, as it did not close: %s", self.spec.name, error)
        if process is not None:
            process.give_up("the server was closed")
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        pause_s = PAUSE_S
        while not self._closing:
            self._got_ready = False
            try:
                why = self._live()
            except OSError as error:  # out of processes, memory or files
                why = f"its process cannot be started: {error}"
            with self._changed:
                if self._closing:
                    return
                if not self._was_ready:
                    self.final = why
                elif self.num > self.settings.restarts:
                    self.final = f"{why}; it was started {self.num} times (cluster.restarts={self.settings.restarts})"
                self._changed.notify_all()
            if self.final is not None:
                self._starter.retire(self.spec)
                log.error("%s is not started again: %s", self.spec.name, self.final)
                self._on_end(self.final)
                return
            log.error("%s: %s; it is started again", self.spec.name, why)
            with self._changed:
                pause_s = PAUSE_S if self._got_ready else min(2 * pause_s, MAX_PAUSE_S)
                self._changed.wait_for(lambda: self._closing, pause_s)

    def _live(self) -> str:
        """One process, from its start to its end; returns how it ended."""
        self.num += 1
        self._started_s = time.monotonic()
        attempt = f"{self.num}.{secrets.token_hex(4)}"
        process = RemoteProcess(
            self.spec,
            attempt,
            self.settings,
            self._starter,
            on_pulse=self._pulse,
            on_end=self._over,
        )
        with self._changed:
            self._process = process
            self._is_away = self._starter.is_by_hand and self.num > 1
            self._changed.notify_all()
        if self._closing:  # `close` did not see it
            process.give_up("the server was closed")
        channel = process.connect()
        with self._changed:
            self._is_away = False
        if channel is not None:
            channel.ask(
                "build",
                dict(self.spec.job),
                deadline_s=self.settings.start_timeout_s,
                done=lambda result: self._built(process, result),
            )
        while not process.wait(LOOK_S):
            if self._closing and self._channel is None:
                process.give_up("the server was closed")
        how = process.end()
        if channel is not None:
            with self._changed:
                self._dropped.update(channel.stats())
        return how

    def _built(self, process: RemoteProcess, result: Any) -> None:
        if isinstance(result, CallTimeout):
            limit = f"cluster.start_timeout_s={self.settings.start_timeout_s:g}"
            process.give_up(f"it could not be built within {limit}; raise that if it needs longer")
            return
        if isinstance(result, Exception):
            process.give_up(f"it could not be built: {type(result).__name__}: {result}")
            return
        with self._changed:
            if not process.wait(0.0):
                self._channel = process.channel
                self._changed.notify_all()

    def _pulse(self, process: RemoteProcess, body: Any) -> None:
        """What the process says of itself: progress, ready, dead, stats."""
        if body is None:
            return  # it is not built yet
        if body["dead"] is not None:
            process.give_up(body["dead"])
            return
        with self._changed:
            self._progress = Progress(*body["progress"])
            self.stats, self.queues_s = body["stats"], body.get("queues_s", {})
            if body["ready"] and self._channel is process.channel and not self._is_ready:
                self._is_ready = self._got_ready = self._was_ready = True
                self._changed.notify_all()

    def _over(self, why: str) -> None:
        with self._changed:
            self._channel = self._process = None
            self._is_ready = False
            self._num_done += self._progress.num_done + 1
            self._progress = STARTING
            self._changed.notify_all()
        if not self._closing:
            self._on_end(f"its process ended: {why}")
        with self._changed:
            self.stats, self.queues_s = {}, {}
