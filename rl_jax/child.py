"""A process that this one started: the environment it gets, what it prints, and how it ended.

Owns: the list of variables that a child inherits, the secret that none does, whom a child dies with, and the bounded
log of a child's output.
Must not: start a process, or know what runs in it.
"""

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import IO, BinaryIO

READ_SIZE = 1 << 18
LOG_TAIL = 8192  # bytes of a log kept for error messages
MAX_LOG = 64 << 20  # bytes of a log file: a child that prints without end must not fill the disk
DRAIN_S = 1.0  # for a dead child's last output to be read

# All that a child inherits: no token, key or cloud setting of the driver's environment reaches other code.
INHERITED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
)

PR_SET_PDEATHSIG = 1

SECRET_VARIABLE = (
    "RL_JAX_CLUSTER_SECRET"  # of a run whose servers come over TCP, in hexadecimal digits
)


def take_variable(name: str) -> str | None:
    """Its value, or None; it stands in the environment no more, so that nothing started later inherits it."""
    return os.environ.pop(name, None)


def give_variable(name: str, value: str) -> None:
    """To this process and all that it starts from now on; what is set already wins."""
    os.environ.setdefault(name, value)


def clean_environment(*more: str) -> dict[str, str]:
    """The child's whole environment; it imports what this process can import. more: further variables it inherits."""
    out = {name: os.environ[name] for name in (*INHERITED, *more) if name in os.environ}
    out["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return out


def die_with(parent: int) -> None:
    """Now, if the parent is gone; else with the thread of it that started this process, even when this is stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def exit_text(returncode: int | None, waited_s: float) -> str:
    """How a process ended, as the end of a sentence. None: not within waited_s of being killed."""
    if returncode is None:
        return f"did not end within {waited_s:g} s of being killed"
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"


class Log:
    """What a child prints: a bounded file once there is a run directory, and a tail for error messages.

    A thread of its own reads it, so a child can never block on printing.
    """

    def __init__(self, name: str, stream: IO[bytes]):
        self.name = name
        self._stream = stream
        self._lock = threading.Lock()
        self._tail = bytearray()
        self._file: BinaryIO | None = None
        self._num_written = 0
        self._thread = threading.Thread(target=self._pump, name=f"log-{name}", daemon=True)
        self._thread.start()

    def open(self, log_dir: Path) -> None:
        """From now on append to log_dir/NAME.log, starting with the tail so far. The same directory twice is one."""
        with self._lock:
            if self._file is None:
                log_dir.mkdir(parents=True, exist_ok=True)
                self._file = (log_dir / f"{self.name}.log").open("ab", buffering=0)
                self._num_written = self._file.tell()
                self._write(bytes(self._tail))

    def echo(self) -> None:
        """From now on repeat it on this process's own stderr, starting with the tail so far."""
        with self._lock:
            if self._file is None:
                self._file = os.fdopen(os.dup(2), "ab", buffering=0)
                self._write(bytes(self._tail))

    def note(self, text: str) -> None:
        """The driver's own line in the child's log."""
        self._append(f"[rl_jax] {text}\n".encode("utf-8", "replace"))

    def tail(self) -> str:
        """The last output."""
        with self._lock:
            return self._tail.decode("utf-8", "replace")

    def last_line(self) -> str:
        lines = [line.strip() for line in self.tail().splitlines() if line.strip()]
        return f"its last output: {lines[-1][:300]!r}" if lines else "it printed nothing"

    def drain(self) -> None:
        """Wait for the rest of a dead child's output; not longer than DRAIN_S, should another process hold the pipe."""
        self._thread.join(DRAIN_S)

    def _pump(self) -> None:
        with self._stream:
            while data := os.read(self._stream.fileno(), READ_SIZE):
                self._append(data)
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _append(self, data: bytes) -> None:
        with self._lock:
            self._tail += data
            del self._tail[:-LOG_TAIL]
            self._write(data)

    def _write(self, data: bytes) -> None:
        if self._file is None or self._num_written > MAX_LOG:
            return
        self._num_written += len(data)
        note = b"\n[log ends: its size limit is reached]\n" if self._num_written > MAX_LOG else b""
        try:
            self._file.write(data + note)
        except OSError:
            # Logs are dropped when the disk is full; ledger and checkpoints decide whether the run goes on.
            self._num_written = MAX_LOG + 1
