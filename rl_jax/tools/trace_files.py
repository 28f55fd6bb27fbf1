"""What a run left of its timeline, read back: the spans of every process of an attempt, on the driver's clock.

Owns: the reading of traces/attempt_K (rl_jax/timeline.py writes it), and of what the ledger knows of the same seconds.
A line that cannot be read is counted and left out: a process may have died in it.
Must not: write, or import jax.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rl_jax.timeline import DRIVER, FORMAT, KEPT, OLD

TRACES = "traces"
TRAINS = "train"  # the mode whose attempts follow each other


class TraceFilesError(ValueError):
    """There is no timeline that could be read; one line that says why."""


class Span(NamedTuple):
    """Seconds of the driver's monotonic clock."""

    track: str  # GROUP/ROW
    kind: str
    start_s: float
    end_s: float
    more: Mapping[str, Any]
    process: str

    @property
    def group(self) -> str:
        return self.track.partition("/")[0]

    @property
    def row(self) -> str:
        return self.track.partition("/")[2] or self.group


@dataclass
class Attempt:
    """One process of the driver, and those that it asked."""

    number: int
    spans: list[Span]
    facts: Mapping[str, Any]  # rl_jax/pool_facts.py
    num_lost: int = 0  # spans that a process could not give on
    num_dropped: int = 0  # that went with the older half of a file
    num_bad: int = 0  # lines that cannot be read
    cut: frozenset[str] = frozenset()  # processes of whose files the older half went
    within_s: float = 0.0  # how far off the clock of another host may be
    start_s: float = field(init=False)
    end_s: float = field(init=False)

    def __post_init__(self):
        self.spans.sort(key=lambda span: span.start_s)
        self.start_s = self.spans[0].start_s
        self.end_s = max(span.end_s for span in self.spans)
        for process in self.cut:  # before its first span nothing is known of it any more
            own = (s for s in self.spans if s.process == process and not s.track.startswith(KEPT))
            if (first := next(own, None)) is not None:
                self.start_s = max(self.start_s, first.start_s)

    def of(self, group: str) -> list[Span]:
        """The spans of a group, in order of their begin."""
        return [span for span in self.spans if span.group == group]

    def steps(self) -> dict[int, Span]:
        """The driver's steps that were done."""
        done = [s for s in self.spans if s.track == "driver/steps" and s.kind == "time/step_s"]
        return {span.more["step"]: span for span in done}

    def window(self, steps: tuple[int, int] | None) -> tuple[float, float]:
        """Seconds of steps A to B, from the begin of A to the begin of what follows B; None: of all.

        Raises: TraceFilesError where none of them was done here."""
        if steps is None:
            return self.start_s, self.end_s
        done = self.steps()
        inside = sorted(step for step in done if steps[0] <= step <= steps[1])
        if not inside:
            known = f"it has {min(done)} to {max(done)}" if done else "it has none"
            raise TraceFilesError(
                f"attempt {self.number} did none of the steps {steps[0]}:{steps[1]}; {known}"
            )
        after = done.get(inside[-1] + 1)
        return done[inside[0]].start_s, (after.start_s if after else done[inside[-1]].end_s)


def read_attempts(run: Path) -> list[Attempt]:
    """All that have a timeline, in order. Raises: TraceFilesError."""
    found = sorted(
        (int(m[1]), path)
        for path in (run / TRACES).glob("attempt_*")
        if (m := re.fullmatch(r"attempt_(\d+)", path.name))
    )
    attempts = [_attempt(number, path) for number, path in found]
    kept = [attempt for attempt in attempts if attempt is not None]
    if not kept:
        raise TraceFilesError(
            f"{run} has no timeline (no spans in {TRACES}/attempt_K): it is another directory, or its run had"
            " metrics.timeline_bytes=0"
        )
    return kept


def _attempt(number: int, path: Path) -> Attempt | None:
    spans: list[Span] = []
    lost, dropped, bad, within_s = 0, 0, 0, 0.0
    cut: set[str] = set()
    for file in sorted(path.glob("*.jsonl")):
        process = file.stem.removesuffix(OLD)
        is_old, told = file.stem.endswith(OLD), 0
        for line in _lines(file):
            if line is None:
                bad += 1
            elif "timeline" in line:
                if line["timeline"] != FORMAT:
                    raise TraceFilesError(
                        f"{file} is of format {line['timeline']}, this program reads {FORMAT}"
                    )
                dropped += 0 if is_old else line["dropped"]
                cut |= {process} if line["dropped"] else set()
            else:
                offset_s, told = line.get("offset_s", 0.0), line["lost"]
                within_s = max(within_s, line.get("within_s", 0.0))
                spans += [
                    Span(
                        track, kind, start_s + offset_s, start_s + offset_s + seconds, more, process
                    )
                    for track, kind, start_s, seconds, more in line["s"]
                ]
        lost += 0 if is_old else told
    spans = list({(s.process, s.track, s.kind, s.start_s): s for s in spans}.values())
    facts = next((s.more for s in spans if s.kind == "pools" and s.process == DRIVER), None)
    if not spans or facts is None:
        return None
    for span in spans:
        if span.kind == "peaks":  # of devices that only their own process sees
            told = {key: span.more[key] for key in ("peak_flops", "peak_bytes")}
            whose = (
                facts["train"] if span.more["of"] == "train" else facts["servers"][span.more["of"]]
            )
            whose |= told
    return Attempt(number, spans, facts, lost, dropped, bad, frozenset(cut), within_s)


def _lines(file: Path) -> Iterator[dict[str, Any] | None]:
    """None for a line that is no object."""
    with open(file, "rb") as lines:
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            yield line if isinstance(line, dict) else None


@dataclass
class Episode:
    """As the ledger tells it, in seconds of the driver's clock; None = it did not come so far."""

    session: str  # uid#attempt
    tag: str
    issued_s: float
    running_s: float | None = None
    scored_s: float | None = None
    state: str = "ISSUED"
    step: int | None = None  # that trained it


def read_episodes(run: Path, attempt: Attempt, following: Attempt | None) -> list[Episode]:
    """Of this attempt. following: the next one with a timeline."""
    marks = [_seq(a) for a in (attempt, following)]
    path = run / "ledger.jsonl"
    if marks[0] is None or not path.exists():
        return []
    episodes: dict[str, Episode] = {}
    for record in _lines(path):
        if record is None or "uid" not in record:
            continue
        if record["seq"] < marks[0] or (marks[1] is not None and record["seq"] >= marks[1]):
            continue
        session, at_s, state = (
            f"{record['uid']}#{record['attempt']}",
            record["t_mono_s"],
            record["state"],
        )
        if state == "ISSUED":
            episodes[session] = Episode(session, record["tag"], at_s)
        if (episode := episodes.get(session)) is None:
            continue  # it was issued before
        episode.state = state
        if state == "RUNNING":
            episode.running_s = at_s
        elif episode.scored_s is None and state != "ISSUED":
            episode.scored_s = at_s
        if state == "TRAINED":
            episode.step = record["step"]
    return list(episodes.values())


def _seq(attempt: Attempt | None) -> int | None:
    """The number of the first record of the ledger that is the attempt's."""
    if attempt is None:
        return None
    marks = [s for s in attempt.spans if s.track == "run/facts" and s.kind == "ledger"]
    return marks[0].more["seq"] if marks else None
