"""How a process of a server comes to be: the seam between one server's life (lives.py) and the host, or whatever else
starts processes there.

A Starter makes a Handle of one attempt; the handle gives the socket of its process, says how the process ended where
that can be known, and kills it where that can be done.
LocalStarter: a child on this host. A socket pair is its only connection: no port or path that anybody else could reach,
so nothing to guard by a secret, and its end is each side's death pipe (the child also asks the kernel to be killed with
the thread that started it). It gets a clean environment and a session of its own; what it prints goes to
log_dir/NAME.log.
ExternalStarter: somebody else starts it, by a command that the driver tells, and it comes over TCP. Nobody here can
kill it or read what it prints: it ends when its link does.
Must not: decide when or how often anything is started.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rl_jax.backend import VISIBLE_GPUS, child_variables, host_gpus
from rl_jax.child import SECRET_VARIABLE, Log, clean_environment, exit_text, take_variable
from rl_jax.remote.link import address_text, new_secret, secret_of, write_secret
from rl_jax.remote.listener import Expected, Listener
from rl_jax.remote.spec import Spec
from rl_jax.settings import ClusterSettings
from rl_jax.timeline import NO_TRACES, Traces

EXIT_S = 5.0  # for a killed process to be gone
SECRET_FILE = "cluster.secret"


class Handle(Protocol):
    """One process, from the wish that it were there to its end."""

    @property
    def pid(self) -> int | None: ...  # of a process of this host that we started

    def link(self, timeout_s: float) -> socket.socket | None:
        """The socket to it, once it is there."""
        ...

    def absent(self, waited_s: float) -> str:
        """Why it is given up, where no link came in this time."""
        ...

    def ended(self, timeout_s: float) -> str | None:
        """How it ended, after "its process", if it does within this time; None where it lives, or nobody can know."""
        ...

    def kill(self) -> str | None:
        """End it with all it started, as far as that can be done from here; what went wrong, after "its process"."""
        ...

    def last_words(self) -> str:
        """What it printed last, or \"\"."""
        ...


class Starter(Protocol):
    """Of one cluster. `start` and the handle's methods are called on the thread of one server's life."""

    traces: Traces  # of the run: what the processes do when

    @property
    def is_by_hand(self) -> bool: ...  # whether nobody but a person may know when a process comes

    @property
    def commands(self) -> Sequence[str]: ...  # for a person to run, one a server

    def open(self, specs: Sequence[Spec]) -> None:
        """Before anything is started. Raises: OSError, one line, where it is known that these can never all live."""
        ...

    def start(self, spec: Spec, attempt: str) -> Handle:
        """Raises: OSError where no process can be started."""
        ...

    def retire(self, spec: Spec) -> None:
        """It is not started again. A process of it that somebody starts by hand all the same is told to end."""
        ...

    def stats(self) -> dict[str, int]:
        """Counts of connections by what became of them; empty where nothing listens."""
        ...

    def close(self) -> None: ...


def told(spec: Spec, settings: ClusterSettings) -> dict[str, Any]:
    """What a process must know before its channel is open."""
    return {
        "factory": spec.factory,
        "settings": asdict(settings),
        "name": spec.name,
        "scrape": dict(spec.scrape),
    }


# --- a child of this host ------------------------------------------------------------------------


