"""Where the seconds of each pool went: busy, or a bubble that waited for something that has a name.

Owns: the units that are accounted for (each server, and a train mesh that no server shares), their seconds by cause,
and their bubbles. Works on spans alone (trace_files.py).
How a gap of a unit gets its cause: what the unit's own spans say (a swap, a compile, the host's work between two
blocks) is that; else what episodes and the driver did meanwhile. While a train mesh waits for a batch, or a server for
requests, the seconds go to environments, scorers, prefill and (a train mesh's) rollout in proportion to how many
episodes were there at that moment: an environment's calls with those queued behind, scorers' calls, requests of blocks.
Where none was anywhere, it is what the driver was at: a server waits for the learner, a sync, a save.
Invariants: the seconds of a unit's causes and its busy seconds are those of the window, each second once.
Must not: read a file, or know what a bucket is (goodput.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rl_jax.tools.trace_files import Attempt, Span

USEFUL = ("block", "chunk", "transfer", "update", "score")
# Causes of bubbles, in the order of legends.
CAUSES = (
    "init", "compile", "batch", "rollout", "prefill", "environments", "rewards", "learner", "sync",
    "save", "pause", "evaluation", "records", "host", "unknown",
)  # fmt: skip
LEAST_S = 1e-3  # a shorter bubble is in the sums and in no list
PAUSE = "a pause before step"  # with the step and who asked for it behind
PHASES = {  # of the driver, what it does -> cause; the first that holds counts
    PAUSE: "pause",
    "the sync of version": "sync",
    "time/sync_s": "sync",
    "the save of version": "save",
    "the update of step": "learner",
    "the figures and traces of step": "records",
    "the ledger's records of step": "records",
    "the profile": "records",
    "time/train_s": "learner",
    "time/batch_s": "batch",
    "the rows of step": "batch",
    "evaluation": "evaluation",
    "warm start": "init",
    "scripted episodes": "init",
    "servers": "init",
    "the weights of the start": "init",
    "reference": "init",
}
Interval = tuple[float, float]


class Bubble(NamedTuple):
    unit: str
    start_s: float
    end_s: float
    shares: Mapping[str, float]  # cause -> of its seconds; they add up to 1

    @property
    def cause(self) -> str:
        """The largest."""
        return max(self.shares, key=lambda cause: self.shares[cause])


@dataclass
class Unit:
    """A server with its devices, or the train mesh, or both where they share them."""

    name: str
    pool: str
    devices: float
    is_server: bool
    spans: list[Span]  # of it, all kinds, within the window
    up: list[Interval]
    busy_s: float = 0.0  # as its spans say it, one by one
    overlap_s: float = 0.0  # of these, those in which two were under way
    by_cause: dict[str, float] | None = None
    bubbles: list[Bubble] | None = None

    @property
    def up_s(self) -> float:
        return length(self.up)

    @property
    def off(self) -> float:
        """By which share of its seconds up the sum of busy ones and bubbles differs from them."""
        assert self.by_cause is not None, "account fills it"
        total = self.busy_s - self.overlap_s + sum(self.by_cause.values())
        return abs(total - self.up_s) / self.up_s if self.up_s else 0.0


# --- intervals: sorted, disjoint -------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        elif end > start:
            out.append((start, end))
    return out


def subtract(whole: Sequence[Interval], parts: Sequence[Interval]) -> list[Interval]:
    """Both sorted and disjoint."""
    out, at = [], 0
    for start, end in whole:
        while at < len(parts) and parts[at][1] <= start:
            at += 1
        i = at
        while i < len(parts) and parts[i][0] < end:
            if parts[i][0] > start:
                out.append((start, parts[i][0]))
            start = max(start, parts[i][1])
            i += 1
        if start < end:
            out.append((start, end))
    return out


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    return subtract(one, subtract(one, other))


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


# --- what was going on -----------------------------------------------------------------------------------------------


def phase_of(span: Span) -> str:
    """What the driver was at, as PHASES has it."""
    return PAUSE if span.kind.startswith(PAUSE) else span.kind


class Grid:
    """The window cut wherever anything began or ended; what was going on in each cell."""

    def __init__(self, attempt: Attempt, window: Interval):
        self.window = window
        groups = {name: attempt.of(name) for name in ("env", "reward", "decode", "prefill")}
        driver = {k: [s for s in attempt.of("driver") if phase_of(s) == k] for k in PHASES}
        every = [span for spans in (*groups.values(), *driver.values()) for span in spans]
        cuts = [t for span in every for t in (span.start_s, span.end_s)]
        self.times = np.unique(np.clip(np.array([*window, *cuts]), *window))
        blocks = [s for s in groups["decode"] if s.kind == "block"]
        moved = [
            s for g in ("decode", "prefill") for s in groups[g] if s.kind in ("chunk", "transfer")
        ]
        waits = [s for s in attempt.of("driver") if s.kind == "time/wait_for_batch_s"]
        laps = [s.start_s for s in (*waits, *driver["time/batch_s"])]
        self._begin_s = min(laps, default=window[1])  # of the loop
        doing = self._driver(driver)
        has_begun = doing["init"] == 0  # scripts, too, keep environments busy
        queued = [1 + s.more.get("queued", 0) for s in groups["env"]]
        going_on = {
            "environments": has_begun * self._level(groups["env"], queued),
            "rewards": has_begun * self._level(groups["reward"]),
            "prefill": has_begun * self._level(moved),
        }
        rollout = has_begun * self._level(blocks, [s.more["running"] for s in blocks])
        is_waiting = self._level(waits) > 0
        # What the driver does for an update, beside the update, is a batch's to the mesh that waits for it.
        own = {**doing, "batch": doing["batch"] + doing["learner"], "learner": 0 * doing["learner"]}
        by_episodes = _shares({**going_on, "rollout": rollout}, own)
        self._of_train = self._sums(
            {c: np.where(is_waiting, by_episodes[c], own[c]) for c in CAUSES}
        )
        self._of_server = self._sums(_shares(going_on, doing))

    def causes(self, gaps: Sequence[Interval], is_server: bool) -> list[dict[str, float]]:
        """Seconds by cause of each; those above 0, which add up to the gap's."""
        sums = self._of_server if is_server else self._of_train
        at = np.array(gaps, float).reshape(-1, 2)
        found = {c: np.diff(np.interp(at, self.times, total))[:, 0] for c, total in sums.items()}
        return [{c: float(s[i]) for c, s in found.items() if s[i] > 0} for i in range(len(at))]

    def _level(self, spans: Sequence[Span], weights: Sequence[float] | None = None) -> np.ndarray:
        """f64[cells]: the sum of the weights of the spans that cover it."""
        step = np.zeros(len(self.times))
        w = np.ones(len(spans)) if weights is None else np.array(weights, float)
        for ends, sign in (([s.start_s for s in spans], 1.0), ([s.end_s for s in spans], -1.0)):
            at = np.searchsorted(self.times, np.clip(np.array(ends, float), *self.window))
            np.add.at(step, at, sign * w)
        return np.round(np.cumsum(step)[:-1], 9)

    def _driver(self, driver: Mapping[str, Sequence[Span]]) -> dict[str, np.ndarray]:
        """cause -> 1.0 in the cells in which the driver was at it, else 0."""
        out = {cause: np.zeros(len(self.times) - 1) for cause in CAUSES}
        free = np.ones(len(self.times) - 1)
        for phase, cause in PHASES.items():
            now = free * (self._level(driver[phase]) > 0)
            out[cause] += now
            free -= now
        is_early = self.times[:-1] < self._begin_s
        out["init"] += free * is_early
        out["unknown"] += free * ~is_early
        return out

    def _sums(self, shares: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """cause -> its seconds up to each time."""
        cells = np.diff(self.times)
        return {c: np.concatenate([[0.0], np.cumsum(cells * share)]) for c, share in shares.items()}


def _shares(
    going_on: Mapping[str, np.ndarray], otherwise: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """By how much goes on of each; where nothing does, `otherwise`."""
    total = np.sum(list(going_on.values()), axis=0)
    some = np.where(total > 0, total, 1.0)
    return {
        cause: np.where(total > 0, going_on.get(cause, 0.0) / some, otherwise[cause])
        for cause in CAUSES
    }


# --- units -----------------------------------------------------------------------------------------------------------


def units_of(attempt: Attempt, window: Interval) -> list[Unit]:
    """Of all pools, servers first."""
    out = []
    rows: dict[str, list[Span]] = {}
    for span in attempt.spans:
        if (
            span.group in ("prefill", "decode")
            and span.end_s > window[0]
            and span.start_s < window[1]
        ):
            rows.setdefault(span.row, []).append(span)
    train = _train_spans(attempt, window)
    for pool, facts in attempt.facts["pools"].items():
        names, num = facts["servers"], facts["devices"]
        own = train if facts["trains"] else []
        for name in names:
            up = _up(attempt, [name], window)
            out.append(Unit(name, pool, num / len(names), True, rows.get(name, []) + own, up))
        if facts["trains"] and not names:
            learners = sorted({s.row for s in attempt.of("life") if s.row.startswith("learner.")})
            out.append(Unit(pool, pool, num, False, own, _up(attempt, learners, window)))
    return out


def account(unit: Unit, grid: Grid) -> Unit:
    """Fill in the unit's seconds and bubbles."""
    clip = lambda kinds: [
        (max(s.start_s, a), min(s.end_s, b))
        for s in unit.spans
        if s.kind in kinds
        for a, b in unit.up
        if s.end_s > a and s.start_s < b
    ]
    compiles = union(clip(("compile", "trace", "lower")))
    # A train step's own compile is none of its use; a server compiles before it serves.
    raw = clip(USEFUL)
    busy = subtract(union(raw), compiles)
    unit.overlap_s = length(raw) - length(union(raw))
    unit.busy_s = length(busy) + unit.overlap_s
    gaps = subtract(unit.up, busy)
    own = {"compile": intersect(gaps, compiles)}
    left = subtract(gaps, compiles)
    own["sync"] = intersect(left, union(clip(("swap",))))
    left = subtract(left, own["sync"])
    if unit.is_server:
        begun = [s.start_s for s in unit.spans if s.kind in ("wait", "block", "chunk")]
        served = [(min(begun), unit.up[-1][1])] if begun and unit.up else []
        waits = intersect(left, union(clip(("wait",))))
        own["init"] = subtract(left, served)
        own["host"] = subtract(subtract(left, waits), own["init"])
        left = subtract(waits, own["init"])
    by_cause = {cause: length(intervals) for cause, intervals in own.items()}
    unit.bubbles = []
    found = [(gap, {cause: 1.0}) for cause, gaps_of in own.items() for gap in gaps_of]
    for gap, seconds in zip(left, grid.causes(left, unit.is_server), strict=True):
        for cause, spent in seconds.items():
            by_cause[cause] = by_cause.get(cause, 0.0) + spent
        total = sum(seconds.values())
        found.append((gap, {cause: spent / total for cause, spent in seconds.items()}))
    unit.by_cause = {cause: by_cause[cause] for cause in CAUSES if by_cause.get(cause)}
    unit.bubbles = _joined(unit.name, sorted(found, key=lambda one: one[0]))
    return unit


def _joined(name: str, found: Sequence[tuple[Interval, Mapping[str, float]]]) -> list[Bubble]:
    """Gaps that touch, as one bubble where their causes are the same one."""
    out: list[Bubble] = []
    for (start, end), shares in found:
        last = out[-1] if out else None
        if (
            last
            and start - last.end_s < 1e-9
            and len(shares) == 1
            and last.shares.keys() == shares.keys()
        ):
            out[-1] = last._replace(end_s=end)
        elif shares:
            out.append(Bubble(name, start, end, shares))
    return [bubble for bubble in out if bubble.end_s - bubble.start_s >= LEAST_S]


def _train_spans(attempt: Attempt, window: Interval) -> list[Span]:
    """Of the learner, with what its thread compiled; of several processes the first one's: they work in step."""
    rows = sorted({span.row for span in attempt.of("train")})
    own = [s for s in attempt.of("train") if s.row == rows[0]] if rows else []
    processes = {span.process for span in own}
    compiled = [
        s for s in attempt.of("compile") if s.row == "MainThread" and s.process in processes
    ]
    return [s for s in (*own, *compiled) if s.end_s > window[0] and s.start_s < window[1]]


def _up(attempt: Attempt, names: Sequence[str], window: Interval) -> list[Interval]:
    """When all of these lived: a thread of the driver's until it died, a process while it was there."""
    up = [window]
    for name in names:
        dead = [s.start_s for s in attempt.spans if s.kind == "dead" and s.row == name]
        lives = [s for s in attempt.of("life") if s.row == name]
        alive = [(window[0], min(dead, default=window[1]))]
        if lives:
            ended = {s.start_s: s.end_s for s in lives if s.kind == "up"}
            begun = [s.start_s for s in lives if s.kind == "started"]
            alive = [(at, _end_of(at, ended, window[1])) for at in begun]
        up = intersect(up, union((max(a, window[0]), min(b, window[1])) for a, b in alive))
    return up


def _end_of(begun_s: float, ended: Mapping[float, float], last_s: float) -> float:
    """Of the life that began then; one without an end goes on to the last second."""
    near = [end for start, end in ended.items() if abs(start - begun_s) < 0.1]
    return near[0] if near else last_s
