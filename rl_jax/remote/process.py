"""One server's process as the driver sees it: started, linked, spoken with, given up and ended, however it is started.

Life: 1 the constructor has it started (starter.py); 2 `connect` waits for its link, and opens a channel on it; 3 the
first reason for which it counts as dead is told, once; 4 `end` ends what is left of it.
Must not: start anything anew (lives.py), know how it is started, or what is asked.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rl_jax.remote.channel import Channel, Request
from rl_jax.remote.spec import Spec
from rl_jax.remote.starter import EXIT_S, Starter
from rl_jax.settings import ClusterSettings

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
                    handlers=self._handlers,
                    on_pulse=lambda body: self._on_pulse(self, body),
                    on_close=lambda error: self.give_up(str(error)),
                    grace_s=self._settings.start_timeout_s,
                )
                self.channel.start()
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
        self._on_end(why)

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
