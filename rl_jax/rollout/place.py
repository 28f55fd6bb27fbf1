"""Where worker processes run: the seam between one worker's calls (process.py) and whatever starts its process.

A Place starts a Child by its name. The child takes and gives lines, says when it is over and how it ended, writes its
stack, and is killed with all it started. LocalPlace: a child of this process, over pipes, in a session of its own with
a clean environment. Of other hosts: remote/worker_place.py.
Must not: know a call, or decide when anything is started.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rl_jax.child import Log, clean_environment, exit_text
from rl_jax.rollout.pipe import LinePipe

STACK_S = 0.2  # for a hung worker to write its stack
EXIT_S = 5.0  # for a killed process to be gone
PROGRAM = "rl_jax.rollout.env_process"


class Child(Protocol):
    """One process, from its start to its end. All methods on one thread at a time: the attached loop's."""

    @property
    def pid(self) -> int | None: ...  # where it is one of this host

    @property
    def is_over(self) -> bool: ...  # whether it is known to have ended

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_line: Callable[[bytes], None],
        on_over: Callable[[], None],
    ) -> None:
        """Deliver lines on this loop, at once those that came while nobody looked. on_over: when it ended, or cannot be
        spoken with any more, behind its last line; perhaps more than once."""
        ...

    def detach(self) -> None: ...

    def send(self, line: bytes) -> None:
        """One line, with its end. It never waits."""
        ...

    def end_input(self) -> None:
        """The child's input ends: it closes what it has, and ends."""
        ...

    async def stack(self) -> str:
        """Have it write its stack; what it printed last, with that."""
        ...

    async def kill(self) -> None:
        """End it with all it started, and wait until that is done or EXIT_S is over; frees what is held here."""
        ...

    def how(self) -> str:
        """How it ended, after `kill`, as the end of a sentence, with what it printed last."""
        ...

    def open_log(self, log_dir: Path) -> None:
        """From now on keep what it prints in log_dir/NAME.log, where it runs."""
        ...

    def note(self, text: str) -> None:
        """The driver's own line in the child's log."""
        ...


class Place(Protocol):
    """Starts children, of one name one after the other."""

    @property
    def start_s(
        self,
    ) -> float: ...  # that the start of a child may take, before it begins to import

    def start(self, name: str) -> Child:
        """At once; a child that does not come is over in a while. Raises: OSError where no process can be started."""
        ...


class LocalChild:
    """A Child."""

    def __init__(self, name: str, words: Sequence[str] = ()):
        """words: of its command line."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        )
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin and stdout and stderr, "Popen makes what PIPE asks for"
        self.log = Log(name, stderr)
        self._pipe = LinePipe(stdin, stdout)
        self._exit_fd = _open_exit_fd(self._process.pid)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_line: Callable[[bytes], None],
        on_over: Callable[[], None],
    ) -> None:
        def exited() -> None:
            self._pipe.drain()  # answers it wrote before
            on_over()

        self._loop = loop
        self._pipe.attach(loop, on_line, on_over)
        if self._exit_fd is not None:  # it tells the end even if a child of it still holds the pipe
            loop.add_reader(self._exit_fd, exited)
        self._pipe.drain()

    def detach(self) -> None:
        self._pipe.detach()
        if self._loop is not None and self._exit_fd is not None:
            self._loop.remove_reader(self._exit_fd)
        self._loop = None

    def send(self, line: bytes) -> None:
        self._pipe.send(line)

    def end_input(self) -> None:
        self._pipe.close_writer()

    async def stack(self) -> str:
        self._signal(os.kill, signal.SIGUSR1)
        await asyncio.sleep(STACK_S)
        return self.log.tail()

    async def kill(self) -> None:
        self.kill_now()
        deadline_s = time.monotonic() + EXIT_S
        while self._process.poll() is None and time.monotonic() < deadline_s:
            await asyncio.sleep(0.005)
        self.detach()
        self._pipe.close()
        if self._exit_fd is not None:
            os.close(self._exit_fd)
            self._exit_fd = None
        await asyncio.to_thread(self.log.drain)

    def kill_now(self) -> None:
        """Without waiting. Any thread."""
        self._signal(os.killpg, signal.SIGKILL)

    def how(self) -> str:
        return f"the process {exit_text(self._process.returncode, EXIT_S)}; {self.log.last_line()}"

    def open_log(self, log_dir: Path) -> None:
        self.log.open(log_dir)

    def note(self, text: str) -> None:
        self.log.note(text)

    def _signal(self, send: Callable[[int, int], None], number: int) -> None:
        # Only poll() reaps the child, so as long as it has no return code its id is nobody else's.
        if self._process.returncode is None:
            try:
                send(self._process.pid, number)
            except ProcessLookupError:
                pass  # it has just ended


class LocalPlace:
    """Children of this process."""

    start_s = 0.0

    def start(self, name: str) -> LocalChild:
        return LocalChild(name)


def _environment() -> dict[str, str]:
    # Tasks made from sets must be the same in every process and run. Many workers share the machine with the driver:
    # maths libraries must not start a thread per core in each.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**clean_environment(), "PYTHONHASHSEED": "0", **threads}


def _open_exit_fd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
