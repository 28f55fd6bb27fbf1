"""Feeds: what leaves for the trackers, and what becomes of it when one of them cannot take it.

Owns: one thread and one bounded queue for each tracker. Life of an item: 1 the driver's thread puts it into the queue
of each feed and never waits: what finds a queue full is dropped and counted. 2 The feed's thread hands it to the
tracker. What the tracker raises costs that item, counted; after MAX_FAILURES in a row, or where it cannot be made at
all, the tracker is given up, and all that comes after is counted. 3 `close` lets the queues empty and each tracker
close, for at most CLOSE_S together; a thread that does not end is left behind, with what its queue still holds counted.
Invariants: nothing here stops or slows a step; every item ends as delivered, failed or dropped; the first loss of a
tracker and its final count are told, in one line and one event each.
Must not: write metrics.jsonl, which is always there, or import a tracker on the driver's thread.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_jax.trackers.tracker import Tracker, choose, sample_of
from rl_jax.types import Trajectory

LOG = logging.getLogger(__name__)

QUEUE_SIZE = 256  # items: rows of as many steps, so that a tracker may be away for that long
MAX_FAILURES = 5  # in a row
CLOSE_S = 15.0  # for all trackers together, once the run has ended

Tell = Callable[..., None]  # (text, **fields): one line and one event


class Feed:
    """One tracker. `put` is called by the driver's thread; the counts may be read by any."""

    def __init__(self, name: str, make: Callable[[], Tracker], tell: Tell, size: int = QUEUE_SIZE):
        """make: the tracker, on the feed's own thread."""
        self.name, self.counts = name, Counter()  # put, delivered, failed, dropped
        self._make, self._tell = make, tell
        self._queue: queue.Queue[tuple[str, Callable[[], tuple]] | None] = queue.Queue(size)
        self._lost: str = ""  # why the tracker was given up
        self._told = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, method: str, arguments: Callable[[], tuple]) -> None:
        """arguments: made on the feed's thread."""
        self.counts["put"] += 1
        if self._lost:
            self._count("dropped", self._lost)
            return
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            self._count("dropped", f"it does not keep up: {self._queue.maxsize} items wait")

    @property
    def num_lost(self) -> int:
        return self.counts["dropped"] + self.counts["failed"]

    def close(self, deadline_s: float) -> None:
        """deadline_s: by the monotonic clock."""
        try:
            self._queue.put(None, timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Full:
            pass  # it hangs
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            left = self.counts["put"] - self.counts["delivered"] - self.num_lost
        if self._thread.is_alive():
            self._count("dropped", "it did not end in time, and is left behind", left)
        elif left:  # put while it was given up, behind what that counted
            self._count("dropped", self._lost, left)
        if self.num_lost:
            self._tell(
                f"tracker {self.name}: {self.num_lost} of {self.counts['put']} items were lost; metrics.jsonl has all",
                tracker=self.name,
                **self.counts,
            )

    def _run(self) -> None:
        try:
            tracker = self._make()
        except BaseException as error:  # boundary: whatever a tracker's package may raise
            self._give_up("it could not be made", error)
            return
        failures = 0
        while (item := self._queue.get()) is not None:
            method, arguments = item
            try:
                getattr(tracker, method)(*arguments())
            except (
                BaseException
            ) as error:  # boundary: it must not end the run, nor this thread untold
                LOG.info("tracker %s failed", self.name, exc_info=True)
                self._count("failed", _line(error))
                failures += 1
                if failures == MAX_FAILURES:
                    self._give_up(f"it failed {failures} times in a row", error)
                    break
            else:
                failures = 0
                with self._lock:
                    self.counts["delivered"] += 1
        try:
            tracker.close()
        except BaseException as error:  # boundary, as above
            LOG.info("tracker %s failed to close", self.name, exc_info=True)
            self._count("failed", f"it failed to close: {_line(error)}", 0)

    def _give_up(self, why: str, error: BaseException) -> None:
        self._lost = f"{why}: {_line(error)}"
        waiting = 0
        while True:
            try:
                waiting += self._queue.get_nowait() is not None
            except queue.Empty:
                break
        self._count("dropped", self._lost, waiting)

    def _count(self, what: str, why: str, num: int = 1) -> None:
        with self._lock:
            self.counts[what] += num
            told, self._told = self._told, True
        if not told:
            self._tell(
                f"warning: tracker {self.name} loses what it should get: {why}; the run goes on, further losses are"
                " counted (trackers/lost)",
                tracker=self.name,
                why=why,
            )


class Feeds:
    """All trackers of a run; none is a valid number."""

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Tracker]],
        tell: Tell,
        render: Callable[[np.ndarray], str],
        num_samples: int,
        sample_bytes: int,
    ):
        """render: tokens i32[n] -> text. num_samples, sample_bytes: caps of a step's episodes and of their texts."""
        self._feeds = [Feed(name, make, tell) for name, make in makers.items()]
        self._render, self._num, self._bytes = render, num_samples, sample_bytes

    def hparams(self, hparams: Mapping[str, Any]) -> None:
        self._put("log_hparams", lambda: (hparams,))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """values: finite, as metrics.jsonl has them; not changed afterwards."""
        self._put("log_metrics", lambda: (step, values))

    def rollouts(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        if not self._feeds or not self._num:
            return
        chosen = choose(trajectories, self._num)
        samples = lambda: [sample_of(t, self._render, self._bytes) for t in chosen]
        self._put("log_rollouts", lambda: (step, samples()))

    def lost(self) -> dict[str, int]:
        """Items that each tracker did not take, since the start."""
        return {feed.name: feed.num_lost for feed in self._feeds}

    def close(self) -> None:
        deadline_s = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            feed.close(deadline_s)

    def _put(self, method: str, arguments: Callable[[], tuple]) -> None:
        for feed in self._feeds:
            feed.put(method, arguments)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
