"""A thread a target, so that no wait in a sync is without a deadline and one stuck server holds up no other.

Calls of a lane run in order. A call that does not come back is given up by its caller (`wait`), which notes it as
`overdue`: until it does come back, the lane is stuck. The thread is a daemon, so it cannot keep the process alive.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

QUEUE_SIZE = 16  # more calls than a sync ever has in flight on one lane


class Overdue(TimeoutError):
    """A call did not return by its deadline."""


class Lane:
    """Runs calls for one target, in order. `submit` and `close` belong to one thread, the sync's."""

    def __init__(self, name: str):
        self.name = name
        self.overdue: Future | None = None  # the last call that was given up; written by the sync
        self._calls: queue.Queue = queue.Queue(QUEUE_SIZE)
        self._thread = threading.Thread(target=self._run, name=f"sync-{name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        """The call's future; it holds Overdue if the lane is stuck in an earlier call with others waiting."""
        future: Future = Future()
        try:
            self._calls.put_nowait((future, call, args))
        except queue.Full:
            future.set_exception(Overdue(f"{self.name} is stuck in an earlier call"))
        return future

    @property
    def is_stuck(self) -> bool:
        """Still in, or before, the call that was given up."""
        return self.overdue is not None and not self.overdue.done()

    def close(self, timeout_s: float) -> bool:
        """Ends the thread after the calls before; False if it is stuck in one."""
        try:
            self._calls.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call, args = item
            try:
                future.set_result(call(*args))
            except BaseException as error:  # handed to the waiting thread, which knows the target
                future.set_exception(error)
            del item, future, call, args  # staged arrays must not live until the next call


def wait(future: Future, deadline: float, what: str) -> Any:
    """The call's result. deadline: on the monotonic clock. Raises: Overdue, or what the call raised."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError as error:
        if future.done():  # it came just now, or the call itself raised a TimeoutError
            return future.result()
        raise Overdue(f"no answer by the deadline while waiting for {what}") from error
