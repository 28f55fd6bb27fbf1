"""The terminal's share of the log: the first warning of a kind, then how many more there were.

Owns: `FirstOfAKind`, a filter of the terminal's handler. A warning logged with extra={"kind": name} may come hundreds
of times for one cause (a broken environment fails every episode): the first is shown, the others are counted, and the
count is told with the next one after EVERY_S, and at the end. The log file has no such filter and keeps them all.
Must not: touch a record without a kind.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

EVERY_S = 30.0  # as often as a heartbeat


class FirstOfAKind(logging.Filter):
    """Thread-safe. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self._shown_s: dict[str, float] = {}  # when a kind was last shown
        self._held: Counter[str] = Counter()  # not shown since

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        """The record to show, with the count of those held back before it; False to hold it back."""
        kind = getattr(record, "kind", None)
        if kind is None:
            return True
        with self._lock:
            now = self._clock()
            if kind in self._shown_s and now - self._shown_s[kind] < EVERY_S:
                self._held[kind] += 1
                return False
            self._shown_s[kind] = now
            held = self._held.pop(kind, 0)
        if not held:
            return True
        shown = logging.makeLogRecord(record.__dict__)  # the log file gets the record itself
        shown.msg, shown.args = f"{record.getMessage()} (and {held} more of {kind} before it)", ()
        return shown

    def rest(self) -> list[str]:
        """One line for each kind that is held back still; they count as told."""
        with self._lock:
            held, self._held = self._held, Counter()
        return [f"{num} more of {kind}; the log file has them all" for kind, num in held.items()]
