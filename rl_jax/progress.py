"""The lines a person watches: notes, steps, phases, and a heartbeat that says what is awaited.

Owns: `Progress`, sole writer of the console. Invariant: nothing here can stop a run; a closed terminal costs lines, and
the log file has them all.
A heartbeat comes after `heartbeat_s` without a line. It says how long it has been since the last line of another kind,
and where the run is: in a phase, with what that phase has done so far, else after which step, waiting for what.
In the first phases, where somebody sits before the terminal, the first one comes after EARLY_S. What else is under way
(waits.py) is named as soon as it is WATCH_SHARE of heartbeat_s old, whatever lines come meanwhile: a hang that others
do not feel is told within heartbeat_s too.
With the form rich the lines of steps and the heartbeat are a table instead (live_view.py), and notes scroll above it.
Must not: know a part, or wait for one (phases and the heartbeat ask a callable).
"""

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rl_jax.live_view import Figures, LiveView
from rl_jax.metrics import Metric, Row, values_of
from rl_jax.timeline import OFF, Track
from rl_jax.waits import Wait, Watchdog

LOG = logging.getLogger(__name__)
EARLY_S = 10.0  # from the banner of a phase to its first heartbeat, at most
WATCH_SHARE, LOOKS = (
    2 / 3,
    6,
)  # of heartbeat_s: how old a wait is when it is named; how often that is looked at
PROGRESS_FORMS = ("auto", "rich", "plain", "json", "none")


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
    """The one line of a step."""
    return "  ".join(f"{label} {value}" for label, value in step_figures(step, total, row, eta_s))


def step_figures(step: int, total: int, row: Row, eta_s: float | None) -> list[tuple[str, str]]:
    """(label, value) of the step itself, then of its figures; what was not measured is left out."""
    values, _ = values_of(row)

    def reward(label: str, suffix: str) -> tuple[str, str]:
        text = f"{values[f'reward/mean{suffix}']:.3f}"
        metric, std = row[f"reward/mean{suffix}"], values.get(f"reward/std{suffix}")
        if isinstance(metric, Metric) and std is not None:
            text += f"+-{std / math.sqrt(metric.count):.3f}"
        if (success := values.get(f"reward/success{suffix}")) is not None:
            text += f" ok {success:.0%}"
        return label, text

    def number(
        label: str, *names: str, form: Callable[[float], str] = _short
    ) -> tuple[str, str] | None:
        found = [form(values[n]) for n in names if n in values]
        return (label, "/".join(found)) if found else None

    share = "{:.0%}".format
    figures: list[tuple[str, str] | None] = [("step", f"{step:>{len(str(total))}}/{total}")]
    if "reward/mean" in values:
        figures.append(reward("reward", ""))
    tags = sorted(n[len("reward/mean") :] for n in values if n.startswith("reward/mean."))
    if len(tags) > 1:
        figures += [reward(tag[1:], tag) for tag in tags]
    wait = None
    if values.get("time/step_s"):
        wait = values.get("time/wait_for_batch_s", 0.0) / values["time/step_s"]
    decodes = values.get("perf/decode_tokens_per_s", 0.0) > 0
    figures += [
        number("loss", "sft/loss"),
        number("loss", "preference/loss"),
        number("accuracy", "preference/accuracy", form=share),
        number("margin", "preference/margin"),
        number("tok/s decode", "perf/decode_tokens_per_s") if decodes else None,
        number("train" if decodes else "tok/s train", "perf/train_tokens_per_s"),
        number("stale", "staleness/mean", "staleness/max"),
        ("wait", share(wait)) if wait is not None else None,
        number("kept", "filter/kept", form=share) if values.get("filter/kept", 1.0) < 1 else None,
        number("entropy", "policy/entropy"),
        number("grad", "optim/grad_norm"),
        number("mismatch", "mismatch/abs_mean", form="{:.1e}".format),
        number("G_sample", "goodput/sample", form=share),
        number("skipped", "optim/skipped") if values.get("optim/skipped") else None,
        number("step", "time/step_s", form=duration),
        ("eta", duration(eta_s)) if eta_s is not None else None,
    ]
    return [figure for figure in figures if figure]


