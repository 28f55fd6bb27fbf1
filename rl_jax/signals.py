"""SIGTERM and Ctrl-C as exceptions: who is told, and that none is lost.

A handler runs wherever the main thread happens to be. What it raises inside a callback of the garbage collector is
printed and dropped; so it is also kept, and `check` raises it again at the next place where stopping is safe. Handlers
of one signal nest: the innermost one decides, and SIGTERM's outermost stands for all of `main`, so that no moment of a
run is without one; SIGINT's is Python's own there.
Must not: import jax (a signal may come before it), or know what there is to save.
"""

import signal
from collections.abc import Callable
from typing import Any


class Preempted(BaseException):
    """SIGTERM arrived, and what was due is saved (or a second one, which does not wait for that): start the run again.

    No Exception, as KeyboardInterrupt is none: where it is raised at once, what handles errors there must let it by.
    """


class on_signal:
    """The signal calls `handle` while the block runs (main thread only; elsewhere a no-op, as in a notebook)."""

    def __init__(self, signum: int, handle: Callable[[int], None]):
        self._signum, self._handle = signum, handle
        self._old: Any = None
        self._raised: BaseException | None = None

    def __enter__(self) -> "on_signal":
        try:
            self._old = signal.signal(self._signum, self._on_signal)
        except ValueError:  # not the main thread: the owner of the process handles signals
            self._old = None
        return self

    def __exit__(self, *exc) -> None:
        if self._old is not None:
            signal.signal(self._signum, self._old)

    def check(self) -> None:
        """Raises again what `handle` raised, for where the first time was lost."""
        if self._raised is not None:
            raise self._raised

    def _on_signal(self, signum: int, frame: Any) -> None:
        try:
            self._handle(signum)
        except BaseException as error:
            self._raised = error
            raise


def stop_at_once(signum: int) -> None:
    """The handler where nothing is due that a save would keep. Raises Preempted."""
    raise Preempted(f"stopped by signal {signum} with nothing to save; start it again")


def interrupt(signum: int) -> None:
    """Python's own answer to Ctrl-C. Raises KeyboardInterrupt."""
    raise KeyboardInterrupt
