"""The clock that deadlines, ages and durations are read from: the event loop's own where one runs.

On an asyncio loop of the real world this is time.monotonic(), as it is in any thread without a loop. On a virtual one
(rl_jax/simulate) it is that loop's time, so the same code runs there unchanged.
Must not: be read for a time of day, or in a thread other than the one whose clock is meant.
"""

import asyncio
import time


def now_s() -> float:
    """Seconds of a clock that never goes back."""
    loop = asyncio._get_running_loop()  # no exception where there is none: blocks are timed by this
    return time.monotonic() if loop is None else loop.time()
