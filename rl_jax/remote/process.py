"""One server's process as the driver sees it: how it is started, spoken with, given up and ended.

The two ends of a socket pair are its only connection: no port or path that anybody else could reach, so nothing to
guard by a token, and its end is each side's death pipe (the child also asks the kernel to be killed with the thread
that started it). The child gets a clean environment and a session of its own; what it prints goes to
run_dir/logs/NAME.log.
Must not: start anything anew (lives.py), or know what is asked.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.kv import KVSpec
from rl_jax.backend import child_variables
from rl_jax.child import Log, clean_environment, exit_text
from rl_jax.remote.channel import Channel
from rl_jax.settings import ClusterSettings, EngineSettings, ServeSettings

PROGRAM = "rl_jax.remote.server_process"
FACTORY = f"{PROGRAM}:make_server"
EXIT_S = 5.0  # for a killed process to be gone
DYING_S = 1.0  # for a process whose connection ended to end by itself, which tells how


@dataclass(frozen=True)
class ServerSpec:
    """What the driver knows of a server before any process of it lives, and what the process is told."""

    name: str
    pool: str
    kind: str  # prefill | decode
    tags: tuple[str, ...]
    hardware: str
    template_sha256: str
    mesh: Any  # jax.sharding.AbstractMesh, as its devices are not ours
    param_shardings: Mapping[str, Any]  # on it
    engine: EngineSettings
    kv: KVSpec
    serve: ServeSettings
    factory: str  # "module:attribute": job -> the server, in its process
    job: Mapping[str, Any]  # as JSON
    num_devices: int


class ServerProcess:
    """One child. It is started by the constructor, and must be ended by `end`, on the thread that started it."""

    def __init__(
        self,
        spec: ServerSpec,
        attempt: str,
        settings: ClusterSettings,
        log_dir: Path,
        *,
        on_pulse: Callable[["ServerProcess", Any], None],
        on_end: Callable[[str], None],
    ):
        """attempt: names this process among those of the server. on_end: as soon as it counts as dead, once, with the
        reason, on any thread. Raises: OSError where no process can be started."""
        self.name = spec.name
        self._on_end = on_end
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._why = ""
        ours, theirs = socket.socketpair()
        told = {
            "fd": theirs.fileno(),
            "attempt": attempt,
            "factory": spec.factory,
            "parent": os.getpid(),
            "settings": asdict(settings),
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**clean_environment(), **child_variables(spec.num_devices)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._process.stdout is not None, "Popen makes what PIPE asks for"
        self.log = Log(spec.name, self._process.stdout)
        self.log.open(log_dir)
        self.channel = Channel(
            ours,
            spec.name,
            attempt,
            settings,
            on_pulse=lambda body: on_pulse(self, body),
            on_close=lambda error: self.give_up(str(error)),
            grace_s=settings.start_timeout_s,
        )
        self.channel.start()

    @property
    def pid(self) -> int:
        return self._process.pid

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
        self.give_up("it was ended here")
        until = time.monotonic() + DYING_S
        while self.channel.closed is not None and self._process.poll() is None:
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        died_itself = self._process.poll() is not None
        if self._process.returncode is None:  # only poll() reaps it: its id is nobody else's
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has just ended
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            pass  # the text says so
        self.channel.close()
        self.channel.join(EXIT_S)
        self.log.drain()
        code = self._process.returncode
        if died_itself or code is None:
            return f"its process {exit_text(code, EXIT_S)}; {self.log.last_line()}"
        return f"{self._why}; {self.log.last_line()}"
