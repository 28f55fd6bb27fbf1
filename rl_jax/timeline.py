"""The timeline of a run: what each part did from when to when, written beside the run without ever holding it up.

Owns: `Timeline`, which records the spans of one process, `Track`, one row of it, and `Traces`, the driver's, which
writes traces/attempt_K/NAME.jsonl: one file a process, lines that are only appended.
Life of a span: 1 a part that just did something calls Track.add: a tuple goes into a bounded queue. 2 A thread of the
timeline takes what is there every FLUSH_S and gives it on: the driver's to a file, another process's to its driver by
their link, which writes it to a file of that process. 3 tools/trace.py reads the files.
Format: a line is a JSON object. The first of a file is its head: process, attempt, clock (which machine's monotonic
clock its seconds are of), pid. The others have "s", spans [track, kind, start_s, seconds, {more}], and "lost", how many
spans the process lost so far; those of another process have "offset_s", what is to be added to its seconds to have
the driver's, and "within_s", how far off that may be.
Invariants: `add` never waits, writes or raises; the queue and each file are bounded (of a file that is full the older
half goes); what is lost is counted; a disk or a link that is stuck costs spans and nothing else.
Must not: know a part, read a time of day, or start anything in a run that has metrics.timeline_bytes=0.
"""

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOG = logging.getLogger(__name__)

FLUSH_S = 0.5
MOST_WAITING = 1 << 16  # spans in the queue: minutes of a busy process whose disk is stuck
MOST_LINES = 1 << 10  # of other processes that wait to be written
MOST_PER_LINE = 1 << 12  # spans; a line of another process fits a message of the link
CLOSE_S = 2.0  # for the last spans; a stuck disk is left behind
FORMAT = 1
DRIVER = "driver"  # its process's name
KEPT = ("run/", "life/")  # groups whose spans a new half begins with: a reader needs them
MOST_KEPT = 1000  # of them, the first
OLD = ".old"  # the older half of a file, beside it: NAME.old.jsonl

Span = tuple[str, str, float, float, dict[str, Any]]  # track, kind, start_s, seconds, more


def clock_id() -> str:
    """Which clock time.monotonic() reads: equal in two processes exactly where their seconds may be compared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/time")  # a container may have its own
    except OSError:
        return f"pid:{os.getpid()}"  # nobody else's, as far as is known
    return f"{boot}/{space}"


class Track:
    """One row of a timeline. Any thread."""

    __slots__ = ("_timeline", "name")

    def __init__(self, timeline: "Timeline", name: str):
        self._timeline, self.name = timeline, name

    @property
    def is_on(self) -> bool:
        """Whether anybody wants to know: what costs something to find out need not be found out."""
        return self._timeline.is_on

    def add(self, kind: str, start_s: float, end_s: float, **more: Any) -> None:
        """A span that is over. start_s, end_s: time.monotonic(). more: plain JSON values."""
        if self._timeline.is_on:
            self._timeline.put((self.name, kind, start_s, end_s - start_s, more))

    def mark(self, kind: str, **more: Any) -> None:
        """Something that takes no time, now."""
        if self._timeline.is_on:
            self._timeline.put((self.name, kind, time.monotonic(), 0.0, more))

    @contextmanager
    def span(self, kind: str, **more: Any) -> Iterator[None]:
        """What is done inside, told when it is over, however it ends."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, start_s, time.monotonic(), **more)


class Timeline:
    """Sole owner of a process's queue of spans, and of the thread that gives them on."""

    def __init__(self, most_waiting: int = MOST_WAITING):
        """Nothing is recorded before `start`."""
        self.is_on = False
        self.num_lost = 0  # spans; lower bound by a few where threads lose at the same moment
        self._spans: deque[Span] = deque()
        self._most = most_waiting
        self._give: Callable[[Sequence[Span], int], None] = lambda spans, lost: None
        self._wake, self._is_closing = threading.Event(), False
        self._asked, self._given = 0, threading.Condition()  # calls of flush; told when one is over
        self._num_given = 0  # of those calls, how many are over
        self._thread: threading.Thread | None = None

    def track(self, name: str) -> Track:
        """name: GROUP/ROW, as decode/decode.0."""
        return Track(self, name)

    def start(self, give: Callable[[Sequence[Span], int], None]) -> None:
        """Record from now on. give: on the timeline's thread, with spans and how many were lost so far; it raises
        OSError where they are lost too."""
        if self._thread is None:
            self._give, self.is_on = give, True
            self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
            self._thread.start()

    def put(self, span: Span) -> None:
        if len(self._spans) < self._most:
            self._spans.append(span)
        else:
            self.num_lost += 1

    def flush(self) -> None:
        """Give on what is there by now, from a process that may be ended at any moment; at most CLOSE_S. One thread."""
        if self._thread is None or self._is_closing:
            return
        with self._given:
            self._asked += 1
            self._wake.set()
            self._given.wait_for(lambda: self._num_given >= self._asked, CLOSE_S)

    def close(self) -> None:
        """Give on what is there; a stuck disk is left behind after CLOSE_S. Idempotent."""
        self.is_on, self._is_closing = False, True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                LOG.warning(
                    "the timeline's last %d spans are not written after %g s",
                    len(self._spans), CLOSE_S,
                )  # fmt: skip

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(FLUSH_S)
            if not self._is_closing:
                self._wake.clear()
            asked = self._asked
            self._flush()
            with self._given:
                self._num_given = asked
                self._given.notify_all()
        self._flush()

    def _flush(self) -> None:
        """At least one call, so that who gives on more than these spans can do so."""
        is_more = True
        while is_more:
            num = min(len(self._spans), MOST_PER_LINE)
            spans = [self._spans.popleft() for _ in range(num)]
            is_more = bool(self._spans)
            try:
                self._give(spans, self.num_lost)
            except Exception as error:  # boundary: spans must not cost a run
                if not self.num_lost:
                    LOG.warning(
                        "spans of the timeline are lost: %s; further ones are only counted", error
                    )
                self.num_lost += num


