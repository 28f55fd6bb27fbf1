"""How far the monotonic clock of a channel's other side is ahead of ours, from the channel's pulses.

Each pulse carries its sender's time, and the last pulse that the sender got: that one's time and when it came. From the
four times the offset follows as if both ways took as long (RFC 5905, 8): off by at most half of the time that was spent
on the way. Of the last samples the one that was on its way for least counts.
Must not: read a clock, or trust what comes: it is another process's word.
"""

import math
from collections import deque
from typing import Any

KEPT = 64  # samples: a minute of pulses, in which two quartz clocks drift apart by some milliseconds at most


class ClockOffset:
    """Sole owner of its samples. `stamp` and `heard` may be called from two threads."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=KEPT)  # seconds on the way, offset
        self._echo: tuple[float, float] | None = None  # their time, ours when it came

    def stamp(self, now_s: float) -> dict[str, Any]:
        """What a pulse carries that is sent now."""
        return {"t": now_s, "echo": self._echo}

    def heard(self, stamp: Any, now_s: float) -> None:
        """A pulse came that carried this; what is no stamp is ignored."""
        sent_s, echo = (
            (stamp.get("t"), stamp.get("echo")) if isinstance(stamp, dict) else (None,) * 2
        )
        if not isinstance(sent_s, float | int) or not _is_time(sent_s):
            return
        self._echo = (sent_s, now_s)
        if not isinstance(echo, list) or len(echo) != 2 or not all(map(_is_time, echo)):
            return
        ours_s, came_s = echo
        way_s = (now_s - ours_s) - (sent_s - came_s)
        if way_s >= 0:
            self._samples.append((way_s, ((came_s - ours_s) + (sent_s - now_s)) / 2))

    @property
    def best(self) -> tuple[float, float] | None:
        """(their clock minus ours, how far off that may be), in seconds; None before two pulses met."""
        try:
            way_s, offset_s = min(self._samples)
        except (ValueError, RuntimeError):  # none yet, or one comes just now
            return None
        return offset_s, way_s / 2


def _is_time(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
