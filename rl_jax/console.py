"""The terminal's share of the log: the first warning of a kind, then how many more there were.

Owns: `FirstOfAKind`, a filter of the terminal's handler, and `WithCount`, its form. A warning logged with
extra={"kind": name} may come hundreds of times for one cause (a broken environment fails every episode): the first is
shown, the others are counted, and the count is told with the next one after EVERY_S, and at the end. The log file has
no such filter and keeps them all. And `say`, for what is printed to a reader that may leave early (`| head`).
Must not: touch a record without a kind.
"""

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TextIO

EVERY_S = 30.0  # as often as a heartbeat


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line to stdout (or `stream`) at once; an empty text only flushes. Nowhere once the reader has gone."""
    stream = stream if stream is not None else sys.stdout
    try:
        print(text, end="\n" if text else "", file=stream, flush=True)
    except OSError:  # what is left in its buffer would be complained of at the interpreter's exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class FirstOfAKind(logging.Filter):
    """Thread-safe. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self._shown_s: dict[str, float] = {}  # when a kind was last shown
        self._held: Counter[str] = Counter()  # not shown since

    def filter(self, record: logging.LogRecord) -> bool:
        """False to hold it back. What is shown after a pause gets `held`, the number held back before it."""
        kind = getattr(record, "kind", None)
        if kind is None:
            return True
        with self._lock:
            now = self._clock()
            if kind in self._shown_s and now - self._shown_s[kind] < EVERY_S:
                self._held[kind] += 1
                return False
            self._shown_s[kind] = now
            record.__dict__["held"] = self._held.pop(kind, 0)
        return True

    def rest(self) -> list[str]:
        """One line for each kind that is held back still; they count as told."""
        with self._lock:
            held, self._held = self._held, Counter()
        return [f"{num} more of {kind}; the log file has them all" for kind, num in held.items()]


class WithCount(logging.Formatter):
    """Says how many of its kind were held back before a record."""

    def format(self, record: logging.LogRecord) -> str:
        num = getattr(record, "held", 0)
        return super().format(record) + (f" (and {num} more of its kind before it)" if num else "")
