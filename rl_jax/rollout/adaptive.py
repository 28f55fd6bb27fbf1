"""How long a scorer may take at a task: learnt from the slowest answer above 0 that the task has had.

min(max(FLOOR_S, FACTOR x anchor), cap): tests that hang are cut soon, and no answer that is as slow as one that was
right is (RollPacker). The anchor only grows. Without one, which is before a task's first answer above 0, the cap holds.
It is not in checkpoints but learnt anew after a resume: until then nothing is cut that would not have been before.
Must not: read a clock; what is handed in are a scorer's own seconds, without waits and retries.
"""

from collections import OrderedDict

FLOOR_S, FACTOR = 2.0, 1.5
MAX_TASKS = 1 << 16  # that are remembered; the one that was longest unused is forgotten first


class AdaptiveTimeout:
    def __init__(self, cap_s: float):
        self._cap_s = cap_s
        self._anchors: OrderedDict[str, float] = OrderedDict()

    def limit_s(self, key: str) -> float:
        """key: of a scorer and a task."""
        if key not in self._anchors:
            return self._cap_s
        self._anchors.move_to_end(key)
        return min(max(FLOOR_S, FACTOR * self._anchors[key]), self._cap_s)

    def saw(self, key: str, value: float | None, seconds: float) -> None:
        """An answer; value: None if it was not scored."""
        if value is None or not value > 0:
            return
        self._anchors[key] = max(seconds, self._anchors.get(key, 0.0))
        self._anchors.move_to_end(key)
        if len(self._anchors) > MAX_TASKS:
            self._anchors.popitem(last=False)
