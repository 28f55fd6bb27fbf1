"""A coroutine run to its end by a caller that blocks, wherever the caller is; and one that has a deadline.

asyncio.run refuses a thread whose loop runs already, which is where a notebook's cells run; there the coroutine gets a
thread and a loop of its own, and the caller's loop stands still meanwhile, as it does in any cell that blocks.
Must not: be called from the rollout's own loop.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Its result; raises what it raises. An interrupt cancels it, and is raised once it has ended."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    done: Future[T] = Future()
    thread = threading.Thread(target=_run, args=(loop, task, done), name="blocking", daemon=True)
    thread.start()
    try:
        return done.result()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the coroutine had ended
            loop.call_soon_threadsafe(task.cancel)  # nothing, to a task that is done
        raise
    finally:
        thread.join()


async def within(timeout_s: float, coroutine: Coroutine[Any, Any, T], late: Exception) -> T:
    """Raises `late` after timeout_s: a bare TimeoutError would say nothing, and is an OSError."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await coroutine
    except TimeoutError:
        if not deadline.expired():
            raise
        raise late from None


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task, done: Future) -> None:
    """The thread: as asyncio.run, on a loop that the caller can reach."""
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(task)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    except BaseException as error:  # raised again in the caller's thread
        done.set_exception(error)
    else:
        done.set_result(result)
    finally:
        loop.close()