def launched(
    name: str,
    program: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    log_dir: Path,
    fds: Sequence[int] = (),
) -> tuple[subprocess.Popen, Log]:
    """The program of a process with these arguments, in a session of its own, and what it prints, in log_dir/NAME.log.

    variables: beside the clean environment.  fds: that it inherits.  Raises: OSError.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", program, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**clean_environment(), **variables},
        pass_fds=fds,
        start_new_session=True,
    )
    assert process.stdout is not None, "Popen makes what PIPE asks for"
    log = Log(name, process.stdout)
    log.open(log_dir)
    return process, log


class Child:
    """A Handle."""

    def __init__(self, spec: Spec, attempt: str, settings: ClusterSettings, log_dir: Path):
        ours, theirs = socket.socketpair()
        self._sock: socket.socket | None = ours
        line = {
            **told(spec, settings),
            "fd": theirs.fileno(),
            "attempt": attempt,
            "parent": os.getpid(),
        }
        with theirs:
            variables, fds = child_variables(spec.num_devices, spec.platform), [theirs.fileno()]
            if spec.platform == "gpu":
                gpus = host_gpus()
                variables[VISIBLE_GPUS] = ",".join(gpus[number] for number in spec.devices)
            self._process, self._log = launched(
                spec.name, spec.program, [json.dumps(line)], variables, log_dir, fds
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def link(self, timeout_s: float) -> socket.socket | None:
        """At once, as the socket was there before the process."""
        sock, self._sock = self._sock, None
        return sock

    def absent(self, waited_s: float) -> str:
        return f"its process was not linked within cluster.start_timeout_s={waited_s:g}"

    def ended(self, timeout_s: float) -> str | None:
        end_s = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if time.monotonic() >= end_s:
                return None
            time.sleep(0.01)
        return exit_text(self._process.returncode, 0.0)

    def kill(self) -> str | None:
        if self._process.returncode is None:  # only poll() reaps it: its id is nobody else's
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has just ended
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return exit_text(None, EXIT_S)
        if self._sock is not None:
            self._sock.close()
        return None

    def last_words(self) -> str:
        self._log.drain()
        return self._log.last_line()


class LocalStarter:
    """Children of this process."""

    is_by_hand, commands = False, ()
    traces = NO_TRACES

    def __init__(self, settings: ClusterSettings, log_dir: Path):
        self._settings, self._log_dir = settings, log_dir

    def open(self, specs: Sequence[Spec]) -> None:
        """Nothing to do."""

    def start(self, spec: Spec, attempt: str) -> Child:
        return Child(spec, attempt, self._settings, self._log_dir)

    def retire(self, spec: Spec) -> None:
        pass  # none comes by itself

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


# --- one that somebody else starts ---------------------------------------------------------------


class Guest:
    """A Handle."""

    pid = None

    def __init__(self, expected: Expected, starter: "ExternalStarter"):
        self._expected, self._starter = expected, starter

    def link(self, timeout_s: float) -> socket.socket | None:
        return self._expected.link(timeout_s)

    def absent(self, waited_s: float) -> str:
        return self._starter.absent(waited_s)

    def ended(self, timeout_s: float) -> str | None:
        return None

    def kill(self) -> str | None:
        self._expected.withdraw()

    def last_words(self) -> str:
        return ""


class ExternalStarter:
    """Processes that come over TCP. Listens from its constructor on."""

    is_by_hand, traces = True, NO_TRACES

    def __init__(self, settings: ClusterSettings, log_dir: Path, specs: Sequence[Spec]):
        """The secret comes from RL_JAX_CLUSTER_SECRET, which leaves this process's environment, or is made and lies in
        log_dir until `close`. Raises: OSError; ValueError for a secret that is none."""
        given = take_variable(SECRET_VARIABLE)
        secret = new_secret() if given is None else secret_of(given, SECRET_VARIABLE)
        self._settings = settings
        self._listener = Listener(settings.host, settings.port, secret, [s.name for s in specs])
        self._file = None if given is not None else (log_dir / SECRET_FILE).resolve()
        if self._file is not None:
            write_secret(self._file, secret)
        self.commands = tuple(self._command(spec) for spec in specs)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port on which it listens."""
        return self._listener.address

    def open(self, specs: Sequence[Spec]) -> None:
        """Nothing to do: who will come cannot be known."""

    def start(self, spec: Spec, attempt: str) -> Guest:
        line = told(spec, self._settings)
        return Guest(self._listener.expect(spec.name, attempt, line, by_name=False), self)

    def absent(self, waited_s: float) -> str:
        """With the names of all servers of which none came, as one cause keeps all of them away."""
        missing = self._listener.missing()
        others = f"; of these none came at all: {', '.join(missing)}" if missing else ""
        where = address_text(*self._listener.address)
        return (
            f"no process of it came to {where} within {waited_s:g} s (cluster.start_timeout_s){others}; run the command"
            " that was printed for each, where this address can be reached"
        )

    def retire(self, spec: Spec) -> None:
        self._listener.retire(spec.name)

    def stats(self) -> dict[str, int]:
        return self._listener.stats()

    def close(self) -> None:
        self._listener.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _command(self, spec: Spec) -> str:
        """For a shell, on any machine that has this code, and reads the file of the secret."""
        variables = child_variables(spec.num_devices, spec.platform)
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
        words += [
            "python",
            "-m",
            spec.program,
            f"--connect={address_text(*self._listener.address)}",
        ]
        words.append(f"--server={shlex.quote(spec.name)}")
        if self._file is not None:
            words.append(f"--secret_file={shlex.quote(str(self._file))}")
        return " ".join(words)