class Progress:
    """Sole writer of the console. Lines also go to the "rl_jax" logger, so that the run's log file holds them.

    form: auto (plain), rich (the last steps as a table at the foot of the terminal; plain where the stream is none),
    plain, json (one object a line), none (the log only). Thread-safe. Raises ImportError for rich without that package.
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
        self._stream, self._clock = stream if stream is not None else sys.stdout, clock
        self._view = LiveView.open(self._stream) if form == "rich" else None
        self._form = "plain" if form == "auto" or (form == "rich" and self._view is None) else form
        self._lock = threading.Lock()
        self._last_line_s = self._last_news_s = self._clock()
        self._phases: list[tuple[str, Callable[[], str] | None, float]] = []  # with when it is told
        self._first_step: tuple[int, float] | None = None
        self._step = 0
        self._beat: threading.Thread | None = None
        self._status: Callable[[], str] = lambda: "the job's imports and checks"
        self._sources: tuple[Callable[[], Iterable[Wait]], ...] = ()
        self._watchdog = Watchdog(WATCH_SHARE * heartbeat_s)
        self.is_idle = False  # nobody waits, as between a notebook's cells: no heartbeat
        self._closing = threading.Event()
        self.track: Track = OFF  # of the timeline; the job's, whose thread calls `doing`

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
        figures = step_figures(step, self.total_steps, row, eta)
        self._print("step", format_step(step, self.total_steps, row, eta), fields, figures)

    @contextmanager
    def phase(
        self, name: str, why: str = "", status: Callable[[], str] | None = None
    ) -> Generator[None, None, None]:
        """A stretch of work with a banner before and its seconds after, such as the first compile.

        status: what of it is done, for the heartbeat; called from the heartbeat's thread.
        """
        self.note(f"{name} ..." + (f" ({why})" if why else ""))
        start = self._clock()
        with self.doing(name, status, min(self.heartbeat_s, EARLY_S)):
            yield
        seconds = self._clock() - start
        self.note(f"{name}: {duration(seconds)}", seconds=round(seconds, 3))

    @contextmanager
    def doing(
        self, name: str, status: Callable[[], str] | None = None, after_s: float | None = None
    ) -> Generator[None, None, None]:
        """A phase without lines of its own: only the heartbeat names it, if it takes that long.

        after_s: before its first heartbeat; None = as before any.
        """
        told_s = self._clock() + (self.heartbeat_s if after_s is None else after_s)
        self._phases.append((name, status, told_s))
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._phases.pop()
            kind, _, number = name.rpartition(" ")
            if number.isdigit():
                self.track.add(kind, start_s, time.monotonic(), number=int(number))
            else:
                self.track.add(name, start_s, time.monotonic())

    def start_heartbeat(
        self,
        status: Callable[[], str] | None = None,
        sources: Iterable[Callable[[], Iterable[Wait]]] = (),
    ) -> None:
        """From now on, `heartbeat_s` without a line prints one that says what `status()` is waiting for.

        sources: give what is under way. Both are asked from the heartbeat's thread; a later call replaces them.
        """
        self._status, self._sources = status or self._status, tuple(sources)
        if self._beat is None:
            self._beat = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._beat.start()

    def watch(self) -> None:
        """Name what has been under way for long."""
        waits: list[Wait] = []
        for source in self._sources:
            try:
                waits += source()
            except (
                Exception
            ):  # boundary: a part that cannot say what it does must not end the heartbeat
                LOG.info("a part does not say what it waits for", exc_info=True)
        for line in self._watchdog.look(waits, time.monotonic()):
            self._print("wait", line, {})

    def beat(self, status: Callable[[], str]) -> float:
        """Print the heartbeat if it is due; returns the seconds until it may be due again."""
        if self.is_idle:
            self._last_line_s = self._last_news_s = self._clock()
            return self.heartbeat_s
        now = self._clock()
        due_s = self._last_line_s + self.heartbeat_s
        if self._phases and self._last_line_s < self._phases[-1][2]:
            due_s = min(due_s, self._phases[-1][2])
        if now < due_s:
            return due_s - now
        quiet, fields = now - self._last_news_s, {}
        if self._phases:
            name, ask, _ = self._phases[-1]
            where, fields["phase"] = f"in {name}", name
            if ask is not None:
                where += f": {_answer(ask)}"
        else:
            fields["waiting_for"] = _answer(status)
            where = f"after step {self._step}" if self._step else "before the first step"
            where += f", waiting for {fields['waiting_for']}"
        self._print(
            "heartbeat",
            f"... {duration(quiet)} {where}",
            {"quiet_s": round(quiet, 1), **fields},
        )
        return self.heartbeat_s

    def close(self) -> None:
        self._closing.set()
        if self._beat is not None:
            self._beat.join(timeout=5.0)
            self._beat = None
        with self._lock:
            self._write(lambda: self._view.close() if self._view is not None else None)
            self._view, self._form = None, "plain" if self._form == "rich" else self._form

    def _run(self) -> None:
        every_s = self.heartbeat_s / LOOKS
        pause_s = every_s
        while not self._closing.wait(pause_s):
            self.watch()
            pause_s = max(min(self.beat(self._status), every_s), 0.01)

    def _print(
        self, kind: str, text: str, fields: Mapping[str, Any], figures: Figures = ()
    ) -> None:
        """figures: of a step."""
        with self._lock:
            self._last_line_s = self._clock()
            if kind not in ("heartbeat", "wait"):
                self._last_news_s = self._last_line_s
            LOG.info(text)
            self._write(lambda: self._show(kind, text, fields, figures))

    def _show(self, kind: str, text: str, fields: Mapping[str, Any], figures: Figures) -> None:
        if self._form == "rich" and self._view is not None:
            if kind == "step":
                self._view.step(figures)
            elif kind == "heartbeat":
                self._view.awaited(text)
            else:
                self._view.note(text)
        elif self._form == "json":
            bad = (math.inf, -math.inf)
            finite = {k: v for k, v in fields.items() if v == v and v not in bad}
            line = json.dumps({"kind": kind, "text": text, **finite}, allow_nan=False)
            print(line, file=self._stream, flush=True)
        elif self._form == "plain":
            print(text, file=self._stream, flush=True)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError):  # terminal closed: go on, the log has the line
            self._form = "none"
        except Exception:  # boundary: a table that cannot be drawn must not stop a run
            if self._form != "rich":
                raise
            LOG.info("the table of steps cannot be drawn; lines from now on", exc_info=True)
            self._form = "plain"


def _answer(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as error:  # boundary: a status that fails must not end the heartbeat
        return f"unknown: status raised {type(error).__name__}: {error}"
