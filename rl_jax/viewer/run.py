"""What a run says of itself: status, config, metrics rows, events, advice; read again where it has grown.

Owns: the rows and events read so far. Invariants: rows are those of rl_jax.metrics.read_metrics: a later attempt
supersedes an earlier one from its first step on; a curve that is sent has at most so many points as were asked for, and
keeps the lowest and highest value of each stretch that it shortens; what cannot be read is a line of `faults`.
Thread-safe: one lock round reading and answering.
Must not: believe that a run lives because its status says so: it tells when the last sign of life was.
"""

import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_jax.advice import RULES, STEP, advise, spans
from rl_jax.metrics import METRICS
from rl_jax.resume import CONFIG, SUMMARY
from rl_jax.resume import METRICS as METRICS_FILE
from rl_jax.run_dir import ENV, EVENTS, STATUS
from rl_jax.viewer.lines import LineFile, read_object

MAX_EVENTS = 1000  # of a kind, the newest; more are counted
MAX_KINDS, MAX_KIND = 100, 60  # kinds told apart; characters of one
ROUTINE = ("published",)  # kinds with an event each step
MAX_ROWS = 200_000  # rows kept; the oldest go first, and are counted
REFRESH_S = 0.5  # between two looks at the files
_NUMBER = re.compile(r"(?:(?<=_lag)|(?<=_at))\d+")
FACTS = (  # of the config, for the head of the page
    "mode", "steps", "algorithm.name", "model.name", "model.source", "model.dtype", "rollout.batch_groups",
    "rollout.group_size", "rollout.max_staleness", "rollout.max_new_tokens", "engine.context", "engine.slots",
    "learner.learning_rate", "weights.kv", "cluster.backend", "seed",
)  # fmt: skip


