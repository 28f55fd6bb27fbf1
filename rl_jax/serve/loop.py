"""Loop: the thread of one server, from compiling to closing, and what becomes of it when it fails.

Owns: the thread, its inbox, and whether the server is fenced (serves nothing until a commit
succeeds), closing or dead.
Invariants: `step` and `fail` run on the thread only; a command is obeyed, or refused with the
reason; an exception in the thread fails all that the server holds, fences it for good and never
leaves anyone waiting.
Life: prepare compiles program by program, with a step between two so that a first commit waits for
one compile and not for all -> step(commands) again and again, sleeping idle_s() between ->
fail(closed).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rl_jax.serve.commands import Command, Inbox
from rl_jax.timeline import OFF, Track
from rl_jax.types import TurnError

log = logging.getLogger(__name__)

LEAST_WAIT_S = 1e-3  # a shorter wait for commands is part of the host's work between two


class Progress(NamedTuple):
    """What a server's thread shows of itself; may be read from any thread."""

    num_done: int  # rises with every thing done: a program compiled, a chunk, a block, a swap
    doing: str
    is_compiling: bool
    is_idle: bool  # it waits for commands: there is nothing that it could do


class Loop:
    def __init__(
        self,
        server: str,
        stop_deadline_s: float,
        *,
        prepare: Callable[[], Iterator[str]],
        idle_s: Callable[[], float],
        step: Callable[[Sequence[Command]], None],
        fail: Callable[[TurnError], None],
        refuse: Callable[[Command, TurnError], None],
    ):
        """idle_s: how long to wait for commands now. fail: end all that is held. refuse: end one
        command, any thread.
        """
        self.server, self.stop_deadline_s = server, stop_deadline_s
        self.fenced: str | None = None  # why nothing is served
        self.is_dead = False  # the thread ended by an exception: the engine's state is gone
        self.doing, self.num_done = "not started", 0
        self._prepare, self._idle_s, self._step = prepare, idle_s, step
        self._fail, self._refuse = fail, refuse
        self._inbox = Inbox()
        self._ready = threading.Event()
        self.track: Track = OFF  # set before `start`
        self._closing = self._is_idle = False
        self._thread = threading.Thread(target=self._run, name=f"serve-{server}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, command: Command) -> None:
        """Hand a command to the thread, or refuse it if the loop has ended."""
        if not self._inbox.put(command):
            self._refuse(command, self.error())

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until all programs are compiled.

        Raises: TimeoutError; RuntimeError if the thread died.
        """
        if not self._ready.wait(deadline_s):
            raise TimeoutError(f"{self.server}: not compiled after {deadline_s:g} s ({self.doing})")
        if self.is_dead:
            raise RuntimeError(f"{self.server}: {self.fenced}")

    def close(self) -> None:
        """End the thread after what it does now. Raises: TimeoutError if it is stuck."""
        self._closing = True
        for command in self._inbox.close():
            self._refuse(command, self.error())
        if self._thread.is_alive():
            self._thread.join(self.stop_deadline_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"{self.server}: its thread is still {self.doing} after "
                f"serve.stop_deadline_s={self.stop_deadline_s:g} s"
            )

    def fence(self, reason: str | None) -> None:
        """None lifts the fence, unless the thread is dead."""
        if not self.is_dead:
            self.fenced = reason

    def error(self) -> TurnError:
        """Why a request cannot be served now."""
        if self.fenced is not None:
            kind = "engine" if self.is_dead else "closed"
            return TurnError(kind, self.server, f"it is fenced: {self.fenced}", retryable=True)
        return TurnError("closed", self.server, "the server is closed")

    def progress(self) -> Progress:
        return Progress(self.num_done, self.doing, not self._ready.is_set(), self._is_idle)

    def _run(self) -> None:
        start_s = time.monotonic()
        try:
            self.doing = "compiling"
            for program in self._prepare():
                self.num_done += 1
                self._step(self._inbox.take(0.0))
                self.doing = f"compiling, after {program}"
                if self._closing:
                    break
            self._ready.set()
            self.track.add("compile", start_s, time.monotonic())
            while not self._closing:
                self._step(self._wait())
            self._fail(self.error())
        except BaseException as error:  # the server's boundary: everyone who waits must learn of it
            self._die(error)
        finally:
            self._ready.set()

    def _wait(self) -> Sequence[Command]:
        """What is to be obeyed now; sleeps where there is nothing that could be done."""
        wait_s = self._idle_s()
        self.doing, self._is_idle = "waiting for commands", wait_s > 0
        start_s = time.monotonic()
        commands = self._inbox.take(wait_s)
        end_s = time.monotonic()
        if end_s - start_s > LEAST_WAIT_S:
            self.track.add("wait", start_s, end_s)
        self._is_idle = False
        return commands

    def _die(self, error: BaseException) -> None:
        log.error("%s died while %s", self.server, self.doing, exc_info=error)
        self.fenced = f"its thread died while {self.doing}: {type(error).__name__}: {error}"
        self.is_dead = True
        self.track.mark("dead", why=self.fenced)
        left = self._inbox.close()
        self._fail(self.error())
        for command in left:
            self._refuse(command, self.error())


def answer(on_done: Callable[..., None], *result: Any) -> bool:
    """Hand a result to a caller's code; False if it raised, which must not stop the server."""
    try:
        on_done(*result)
        return True
    except Exception:  # the boundary to the caller
        log.exception("the callback of a finished request raised")
        return False
