"""Goodput of a run: G = G_sched x G_run x G_prog x G_sample, for each pool and for all devices together.

G_sched   of the seconds that the run had its devices, those in which every pool was up
G_run     of a pool's seconds up, those in which it did what will be kept; the rest is in BUCKETS
G_prog    in those, what was done over what the devices could do at best: FLOPs of training, bytes or FLOPs of serving
G_sample  tokens that updates were made of, over tokens sampled
A run's G_run and G_prog are means over its devices: an idle device counts as a busy one does.
A factor that cannot be known (the peak of a CPU) is None, never 1, and so is its product.
Must not: read a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_jax.tools.bubbles import (
    Bubble,
    Grid,
    Interval,
    Unit,
    account,
    intersect,
    length,
    union,
    units_of,
)
from rl_jax.tools.trace_files import TRAINS, Attempt, Span

BUCKETS = (
    "init", "compile", "data", "env_wait", "reward_wait", "sync", "ckpt", "recovery",
    "wasted_after_crash", "idle",
)  # fmt: skip
BUCKET_OF = {  # cause -> bucket
    "init": "init",
    "compile": "compile",
    "batch": "data",
    "rollout": "data",
    "prefill": "data",
    "environments": "env_wait",
    "rewards": "reward_wait",
    "sync": "sync",
    "save": "ckpt",
    "pause": "idle",
    "learner": "idle",
    "evaluation": "idle",
    "records": "idle",
    "host": "idle",
    "unknown": "idle",
}


@dataclass
class PoolSeconds:
    """Device seconds of one pool, over all attempts that were looked at."""

    devices: float
    allocated_s: float = 0.0
    up_s: float = 0.0
    useful_s: float = 0.0
    buckets: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    causes: dict[str, float] = field(default_factory=dict)
    ideal_s: float = 0.0  # that the work would have taken at the devices' peak
    measured_s: float = 0.0  # that it took, of the spans of which ideal_s is known
    is_peak_known: bool = True

    @property
    def run(self) -> float | None:
        return self.useful_s / self.up_s if self.up_s else None

    @property
    def prog(self) -> float | None:
        return self.ideal_s / self.measured_s if self.is_peak_known and self.measured_s else None

    @property
    def off(self) -> float:
        """By which share useful seconds and buckets miss the seconds up."""
        total = self.useful_s + sum(self.buckets.values())
        return abs(total - self.up_s) / self.up_s if self.up_s else 0.0


@dataclass
class Goodput:
    """Of a run, or of some of its steps."""

    pools: dict[str, PoolSeconds]
    wall_s: float
    all_up_s: float  # in which every pool was
    sample: float | None
    units: list[Unit]
    bubbles: list[Bubble]

    @property
    def sched(self) -> float:
        return self.all_up_s / self.wall_s if self.wall_s else 0.0

    def factors(self, pool: str | None = None) -> dict[str, float | None]:
        """sched, run, prog, sample and their product. pool: None = all devices together."""
        of = list(self.pools.values()) if pool is None else [self.pools[pool]]
        up_s, useful_s = sum(p.up_s for p in of), sum(p.useful_s for p in of)
        progs = [(p.prog, p.useful_s) for p in of if p.useful_s]
        prog = None
        if progs and all(value is not None for value, _ in progs):
            prog = sum(value * s for value, s in progs if value is not None) / sum(
                s for _, s in progs
            )
        found = {
            "sched": self.sched,
            "run": useful_s / up_s if up_s else None,
            "prog": prog,
            "sample": self.sample,
        }
        product: float | None = 1.0
        for value in found.values():
            product = None if value is None or product is None else product * value
        return {**found, "product": product}


def goodput_of(
    attempts: Sequence[Attempt],
    rows: Sequence[Mapping[str, Any]],
    steps: tuple[int, int] | None = None,
) -> Goodput:
    """attempts: of one run, those whose devices count. rows: of metrics.jsonl, the surviving ones. steps: of the last
    attempt alone. Raises: TraceFilesError."""
    looked_at = attempts[-1:] if steps else attempts
    pools: dict[str, PoolSeconds] = {}
    units: list[Unit] = []
    wall_s = all_up_s = 0.0
    for attempt in looked_at:
        following = next((a for a in attempts if a.number > attempt.number), None)
        window = attempt.window(steps)
        grid = Grid(attempt, window)
        kept_s = _kept_until(attempt, following)
        mine = [account(unit, grid) for unit in units_of(attempt, window)]
        units += mine
        wall_s += window[1] - window[0]
        up = [window]
        for unit in mine:
            up = intersect(up, unit.up)
            pool = pools.setdefault(
                unit.pool, PoolSeconds(attempt.facts["pools"][unit.pool]["devices"])
            )
            _add(pool, unit, window, kept_s, is_again=_is_again(attempt))
            _progress(pool, unit, attempt, rows, window)
        all_up_s += length(up)
    bubbles = [bubble for unit in units for bubble in unit.bubbles or ()]
    sample = _sample(rows, steps)
    return Goodput(pools, wall_s, all_up_s, sample, units, bubbles)


def _add(pool: PoolSeconds, unit: Unit, window: Interval, kept_s: float, *, is_again: bool) -> None:
    """A unit's seconds to its pool's, times its devices."""
    assert unit.by_cause is not None, "account fills it"
    pool.allocated_s += unit.devices * (window[1] - window[0])
    pool.up_s += unit.devices * unit.up_s
    busy_s = unit.busy_s - unit.overlap_s
    lost = union((max(s.start_s, kept_s), s.end_s) for s in _useful(unit) if s.end_s > kept_s)
    lost_s = min(length(intersect(lost, unit.up)), busy_s)
    pool.useful_s += unit.devices * (busy_s - lost_s)
    pool.buckets["wasted_after_crash"] += unit.devices * lost_s
    for cause, seconds in unit.by_cause.items():
        bucket = BUCKET_OF[cause]
        if is_again and bucket in ("init", "compile"):
            bucket = "recovery"
        pool.buckets[bucket] += unit.devices * seconds
        pool.causes[cause] = pool.causes.get(cause, 0.0) + unit.devices * seconds


def _useful(unit: Unit) -> list[Span]:
    return [s for s in unit.spans if s.kind in ("block", "chunk", "transfer", "update", "score")]


def _is_again(attempt: Attempt) -> bool:
    """Whether another attempt of the same run came before it: its start is a recovery."""
    return attempt.number > 0


def _kept_until(attempt: Attempt, following: Attempt | None) -> float:
    """After it, what was done is not in the run: the next attempt went on from an earlier save."""
    if following is None or TRAINS not in (attempt.facts["mode"], following.facts["mode"]):
        return float("inf")
    resumed = [s.more["version"] for s in following.spans if s.kind == "resumed"]
    version = resumed[0] if resumed else None
    saves = [s for s in attempt.of("driver") if s.kind == "the save of version"]
    ends = [s.end_s for s in saves if s.more["number"] == version]
    return ends[-1] if ends else attempt.start_s


# --- against the devices' peak ---------------------------------------------------------------------------------------


def _progress(
    pool: PoolSeconds,
    unit: Unit,
    attempt: Attempt,
    rows: Sequence[Mapping[str, Any]],
    window: Interval,
) -> None:
    """Seconds that the unit's work took, and would take at best."""
    facts = attempt.facts
    mine = [s for s in unit.spans if s.start_s >= window[0] and s.end_s <= window[1]]
    if unit.is_server:
        server = facts["servers"][unit.name]
        for span in mine:
            if span.kind in ("block", "chunk"):
                _count(pool, unit, span, _ideal_s(span, server, facts["model"]))
    flops = {row["step"]: row["batch/tflops"] * 1e12 for row in rows if "batch/tflops" in row}
    for span in mine:
        if span.kind == "update" and span.more["model"] == "policy":
            done, peak = flops.get(span.more["version"] + 1), facts["train"]["peak_flops"]
            if done is not None and _is_of_loop(span, attempt):
                _count(pool, unit, span, None if peak is None else done / peak)


