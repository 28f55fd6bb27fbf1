"""One server's process as the driver sees it: started, linked, spoken with, given up and ended, however it is started.

Life: 1 the constructor has it started (starter.py); 2 `connect` waits for its link, and opens a channel on it; 3 the
first reason for which it counts as dead is told, once; 4 `end` ends what is left of it.
In the timeline of the run its life is a span of life/NAME; what it tells of its own spans goes there as NAME.attempt.
Must not: start anything anew (lives.py), know how it is started, or what is asked.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rl_jax.remote.channel import Channel, Request
from rl_jax.remote.spec import WORKER_PROGRAM, Spec
from rl_jax.remote.starter import EXIT_S, Starter
from rl_jax.settings import ClusterSettings
from rl_jax.timeline import clock_id

LOOK_S = 0.5
DYING_S = 1.0  # for a process whose connection ended to end by itself, which tells how
ENDED_HERE = "it was ended here"  # why, of a process that nothing was wrong with


class RemoteProcess:
    """It is started by the constructor, and must be ended by `end`, on the thread that started it."""

    def __init__(
        self,
        spec: Spec,
        attempt: str,
        settings: ClusterSettings,
        starter: Starter,
        *,
        on_pulse: Callable[["RemoteProcess", Any], None],
        on_end: Callable[[str], None],
        handlers: Mapping[str, Callable[[Request], None]] | None = None,
    ):
        """attempt: names this process among those of the server. handlers: of what it tells, as Channel's. on_end: as
        soon as it counts as dead, once, with the reason, on any thread. Raises: OSError where none can be started."""
        self.name, self.attempt = spec.name, attempt
        self.channel: Channel | None = None  # once it is linked
        self._settings, self._on_pulse, self._on_end = settings, on_pulse, on_end
        self._handlers = handlers
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._why = ""
        self._traces, self._start_s = starter.traces, time.monotonic()
        self._life = self._traces.track(f"life/{self.name}")
        self._life.mark("started")
        # The program beside a worker has nothing to tell: what a worker does is seen here.
        self._is_traced = self._traces.is_on and spec.program != WORKER_PROGRAM
        self._handle = starter.start(spec, attempt)

    @property
    def pid(self) -> int | None:
        """Where it is one of this host that the driver started."""
        return self._handle.pid

    def connect(self) -> Channel | None:
        """Wait until its link is there, for cluster.start_timeout_s; None if it was given up before."""
        end_s = time.monotonic() + self._settings.start_timeout_s
        while not self._ended.is_set():
            sock = self._handle.link(min(LOOK_S, self._settings.start_timeout_s))
            if sock is not None:
                self.channel = Channel(
                    sock,
                    self.name,
                    self.attempt,
                    self._settings,
                    handlers={**(self._handlers or {}), "spans": self._spans},
                    on_pulse=lambda body: self._on_pulse(self, body),
                    on_close=lambda error: self.give_up(str(error)),
                    grace_s=self._settings.start_timeout_s,
                )
                self.channel.start()
                if self._is_traced:
                    self.channel.tell("trace")
                return self.channel
            if self._handle.ended(0.0) is not None:
                self.give_up("it ended before it was linked")
            elif time.monotonic() > end_s:
                self.give_up(self._handle.absent(self._settings.start_timeout_s))
        return None

    def give_up(self, why: str) -> None:
        """It counts as dead from now on. The first reason stands."""
        with self._lock:
            if self._ended.is_set():
                return
            self._why = why
            self._ended.set()
        self._life.add("up", self._start_s, time.monotonic(), why=why)
        self._on_end(why)

    def _spans(self, request: Request) -> None:
        """What it did. Its clock is ours where it says so, else its distance is estimated by the pulses."""
        channel, line = self.channel, dict(request.body)
        if line["head"]["clock"] == clock_id():
            offset_s, within_s = 0.0, 0.0
        elif channel is not None and (best := channel.clock.best) is not None:
            offset_s, within_s = -best[0], best[1]
        else:
            return self._traces.other_clock(len(line["s"]))
        line |= {"offset_s": offset_s, "within_s": within_s}
        self._traces.other(f"{self.name}.{self.attempt}", line)

    def wait(self, timeout_s: float) -> bool:
        """Whether it counts as dead by now."""
        return self._ended.wait(timeout_s)

    def end(self) -> str:
        """Kill it with all it started, and wait until it is gone. Returns: how it came to its end."""
        self.give_up(ENDED_HERE)
        channel = self.channel
        is_cut = channel is not None and channel.closed is not None
        how = self._handle.ended(DYING_S if is_cut else 0.0)
        stuck = self._handle.kill()
        if channel is not None:
            channel.close()
            channel.join(EXIT_S)
        told = how or stuck
        why = self._why if told is None else f"its process {told}"
        return "; ".join(text for text in (why, self._handle.last_words()) if text)
