"""What is waited for, by whom and since when; and which of it has lasted so long that a person should know.

Owns: `Wait`, one thing that is under way, and `Watchdog`, which names each wait once it is `name_after_s` old, again
whenever it is twice as old as when it was named last, and once more when it is over. A wait is named whatever else the
run does meanwhile: a run whose other episodes go on shows no heartbeat.
Must not: read a clock, end what it names (each wait has a deadline of its own), or be used from two threads.
"""

import asyncio
import os
import sys
import traceback
from collections.abc import Iterable
from typing import NamedTuple

STANDARD = os.path.dirname(os.path.dirname(asyncio.__file__)) + os.sep
MOST = 5  # lines of one look; more waits are counted in the last


class Wait(NamedTuple):
    """One thing that is under way."""

    what: str  # names itself and who does it: "reset of r/0/1/2 in env_0"
    since_s: float  # time.monotonic() at its begin
    limit: str = ""  # the setting that ends it, with its value
    where: str = ""  # how far it is by now

    def text(self, now_s: float) -> str:
        bound = f" (at most {self.limit})" if self.limit else ""
        where = f", {self.where}" if self.where else ""
        return f"{self.what} for {now_s - self.since_s:.1f} s{where}{bound}"


def stack_head(thread: int | None) -> str:
    """Where a thread of this process is: "file.py:12 in function", of the innermost frame that is not the standard
    library's where there is one. thread: Thread.ident."""
    now = sys._current_frames().get(thread or 0)
    if now is None:
        return "its end"
    frames = traceback.extract_stack(now)
    ours = [frame for frame in frames if not frame.filename.startswith(STANDARD)] or frames
    return f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno} in {ours[-1].name}"


class Watchdog:
    """Sole owner of which waits were named."""

    def __init__(self, name_after_s: float):
        self.name_after_s = name_after_s
        self._named: dict[tuple[str, float], float] = {}  # -> its age when it was named last

    def look(self, waits: Iterable[Wait], now_s: float) -> list[str]:
        """Lines for a person, none if nothing is new. waits: all that are under way."""
        lines, num_more, under_way = [], 0, set()
        for wait in sorted(waits, key=lambda wait: wait.since_s):
            key, age_s = wait[:2], now_s - wait.since_s
            under_way.add(key)
            if age_s < max(self.name_after_s, 2 * self._named.get(key, 0.0)):
                continue
            self._named[key] = age_s
            if len(lines) < MOST:
                lines.append(f"long wait: {wait.text(now_s)}")
            else:
                num_more += 1
        if num_more:
            lines[-1] += f", and {num_more} more"
        for key in [key for key in self._named if key not in under_way]:
            del self._named[key]
            if len(lines) < MOST:
                lines.append(f"it is over: {Wait(*key).text(now_s)}")
        return lines