class Run:
    """Sole reader of the run's own files."""

    def __init__(self, path: Path):
        """Raises ValueError: the directory is not there, or holds nothing of a run."""
        self.path = path
        known = (CONFIG, METRICS_FILE, STATUS, EVENTS, "rollouts", "ledger.jsonl")
        if not path.is_dir():
            raise ValueError(f"{path} is no directory; give a run directory, such as runs/NAME")
        if not any((path / name).exists() for name in known):
            raise ValueError(
                f"{path} holds nothing of a run (none of {', '.join(known)}); give the directory that --run_dir named"
            )
        self._lock = threading.RLock()
        self._rows: list[dict[str, Any]] = []
        self._events: dict[str, deque[tuple[int, dict[str, Any]]]] = {}  # kind -> (number, event)
        self._num_events: Counter[str] = Counter()
        self._num_taken = self.num_rows_left_out = 0
        self._read_s = -math.inf  # monotonic
        self._metrics = LineFile(path / METRICS_FILE, self._take_row, self._rows.clear)
        self._event_file = LineFile(path / EVENTS, self._take_event, self._no_events)
        self._objects: dict[str, tuple[dict[str, Any], str]] = {}
        self._errors: dict[str, str] = {}

    def refresh(self) -> None:
        """Read what is new, at most every REFRESH_S."""
        with self._lock:
            now = time.monotonic()
            if now - self._read_s < REFRESH_S:
                return
            self._read_s = now
            for file in (self._metrics, self._event_file):
                try:
                    file.read()
                    self._errors.pop(file.path.name, None)
                except OSError as error:
                    self._errors[file.path.name] = f"{file.path.name} cannot be read: {error}"
            for name in (STATUS, SUMMARY):
                self._objects[name] = read_object(self.path / name)
            for name in (CONFIG, ENV):
                if not self._objects.get(name, ({}, ""))[0]:
                    self._objects[name] = read_object(self.path / name)

    @property
    def config(self) -> Mapping[str, Any]:
        """Nested, as written; {} where there is none."""
        self.refresh()
        return self._objects[CONFIG][0]

    def rows(self) -> list[dict[str, Any]]:
        self.refresh()
        with self._lock:
            return list(self._rows)

    def faults(self) -> list[str]:
        """What could not be read, a line each."""
        with self._lock:
            found = [self._metrics.fault(), self._event_file.fault(), *self._errors.values()]
            found += [why for _, why in self._objects.values()]
            if self.num_rows_left_out:
                found.append(
                    f"{METRICS_FILE}: the oldest {self.num_rows_left_out} rows are left out"
                )
            return [one for one in found if one]

    def head(self) -> dict[str, Any]:
        """Status, facts of the config, summary and advice."""
        self.refresh()
        with self._lock:
            status, config = self._objects[STATUS][0], self._objects[CONFIG][0]
            steps = [row for row in self._rows if STEP in row]
            is_running = status.get("state") == "running"
            now_s = time.time()
            signs = [status.get("time"), self._rows[-1].get("time") if self._rows else None]
            seen = [float(t) for t in signs if isinstance(t, (int, float))]
            advised = advise(self._rows[-2000:], config, now_s if is_running else None)
            return {
                "name": self.path.resolve().name,
                "path": str(self.path.resolve()),
                "state": status.get("state") or "unknown",
                "status": status,
                "silent_s": max(0.0, now_s - max(seen)) if seen else None,
                "step": steps[-1]["step"] if steps else None,
                "steps_planned": config.get("steps"),
                "facts": [
                    (key, value) for key in FACTS if (value := at(config, key)) not in (None, "")
                ],
                "summary": self._objects[SUMMARY][0],
                "env": {
                    k: self._objects[ENV][0].get(k) for k in ("host", "git", "versions", "time")
                },
                "advice": [one.record() for one in advised.advice],
                "num_suppressed": advised.num_suppressed,
                "num_rows": len(self._rows),
                "attempts": 1 + max((row.get("attempt", 0) for row in self._rows), default=0),
            }

    def catalogue(self) -> list[dict[str, Any]]:
        """Families of metrics: one chart each, with its series (all, tags, lags), by area."""
        self.refresh()
        with self._lock:
            last: dict[str, float] = {}
            for row in self._rows:
                last.update((k, v) for k, v in row.items() if "/" in k)
        families: dict[str, list[str]] = {}
        for name in sorted(last, key=_order):
            families.setdefault(family(name), []).append(name)
        return [
            {
                "family": name,
                "area": name.split("/")[0],
                "meaning": METRICS.get(name, "not of this version of rl_jax"),
                "series": [{"name": one, "label": label(one), "last": last[one]} for one in series],
            }
            for name, series in families.items()
        ]

    def curves(self, names: Sequence[str], num_points: int) -> dict[str, Any]:
        """name -> {steps, values, alarms}; of a name without a value nothing."""
        rows, config, out = self.rows(), self.config, {}
        for name in names:
            points = [(row["step"], row[name]) for row in rows if is_number(row.get(name))]
            if not points:
                continue
            kept = thin(points, num_points)
            alarms = [
                [first, last, rule.name, rule.kind]
                for rule in RULES
                if rule.metric == name and rule.test != "open"
                for first, last in spans(rule, rows, name, config)
            ]
            out[name] = {
                "steps": [step for step, _ in kept],
                "values": [value for _, value in kept],
                "num": len(points),
                "alarms": alarms[-200:],
            }
        return out

    def events(self, most: int = 500, kind: str = "") -> dict[str, Any]:
        """The newest, newest first, and how many there are of each kind. kind "": of all but the ROUTINE ones."""
        self.refresh()
        with self._lock:
            kinds = [kind] if kind else [k for k in self._events if k not in ROUTINE]
            found = [one for k in kinds for one in self._events.get(k, ())]
            newest = sorted(found, key=lambda one: -one[0])[:most]
            return {
                "events": [event for _, event in newest],
                "num": sum(self._num_events.values()),
                "kinds": dict(self._num_events),
                "routine": [k for k in ROUTINE if k in self._num_events],
            }

    def last_steps(self, num: int) -> list[dict[str, Any]]:
        return [row for row in self.rows() if STEP in row][-num:]

    def _take_row(self, row: dict[str, Any]) -> None:
        if not is_number(row.get("step")):
            raise ValueError("a row without a step")
        attempt = row.get("attempt", 0)
        if self._rows and attempt > self._rows[-1].get("attempt", 0):
            self._rows[:] = [r for r in self._rows if r["step"] < row["step"]]
        self._rows.append({name: value for name, value in row.items() if is_number(value)})
        if len(self._rows) > MAX_ROWS:
            self.num_rows_left_out += len(self._rows) - MAX_ROWS
            del self._rows[:-MAX_ROWS]

    def _take_event(self, event: dict[str, Any]) -> None:
        kind = str(event.get("kind"))[:MAX_KIND]
        if kind not in self._num_events and len(self._num_events) >= MAX_KINDS:
            kind = "others"
        self._num_events[kind] += 1
        self._num_taken += 1
        held = self._events.setdefault(kind, deque(maxlen=MAX_EVENTS))
        held.append((self._num_taken, event))

    def _no_events(self) -> None:
        self._events.clear()
        self._num_events.clear()


def family(name: str) -> str:
    """The name in METRICS of a metric's name with its lag and tag."""
    return _NUMBER.sub("{n}", name.split(".")[0])


def label(name: str) -> str:
    """What tells it from others of its family."""
    base, _, tag = name.partition(".")
    numbers = " ".join(_NUMBER.findall(base))
    return " ".join(part for part in (numbers, tag) if part) or "all"


def thin(points: Sequence[tuple[int, float]], num: int) -> list[tuple[int, float]]:
    """At most about `num` points: of each stretch its lowest and its highest, in order; the last is always there."""
    if len(points) <= max(num, 4):
        return list(points)
    size = math.ceil(2 * len(points) / num)
    out: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        out += sorted(ends)
    if out[-1] != points[-1]:
        out.append(points[-1])
    return out


def at(tree: Mapping[str, Any], key: str) -> Any:
    """tree[a][b] of "a.b"; None where it is not there."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _order(name: str) -> list[Any]:
    """Lags by number."""
    return [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)]
