"""Metrics as (sum, count, min, max), the one table of their names, the metrics file, and the lines a person watches.

Owns: `Metric`, `METRICS`, `MetricsWriter` (sole writer of metrics.jsonl), `Progress` (sole writer of the console).
Invariants: a mean is divided once, here, at the very end; what was not measured is absent, never 0; a value that is not
finite is dropped and counted, so that every line of metrics.jsonl is valid JSON; nothing here can stop training: a full
disk or a closed terminal costs rows, which are counted.
Life of a number: 1 a part returns a Metric (or (sum, count) from inside jit). 2 Whoever holds several merges them.
3 The driver's recorder hands one row a step to MetricsWriter and to Progress.
Must not: know a part, or wait for one (the heartbeat asks a callable what is awaited).
"""

import json
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

LOG = logging.getLogger(__name__)
PROGRESS_FORMS = ("auto", "plain", "json", "none")

# name -> one-line meaning. A name may end in ".x": one task tag, evaluation or reason. lag{n}: n = consuming version
# minus the version that sampled the token; pure or mixed: whether all KV behind the token was of that version.
METRICS = {
    "reward/mean": "reward of the trained trajectories",
    "reward/std": "standard deviation of the reward over trajectories",
    "reward/success": "share of trained trajectories whose reward is 1",
    "reward/zero_std_groups": "share of groups whose rewards are all equal (no gradient from them)",
    "eval/success": "share of evaluation episodes whose reward is 1",
    "eval/episodes": "evaluation episodes that were scored",
    "policy/entropy": "entropy of the policy in nats a trained token",
    "policy/loss": "the loss that was minimised, over the global count",
    "policy/clip_frac": "share of trained tokens whose ratio was clipped",
    "policy/ratio": "probability ratio to the behaviour policy, a trained token",
    "policy/kl": "k3 estimate of the KL to the reference policy, a trained token",
    "policy/advantage": "advantage a trained token; about 0 by construction",
    "optim/grad_norm": "global gradient norm before clipping",
    "optim/learning_rate": "learning rate of the update",
    "optim/skipped": "updates skipped because loss or gradient was not finite",
    "sft/loss": "cross-entropy in nats a script token of a warm-start step",
    "mismatch/abs_mean": "mean |trainer log-prob - sampler log-prob| a trained token, all lags",
    "mismatch/abs_max": "largest |trainer log-prob - sampler log-prob| of any trained token",
    "mismatch/abs_p99": "99th percentile of the same",
    "mismatch/k1": "mean(log p_sampler - log p_trainer): KL(sampler || trainer), unbiased and noisy",
    "mismatch/k3": "mean(rho - log rho - 1), rho = p_trainer / p_sampler: the same KL with less noise",
    "mismatch/abs_mean_lag{n}_pure": "the mean at one lag, KV of the token's own version only",
    "mismatch/abs_mean_lag{n}_mixed": "the mean at one lag, some KV of another version",
    "mismatch/k3_lag{n}_pure": "k3 at one lag, pure",
    "mismatch/k3_lag{n}_mixed": "k3 at one lag, mixed",
    "is/ess": "effective sample size of the importance weights over their number",
    "is/rejected": "share of trained tokens that algorithm.correction takes out of the loss",
    "is/weight": "importance weight of algorithm.correction, a trained token",
    "staleness/mean": "consuming version minus the version of a trained token",
    "staleness/max": "the largest of them",
    "length/response": "sampled tokens of a trained trajectory",
    "length/response_p90": "90th percentile of them",
    "length/turns": "turns of a trained trajectory",
    "length/truncated": "share of trained trajectories that were cut, whatever the reason",
    "finish/stop": "share of turns that ended at a stop token",
    "finish/eos": "share of turns that ended at the end-of-turn or end-of-text token",
    "finish/length": "share of turns cut at rollout.max_new_tokens",
    "finish/context": "share of turns cut at engine.context",
    "finish/abort": "share of turns aborted",
    "batch/trajectories": "trajectories of the step",
    "batch/tokens": "tokens of the step, prompts and observations included",
    "batch/trained_tokens": "tokens of the step with a loss",
    "batch/fill": "share of the packed rows' positions that hold a token",
    "time/step_s": "seconds of a driver step",
    "time/wait_for_batch_s": "seconds the driver waited for groups",
    "time/wait_for_policy_s": "seconds rollout could start nothing because of the staleness bound",
    "time/batch_s": "seconds of packing, scoring and advantages",
    "time/train_s": "seconds of the learner's step",
    "time/sync_s": "seconds of the weight sync, all phases",
    "time/eval_s": "seconds of an evaluation",
    "sync/stage_s": "seconds of resharding, copying and verifying weights while generation went on",
    "sync/pause_s": "longest pause of any server at the swap",
    "sync/bytes": "bytes staged on all servers",
    "perf/decode_tokens_per_s": "sampled tokens of all servers a second of the step",
    "perf/train_tokens_per_s": "tokens of the batch a second of the learner's step",
    "perf/prefill_tokens_per_s": "tokens whose KV was computed from a prompt, a second of the step",
    "serve/prefill_tokens": "prompt tokens computed by prefill, in the step",
    "serve/append_tokens": "observation tokens appended to live histories, in the step",
    "serve/recompute_tokens": "tokens whose KV was rebuilt after a swap, in the step",
    "serve/decode_tokens": "tokens sampled, in the step",
    "episodes/issued": "attempts issued since the start of the run",
    "episodes/completed": "of these, ended by their environment and scored",
    "episodes/truncated": "of these, cut (.length, .context, .turn_limit, .tool_limit) and scored",
    "episodes/in_flight": "episodes issued and not ended",
    "episodes/buffered": "episodes of complete groups that wait to be consumed",
    "episodes/trained": "episodes trained since the start of the run",
    "episodes/evaluated": "episodes evaluated since the start of the run",
    "episodes/errored": "episodes that ended in a failure of environment, reward or server",
    "episodes/cancelled": "episodes cancelled, with a reason in the ledger",
    "episodes/dropped": "episodes dropped, with a reason in the ledger",
    "episodes/dropped_stale": "of these, older than rollout.max_staleness",
    "episodes/dropped_filtered": "of these, not selected by the algorithm",
    "episodes/dropped_short": "of these, members of a group that could not be completed",
    "episodes/retried": "attempts after the first",
    "episodes/cut_observations": "observations longer than rollout.max_obs_bytes, cut and marked",
    "goodput/run": "share of the step in which the learner computed",
    "goodput/sample": "trained tokens over sampled tokens, since the start of the run",
}