NONE = Timeline()  # never started: what a part has that nobody asked for spans
OFF = NONE.track("")


class Traces:
    """The driver's timeline, and the writer of one attempt's files: of its own spans, and of those that come from the
    processes that it asks."""

    def __init__(self, directory: Path | None = None, attempt: int = 0, most_bytes: int = 0):
        """directory: traces/attempt_K; None = nothing is recorded. most_bytes: of one process's file."""
        self._directory, self._attempt, self._most_bytes = directory, attempt, most_bytes
        self.timeline = Timeline()
        self._files: dict[str, _File] = {}
        self._others: deque[tuple[str, Mapping[str, Any]]] = deque()
        self._num_refused = 0  # spans that came from others and were not kept
        if directory is not None and most_bytes > 0:
            self.timeline.start(self._write)

    @property
    def is_on(self) -> bool:
        return self.timeline.is_on

    @property
    def num_lost(self) -> int:
        """Spans of this process, and of others once they were here."""
        return self.timeline.num_lost + self._num_refused

    def track(self, name: str) -> Track:
        """As Timeline.track."""
        return self.timeline.track(name)

    def other(self, process: str, line: Mapping[str, Any]) -> None:
        """A line of another process: head, s, lost, offset_s, within_s. Any thread; returns at once."""
        if self.is_on and len(self._others) < MOST_LINES:
            self._others.append((process, line))
        else:
            self._num_refused += len(line["s"])

    def other_clock(self, num: int) -> None:
        """So many spans of another process cannot be placed: nothing is known of its clock yet."""
        self._num_refused += num

    def close(self) -> None:
        """What was recorded is in the files, unless the disk is stuck."""
        self.timeline.close()

    def _write(self, spans: Sequence[Span], lost: int) -> None:
        """On the timeline's thread. Raises: OSError."""
        while self._others:
            process, line = self._others.popleft()
            rest = {key: value for key, value in line.items() if key != "head"}
            try:
                self._file(process, line["head"]).write(rest)
            except (OSError, ValueError):
                self._num_refused += len(line["s"])
        if spans:
            head = {"clock": clock_id(), "pid": os.getpid()}
            self._file(DRIVER, head).write({"s": spans, "lost": lost + self._num_refused})

    def _file(self, process: str, head: Mapping[str, Any]) -> "_File":
        if process not in self._files:
            assert self._directory is not None, "nothing is recorded without one"
            self._directory.mkdir(parents=True, exist_ok=True)
            whole = {"timeline": FORMAT, "process": process, "attempt": self._attempt, **head}
            path = self._directory / f"{process}.jsonl"
            self._files[process] = _File(path, whole, self._most_bytes)
        return self._files[process]


NO_TRACES = Traces()


class _File:
    """Lines of one process, at most so many bytes on the disk: of two halves the older one goes."""

    def __init__(self, path: Path, head: Mapping[str, Any], most_bytes: int):
        self._path, self._head, self._half = path, dict(head), most_bytes // 2
        self._num_dropped = self._in_old = self._in_new = 0  # spans
        self._size = 0
        self._file: Any = None
        self._kept: list[Span] = []

    def write(self, line: Mapping[str, Any]) -> None:
        """Raises: OSError; ValueError for what is no JSON."""
        text = json.dumps(line, separators=(",", ":"), allow_nan=False, default=float) + "\n"
        if self._file is not None and self._size + len(text) > self._half:
            self._turn()
        if self._file is None:
            self._file = open(self._path, "w", encoding="ascii")  # noqa: SIM115
            head = {**self._head, "dropped": self._num_dropped}
            self._size = self._file.write(json.dumps(head) + "\n")
            if self._kept:
                again = {**line, "s": self._kept}
                self._size += self._file.write(json.dumps(again, default=float) + "\n")
        self._size += self._file.write(text)
        self._file.flush()
        kept = [span for span in line["s"] if span[0].startswith(KEPT)]
        kept = kept[: MOST_KEPT - len(self._kept)]
        self._kept += kept
        self._in_new += len(line["s"]) - len(kept)

    def _turn(self) -> None:
        """The file becomes the older half, and what that was is gone."""
        self.close()
        os.replace(self._path, self._path.with_name(f"{self._path.stem}{OLD}.jsonl"))
        self._num_dropped += self._in_old
        self._in_old, self._in_new = self._in_new, 0

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # what a full disk refused before
                LOG.warning("%s could not be closed: %s", self._path, error)