def _count(pool: PoolSeconds, unit: Unit, span: Span, ideal_s: float | None) -> None:
    if ideal_s is None:
        pool.is_peak_known = False
        return
    pool.ideal_s += unit.devices * ideal_s
    pool.measured_s += unit.devices * (span.end_s - span.start_s)


def _is_of_loop(span: Span, attempt: Attempt) -> bool:
    """An update of a warm start is none of a step's."""
    first = min((s.start_s for s in attempt.steps().values()), default=float("inf"))
    return span.start_s >= first


def _ideal_s(span: Span, server: Mapping[str, Any], model: Mapping[str, Any]) -> float | None:
    """A block: a step reads the weights and the KV of every request once; a chunk: its FLOPs, or the weights once."""
    peak_flops, peak_bytes = server["peak_flops"], server["peak_bytes"]
    if peak_flops is None or peak_bytes is None:
        return None
    tokens, weight_bytes = span.more["tokens"], server["weight_bytes"]
    if span.kind == "chunk":
        flops = tokens * model["flops_token"] + span.more["pairs"] * model["flops_pair"]
        return max(flops / peak_flops, weight_bytes / peak_bytes)
    num_steps = tokens / max(span.more["running"], 1)
    num_bytes = num_steps * (weight_bytes + span.more["context"] * model["kv_bytes"])
    return max(num_bytes / peak_bytes, tokens * model["flops_token"] / peak_flops)


def _sample(rows: Sequence[Mapping[str, Any]], steps: tuple[int, int] | None) -> float | None:
    """Trained tokens over sampled ones, since the process started; of a range of steps, of these alone."""
    if steps is None:
        told = [row["goodput/sample"] for row in rows if "goodput/sample" in row]
        return told[-1] if told else None
    inside = [r for r in rows if steps[0] <= r["step"] <= steps[1]]
    sampled = sum(r.get("serve/decode_tokens", 0.0) for r in inside)
    trained = sum(
        r.get("batch/trained_tokens", 0.0) for r in inside if not r.get("optim/skipped", 0.0)
    )
    return min(trained / sampled, 1.0) if sampled else None