_LAG = re.compile(r"(?<=lag)\d+")


def unknown_names(names: Iterable[str]) -> tuple[str, ...]:
    """Those that are not of the METRICS table, tag suffix and lag number aside."""
    return tuple(n for n in names if _LAG.sub("{n}", n.split(".")[0]) not in METRICS)


@dataclass(frozen=True)
class Metric:
    """A sum over `count` things, with the extremes where they were recorded."""

    sum: float
    count: float
    min: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Metric":
        values = [float(v) for v in values]
        if not values:
            return cls(0.0, 0)
        return cls(math.fsum(values), len(values), min(values), max(values))

    @property
    def mean(self) -> float | None:
        """None if nothing was counted: missing is not 0."""
        return float(self.sum) / float(self.count) if self.count else None

    def merge(self, other: "Metric") -> "Metric":
        """Of both samples together; an extreme that neither side recorded stays unrecorded."""
        lows = [m.min for m in (self, other) if m.min is not None]
        highs = [m.max for m in (self, other) if m.max is not None]
        return Metric(
            self.sum + other.sum,
            self.count + other.count,
            min(lows, default=None),
            max(highs, default=None),
        )


Row = Mapping[str, Metric | float | int | None]


def merge_rows(rows: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metric by metric, over the rows that have it."""
    merged: dict[str, Metric] = {}
    for row in rows:
        for name, metric in row.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def values_of(row: Row) -> tuple[dict[str, float], int]:
    """(name -> finite number, how many were dropped because they are not finite); unmeasured ones are absent."""
    values, num_dropped = {}, 0
    for name, metric in row.items():
        value = metric.mean if isinstance(metric, Metric) else metric
        if value is None:
            continue
        if math.isfinite(value):
            values[name] = value if isinstance(value, int) else float(value)
        else:
            num_dropped += 1
    return values, num_dropped


class MetricsWriter:
    """Sole writer of <run>/metrics.jsonl: one row a step, {"step", "time", "attempt", name: number, ...}."""

    def __init__(self, run_dir: Path | str, attempt: int = 0, strict: bool = False):
        """`strict` raises on a name outside METRICS; else it is written and warned about once."""
        self.num_nonfinite = self.num_lost = 0
        self._attempt, self._strict = attempt, strict
        self._warned: set[str] = set()
        self._file = open(Path(run_dir) / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def write(self, step: int, row: Row) -> None:
        """Raises ValueError only if strict."""
        if unknown := [n for n in unknown_names(row) if n not in self._warned]:
            message = f"metric names outside rl_jax/metrics.py METRICS: {', '.join(unknown)}; add them there"
            if self._strict:
                raise ValueError(message)
            self._warn_once(unknown, message)
        values, num_dropped = values_of(row)
        if num_dropped:
            self.num_nonfinite += num_dropped
            bad = sorted(set(row) - set(values))
            self._warn_once(
                ["nonfinite"], f"step {step}: values that are not finite were dropped: {bad}"
            )
        head = {"step": step, "time": round(time.time(), 3), "attempt": self._attempt}
        if self.num_nonfinite:
            head["nonfinite_dropped"] = self.num_nonfinite
        try:
            self._file.write(json.dumps({**head, **values}, allow_nan=False) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:  # full disk, closed file: training is worth more
            self.num_lost += 1
            self._warn_once(
                ["lost"], f"a row of metrics.jsonl was lost ({error}); counted in num_lost"
            )

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._warn_once(["lost"], f"metrics.jsonl could not be closed: {error}")

    def _warn_once(self, keys: Iterable[str], message: str) -> None:
        if not self._warned.issuperset(keys):
            self._warned.update(keys)
            LOG.warning(message)


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """The surviving rows of metrics.jsonl by step: a later attempt supersedes an earlier one from its first step on."""
    rows: list[dict[str, Any]] = []
    for line in (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a killed process
            continue
        if rows and row["attempt"] > rows[-1]["attempt"]:
            rows = [r for r in rows if r["step"] < row["step"]]
        rows.append(row)
    return rows


# --- what a person watches -----------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """9.3 s, 4m08s, 2h05m."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _short(value: float) -> str:
    """1234 -> 1.2k; three significant digits."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def format_step(step: int, total: int, row: Row, eta_s: float | None) -> str:
    """The one line of a step: what was not measured is left out."""
    values, _ = values_of(row)

    def reward(suffix: str) -> str:
        text = f"{values[f'reward/mean{suffix}']:.3f}"
        metric, std = row[f"reward/mean{suffix}"], values.get(f"reward/std{suffix}")
        if isinstance(metric, Metric) and std is not None:
            text += f"+-{std / math.sqrt(metric.count):.3f}"
        if (success := values.get(f"reward/success{suffix}")) is not None:
            text += f" ok {success:.0%}"
        return text

    def number(label: str, *names: str, form: Callable[[float], str] = _short) -> str | None:
        found = [form(values[n]) for n in names if n in values]
        return f"{label} {'/'.join(found)}" if found else None

    parts = [f"step {step:>{len(str(total))}}/{total}"]
    if "reward/mean" in values:
        parts.append(f"reward {reward('')}")
    tags = sorted(n[len("reward/mean") :] for n in values if n.startswith("reward/mean."))
    if len(tags) > 1:
        parts += [f"{tag[1:]} {reward(tag)}" for tag in tags]
    wait = None
    if values.get("time/step_s"):
        wait = values.get("time/wait_for_batch_s", 0.0) / values["time/step_s"]
    parts += [
        number("tok/s decode", "perf/decode_tokens_per_s"),
        number("train", "perf/train_tokens_per_s"),
        number("stale", "staleness/mean", "staleness/max"),
        f"wait {wait:.0%}" if wait is not None else None,
        number("entropy", "policy/entropy"),
        number("grad", "optim/grad_norm"),
        number("mismatch", "mismatch/abs_mean", form=lambda v: f"{v:.1e}"),
        number("skipped", "optim/skipped") if values.get("optim/skipped") else None,
        number("step", "time/step_s", form=duration),
        f"eta {duration(eta_s)}" if eta_s is not None else None,
    ]
    return "  ".join(part for part in parts if part)


class Progress:
    """Sole writer of the console. Lines also go to the "rl_jax" logger, so that the run's log file holds them.

    form: auto (plain), plain, json (one object a line), none (the log only). Thread-safe.
    """

    def __init__(
        self,
        total_steps: int,
        form: str = "auto",
        heartbeat_s: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if form not in PROGRESS_FORMS:
            raise ValueError(f"progress form {form!r} is not one of {', '.join(PROGRESS_FORMS)}")
        self.total_steps, self.heartbeat_s = total_steps, heartbeat_s
        self._form = "plain" if form == "auto" else form
        self._stream, self._clock = stream if stream is not None else sys.stdout, clock
        self._lock = threading.Lock()
        self._last_line_s = self._clock()
        self._first_step: tuple[int, float] | None = None
        self._step = 0
        self._beat: threading.Thread | None = None
        self._closing = threading.Event()

    def note(self, text: str, **fields: Any) -> None:
        """One line that is not a step; `fields` appear in the json form only."""
        self._print("note", text, fields)

    def step(self, step: int, row: Row) -> None:
        """The line of a finished step; the time left is estimated from the steps since the first."""
        now, self._step = self._clock(), step
        eta = None
        if self._first_step is None:
            self._first_step = (step, now)
        elif step > self._first_step[0]:
            pace = (now - self._first_step[1]) / (step - self._first_step[0])
            eta = pace * (self.total_steps - step)
        fields = {"step": step, "total": self.total_steps, "eta_s": eta, **values_of(row)[0]}
        self._print("step", format_step(step, self.total_steps, row, eta), fields)

    @contextmanager
    def phase(self, name: str, why: str = "") -> Generator[None, None, None]:
        """A stretch of work with a banner before and its seconds after, such as the first compile."""
        self.note(f"{name} ..." + (f" ({why})" if why else ""))
        start = self._clock()
        yield
        seconds = self._clock() - start
        self.note(f"{name}: {duration(seconds)}", seconds=round(seconds, 3))

    def start_heartbeat(self, status: Callable[[], str]) -> None:
        """From now on, `heartbeat_s` without a line prints one that says what `status()` is waiting for."""
        if self._beat is not None:
            raise RuntimeError("the heartbeat runs already; one Progress has one")
        self._beat = threading.Thread(
            target=self._run, args=(status,), name="heartbeat", daemon=True
        )
        self._beat.start()

    def beat(self, status: Callable[[], str]) -> float:
        """Print the heartbeat if it is due; returns the seconds until it may be due again."""
        quiet = self._clock() - self._last_line_s
        if quiet < self.heartbeat_s:
            return self.heartbeat_s - quiet
        try:
            awaited = status()
        except Exception as error:  # boundary: a status that fails must not end the heartbeat
            awaited = f"unknown: status raised {type(error).__name__}: {error}"
        where = f"after step {self._step}" if self._step else "before the first step"
        self._print(
            "heartbeat",
            f"... {duration(quiet)} {where}, waiting for {awaited}",
            {"quiet_s": round(quiet, 1), "waiting_for": awaited},
        )
        return self.heartbeat_s

    def close(self) -> None:
        self._closing.set()
        if self._beat is not None:
            self._beat.join(timeout=5.0)
            self._beat = None

    def _run(self, status: Callable[[], str]) -> None:
        pause = self.heartbeat_s
        while not self._closing.wait(pause):
            pause = max(self.beat(status), 0.01)

    def _print(self, kind: str, text: str, fields: Mapping[str, Any]) -> None:
        with self._lock:
            self._last_line_s = self._clock()
            LOG.info(text)
            if self._form == "none":
                return
            line = text
            if self._form == "json":
                bad = (math.inf, -math.inf)
                finite = {k: v for k, v in fields.items() if v == v and v not in bad}
                line = json.dumps({"kind": kind, "text": text, **finite}, allow_nan=False)
            try:
                print(line, file=self._stream, flush=True)
            except (OSError, ValueError):  # terminal closed: go on, the log has the line
                self._form = "none"
