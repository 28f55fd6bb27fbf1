"""An asyncio event loop whose time is virtual: when nothing is left to do now, it is the time of the next timer.

Invariants: time moves only when every callback that is due has run, and by `spend`; it never goes back; one thread owns
the loop, and nothing may run beside it, for the time would jump while that works (executors and calls from other
threads are refused); the same program gives the same order and the same times.
Life: run(main) -> callbacks run at a standing time -> select() is asked to wait for the next timer, and jumps there ->
main returns, or nothing could ever happen any more, or `limit_s` has passed: Stalled, with who waits for what.
Must not: sleep, or read the real clock.
"""

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any

START_S = 1.0  # records of what has not happened yet hold a time of 0
LIMIT_S = (
    30 * 86400.0
)  # of virtual time: no rollout takes so long, and idle servers wake up for ever


class Stalled(RuntimeError):
    """Nothing that is awaited can happen, or not before the limit."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at START_S."""

    def __init__(self, limit_s: float = LIMIT_S):
        self._limit_s = limit_s
        self._at_s, self._ahead_s = START_S, 0.0
        self._is_apart = False
        self._owner = threading.get_ident()
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._at_s + self._ahead_s

    def spend(self, seconds: float) -> None:
        """What runs inside `apart` takes so long. Raises: RuntimeError outside it, ValueError if negative."""
        if not self._is_apart:
            raise RuntimeError("spend() outside of apart(): nobody would wait for it")
        if not seconds >= 0:
            raise ValueError(f"spend({seconds!r}): time does not go back")
        self._ahead_s += seconds

    def apart(self, call: Callable[[], None], from_s: float) -> float:
        """Run `call`, which begins at from_s, now or later, and takes what it spends; others do not wait for it.

        What it sends by call_soon_threadsafe arrives at the time at which it was sent. Returns: when it ends.
        """
        if self._is_apart:
            raise RuntimeError("apart() inside of apart(): the outer one's time would be lost")
        self._is_apart, self._ahead_s = True, max(0.0, from_s - self._at_s)
        try:
            call()
            return self.time()
        finally:
            self._is_apart, self._ahead_s = False, 0.0

    def call_soon_threadsafe(self, callback, *args, context=None):  # type: ignore[override]
        if threading.get_ident() != self._owner:
            raise RuntimeError("a virtual loop has one thread; nothing else may call it")
        if self._ahead_s > 0:
            return self.call_at(self.time(), callback, *args, context=context)
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor, func, *args):  # type: ignore[override]
        raise RuntimeError(
            f"a virtual loop runs no threads ({func}): its time would jump meanwhile"
        )

    def _jump(self, seconds: float | None) -> None:
        """Nothing is to be done for so long; None: ever."""
        if seconds is None or self._at_s + seconds > START_S + self._limit_s:
            why = "no timer is set" if seconds is None else f"the limit of {self._limit_s:g} s"
            tasks = sorted(str(task.get_coro()) for task in asyncio.all_tasks(self))
            waiting = "; ".join(tasks[:8])
            raise Stalled(
                f"after {self._at_s - START_S:g} s {len(tasks)} tasks wait, {why}: {waiting}"
            )
        self._at_s += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait where another one would."""

    def __init__(self, jump: Callable[[float | None], None]):
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)  # an interrupt of this process
        if not ready and (timeout is None or timeout > 0):
            self._jump(timeout)
        return ready


def run(main: Coroutine[Any, Any, Any], limit_s: float = LIMIT_S) -> Any:
    """The result of main() on a virtual loop of its own. Raises: Stalled; what main raises."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s)) as runner:
        return runner.run(main)
