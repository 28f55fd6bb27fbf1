"""What a run leaves behind, step by step: one metrics row, one progress line, traces, events, and the summary.

Owns: the step's row (merged from the learner, the trained groups, the servers' counters and the rollout's), and
summary.json. Invariants: a rate is a difference of cumulative counters over the step's own seconds; a cohort that is
empty is absent; traces are written by a thread of their own beside the next step (those of 128 episodes of 1,000 tokens
take 0.3 s, in which no device would work), and are on disk before a checkpoint says that their step is trained.
Must not: stop or slow training because a file could not be written (the writers count what they lose).
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from rl_jax.disk import naming
from rl_jax.first_step import FirstStep
from rl_jax.guards import Alarm
from rl_jax.metrics import Metric, MetricsWriter, Row, pass_rates
from rl_jax.profiling import Profiler
from rl_jax.progress import Progress
from rl_jax.resume import SUMMARY
from rl_jax.rollout.traces import write_traces
from rl_jax.settings import MetricsSettings, Settings
from rl_jax.timeline import OFF, Traces, Track
from rl_jax.trackers.feed import Feeds
from rl_jax.types import FinishReason, Group, Outcome, Trajectory
from rl_jax.waits import Wait

TRACES_S = 600.0  # for the traces of one step to be written: as long as a checkpoint may take
SERVED = (  # the servers' counters that make metrics
    "prefill_tokens", "found_tokens", "received_tokens", "cached_tokens", "append_tokens", "recompute_tokens",
    "decode_tokens", "long_appends", "prefilled_suffixes", "stalled_servers", "suspect_servers",
    "role_moves", "affinity_moves", "restarts",
)  # fmt: skip
IDLE = (  # the rollout's cumulative seconds
    "time/wait_for_policy_s",
    "time/slots_idle_s",
    "time/wait_for_max_live_s",
)
SEEN = {  # metric -> counters whose quotient it is: a sum of what was there over how often that was looked at
    "running": ("block_running", "blocks"),
    "waiting": ("block_waiting", "blocks"),
    "kv_usage": ("block_held_pages", "block_pages"),
    "prefill_prompts": ("chunk_prompts", "prompt_chunks"),
}
BUSY = "busy_s."  # of the servers' counters: device seconds of a pool's servers in chunks, blocks and transfers
PROFILE = "profile"  # what JAX's profiler wrote, in the run directory


class Recorder:
    """Sole caller of the writer and of Progress.step."""

    def __init__(
        self,
        run_dir: Any,  # rl_jax.run_dir.RunDir
        writer: MetricsWriter,
        progress: Progress,
        settings: MetricsSettings,
        render: Callable[[np.ndarray], str],  # tokens i32[n] -> text, for the traces
        peak_flops: float
        | None = None,  # of the train mesh a second; None: not known, no utilisation
        *,
        feeds: Feeds | None = None,  # of the trackers; rows reach them by the writer
    ):
        self._feeds = feeds if feeds is not None else Feeds({}, lambda text: None, render, 0, 0)
        self._run_dir, self._writer, self.progress = run_dir, writer, progress
        self._settings, self._render, self._peak_flops = settings, render, peak_flops
        self._serving: Callable[[], Mapping[str, float]] = dict
        self._last_serving: dict[str, float] = {}
        self._last_idle: dict[str, float] = {}
        self._busy: dict[str, float] = {}  # of the step: BUSY + pool -> device seconds
        self._start_s = time.monotonic()
        self._lag0 = Metric(0.0, 0)
        self._useful = [0.0, 0.0]  # trained tokens, sampled tokens
        self._first = FirstStep()
        self.track: Track = OFF  # of the driver's laps
        self._profiler = Profiler(settings, Path(run_dir.path) / PROFILE)
        self._devices: Mapping[str, int] = {}  # of each pool
        self._trains = ""  # the pool that trains
        self._is_stuck = False  # writing traces had its time, and is left behind
        self._tracer = ThreadPoolExecutor(1, "traces")
        self._tracing: Future | None = None  # of the step before
        self._traces: Wait | None = None  # what it is
        self.steps = 0

    def watch(
        self,
        serving: Callable[[], Mapping[str, float]],
        status: Callable[[], str],
        sources: Iterable[Callable[[], Iterable[Wait]]] = (),
    ) -> None:
        """serving(): the servers' cumulative counters, summed; status(): what is waited for, for the heartbeat;
        sources(): what is under way."""
        self._serving = serving
        self._last_serving = dict(serving())
        self.progress.start_heartbeat(status, (*sources, self.waits))

    def trace(self, traces: Traces, devices: Mapping[str, int], trains: str) -> None:
        """Have the timeline know what the driver does. devices: of each pool; trains: the pool that does."""
        self.track, self.progress.track = traces.track("driver/steps"), traces.track("driver/now")
        self._devices, self._trains = dict(devices), trains

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """What is done inside is step `step`: of those of metrics.profile_steps JAX's profiler is told."""
        self._profiler.begin(step)
        yield
        with self.progress.doing("the profile"):
            self._profiler.end(step)

    def waits(self) -> list[Wait]:
        """The traces that are being written. Any thread."""
        tracing, wait = self._tracing, self._traces
        return [wait] if tracing is not None and wait is not None and not tracing.done() else []

    def doing(
        self, name: str, status: Callable[[], str] | None = None
    ) -> AbstractContextManager[None]:
        """What the loop does now, for the heartbeat; outside of it the loop waits. status: as of Progress.doing."""
        return self.progress.doing(name, status)

    def step(
        self,
        step: int,
        groups: Sequence[Group],
        metrics: Mapping[str, Metric],
        counts,
        advantages: Callable[[], Sequence[np.ndarray]] | None = None,
    ) -> None:
        """Write the row and the line of one step, and begin with its traces. advantages: gives what write_traces takes,
        on the traces' thread. Raises as flush(), of the step before."""
        row = {**metrics, **group_metrics(groups), **self._serve_metrics(metrics)}
        row.update(_count_metrics(counts))
        row.update(self._idle(counts))
        self.steps += 1
        lag0 = metrics.get("mismatch/abs_mean_lag0_pure")
        if lag0 is not None:
            self._lag0 = self._lag0.merge(lag0)
        row.update(self._goodput(row, counts.get("open_tokens", 0)))
        row.update(
            {f"trackers/lost.{name}": num for name, num in self._feeds.lost().items() if num}
        )
        self._writer.write(step, row)
        every = self._settings.rollouts_every
        if every and step % every == 0:
            self.flush()
            trajectories = [t for g in groups for t in g.trajectories]
            directory = self._run_dir.rollouts(step, "train")
            limit = f"TRACES_S={TRACES_S:g}"
            self._traces = Wait(
                f"the traces of step {step} for {directory}", time.monotonic(), limit
            )
            self._tracing = self._tracer.submit(
                self._write_traces, directory, trajectories, advantages
            )
            self._feeds.rollouts(step, trajectories)
        self._tell(step, row)

    def _write_traces(
        self,
        directory: Path,
        trajectories: Sequence[Trajectory],
        advantages: Callable[[], Sequence[np.ndarray]] | None,
    ) -> None:
        trained = None if advantages is None else advantages()
        write_traces(directory, trajectories, self._render, advantages=trained)

    def flush(self) -> None:
        """All traces so far are on disk when this returns. Raises what writing them raised (a full disk); OSError where
        they are not written in TRACES_S."""
        tracing, self._tracing = self._tracing, None
        if tracing is None or self._is_stuck:
            return
        try:
            tracing.result(TRACES_S)
        except TimeoutError:
            if tracing.done():
                raise
            self._is_stuck = True
            what = self._traces.what if self._traces is not None else "traces"
            raise OSError(
                f"{what} are not written after {TRACES_S:g} s; is the file system stuck?"
            ) from None

    def close(self) -> None:
        """End the thread after what it writes, unless that is stuck; what it raises was no longer asked for."""
        self._first.close()
        self._profiler.close()
        with suppress(Exception):
            self.flush()
        self._tracer.shutdown(wait=not self._is_stuck)

    def evaluation(self, version: int, name: str, result: Any) -> None:
        """One row and one line of an evaluation at a pinned version; its tokens count in no rate of a step."""
        now = time.monotonic()
        self.track.add("evaluation", now - result.seconds, now, version=version, name=name)
        own = sum(t.num_sampled for t in result.trajectories)
        self._useful[1] += max(self._served().get("decode_tokens", 0.0) - own, 0.0)
        row = {
            f"eval/success.{name}": Metric(
                result.success * result.num_episodes, result.num_episodes
            ),
            f"eval/episodes.{name}": result.num_episodes,
            f"time/eval_s.{name}": result.seconds,
        }
        self._writer.write(version, row)
        write_traces(
            self._run_dir.rollouts(version, "eval"), result.trajectories, self._render, append=True
        )
        self.progress.note(
            f"eval   version {version}  {name}: success {result.success:.3f}"
            f" of {result.num_episodes} episodes ({result.seconds:.1f} s)",
            version=version,
            name=name,
            success=result.success,
        )

    def rested(self, counts: Mapping[str, float], num_tokens: int) -> None:
        """What passed since the last step is no step's; `num_tokens` of what was sampled meanwhile are nobody's."""
        self._useful[1] += max(self._served().get("decode_tokens", 0.0) - num_tokens, 0.0)
        self._idle(counts)

    def fitted(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """The row and the line of one step of a supervised run."""
        self.steps += 1
        row = {**metrics, **self._goodput(metrics)}
        self._writer.write(step, row)
        self._tell(step, row)

    def held_out(self, version: int, figures: Mapping[str, Metric], seconds: Metric) -> None:
        """The row and the line of an evaluation on held-out rows."""
        row = {f"{name}.held_out": metric for name, metric in figures.items()}
        self._writer.write(version, {**row, "time/eval_s.held_out": seconds})
        said = ", ".join(f"{name} {metric.mean:.4f}" for name, metric in figures.items())
        self.progress.note(
            f"eval   version {version}  held out: {said}",
            version=version,
            **{name: metric.mean for name, metric in figures.items()},
        )

    def warm_start(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self._writer.write(step, {"sft/loss": metrics["policy/loss"]})

    def alarm(self, step: int, alarm: Alarm) -> None:
        """One line in the terminal and one in events.jsonl, unless it was told not long ago."""
        if alarm.speaks:
            self.progress.note(alarm.line, step=step, alarm=alarm.name)
            self.event("alarm", step=step, name=alarm.name, text=alarm.text)

    def event(self, kind: str, **fields: Any) -> None:
        self._run_dir.event(kind, **fields)

    def status(self, state: str, **fields: Any) -> None:
        """What STATUS.json says."""
        self._run_dir.status(state, **fields)

    def change(self, settings: Settings) -> None:
        """The run was steered: what it reads of its settings from the next step on."""
        self._settings, self.progress.total_steps = settings.metrics, settings.steps

    def summary(
        self,
        evaluations: Mapping[str, Mapping[str, float]],
        episodes: Mapping[str, int],
        **more: Any,
    ) -> dict:
        """Write and return summary.json. more: what a run of its kind adds."""
        out = {
            "steps": self.steps,
            "wall_s": round(time.monotonic() - self._start_s, 3),
            "tasks": {name: dict(value) for name, value in evaluations.items()},
            "mismatch": {"lag0_mean_abs": self._lag0.mean},
            "episodes": dict(episodes),
            **more,
        }
        path = Path(self._run_dir.path) / SUMMARY
        with naming(path):
            path.write_text(json.dumps(out, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return out

    def _tell(self, step: int, row: Row) -> None:
        self.progress.step(step, row)
        if line := self._first.why(row):
            self.progress.note(line, step=step)
        self._run_dir.status("running", step=step)

    def _idle(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Of the step."""
        totals = {name: counts[name] for name in IDLE if name in counts}
        idle = {name: total - self._last_idle.get(name, 0.0) for name, total in totals.items()}
        self._last_idle = totals
        return idle

    def _served(self) -> dict[str, float]:
        """What the servers' counters grew by since this was asked before."""
        now = dict(self._serving())
        delta = {name: now[name] - self._last_serving.get(name, 0.0) for name in now}
        self._last_serving = now
        return delta

    def _serve_metrics(self, metrics: Mapping[str, Metric]) -> dict[str, Metric | float]:
        delta = self._served()
        self._busy = {name: num for name, num in delta.items() if name.startswith(BUSY)}
        row: dict[str, Metric | float] = {
            f"serve/{name}": delta[name] for name in SERVED if name in delta
        }
        for name, (seen, looks) in SEEN.items():
            if delta.get(looks, 0.0) > 0:
                row[f"serve/{name}"] = Metric(delta[seen], delta[looks])
        seconds = metrics.get("time/step_s")
        if seconds is not None and seconds.sum > 0 and "decode_tokens" in delta:
            row["perf/decode_tokens_per_s"] = delta["decode_tokens"] / seconds.sum
            row["perf/prefill_tokens_per_s"] = delta.get("prefill_tokens", 0.0) / seconds.sum
        return row

    def _pools_busy(self, train_s: float, step_s: float) -> dict[str, float]:
        """Shares of the step, of each pool and of all devices; a pool that serves and trains counts both, to 1 at
        most."""
        devices = self._devices or {self._trains: 1}
        busy = {pool: self._busy.get(f"{BUSY}{pool}", 0.0) / num for pool, num in devices.items()}
        busy[self._trains] = busy.get(self._trains, 0.0) + train_s
        shares = {pool: min(seconds / step_s, 1.0) for pool, seconds in busy.items()}
        of_all = sum(devices[pool] * share for pool, share in shares.items())
        out = {"goodput/run": of_all / sum(devices.values())}
        if len(shares) > 1:
            out |= {f"goodput/run.{pool}": share for pool, share in shares.items()}
        return out

    def _goodput(self, row: Mapping[str, Any], num_open: float = 0) -> dict[str, float]:
        """num_open: tokens sampled by episodes that may still be trained; counted before the servers were asked."""
        out = {}
        train = row.get("time/train_s")
        if train is None or train.sum <= 0:
            return out  # nothing was trained
        out.update(self._pools_busy(train.sum, row["time/step_s"].sum))
        out["perf/train_tokens_per_s"] = row["batch/tokens"].sum / train.sum
        if self._peak_flops and "batch/tflops" in row:
            out["perf/train_mfu"] = row["batch/tflops"].sum * 1e12 / train.sum / self._peak_flops
        skipped = row.get("optim/skipped")
        if skipped is None or not skipped.sum:
            self._useful[0] += row["batch/trained_tokens"].sum
        self._useful[1] += row.get("serve/decode_tokens", 0.0)
        if self._useful[1] > 0:
            # A process that dies takes the last of its counts along: what was trained was sampled all the same.
            sampled = max(self._useful[1] - num_open, self._useful[0], 1.0)
            out["goodput/sample"] = self._useful[0] / sampled
        return out


def group_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """Rewards, lengths and finish reasons of a step's groups; what their tokens weigh, the learner knows."""
    trajectories = [t for g in groups for t in g.trajectories]
    row = {**_reward_metrics(groups, ""), **_length_metrics(trajectories), **_parts(trajectories)}
    tags = sorted({g.tag for g in groups})
    if len(tags) > 1:
        for tag in tags:
            row.update(_reward_metrics([g for g in groups if g.tag == tag], f".{tag}"))
    return row


def _reward_metrics(groups: Sequence[Group], suffix: str) -> dict[str, Metric]:
    values = [t.reward.value for g in groups for t in g.trajectories if t.reward.value is not None]
    if not values:
        return {}
    of_groups = [[t.reward.value for t in g.trajectories] for g in groups]
    low, high = np.percentile(values, [10, 90])
    single = {"min": min(values), "max": max(values), "p10": low, "p90": high}
    row = {
        f"reward/mean{suffix}": Metric.of(values),
        f"reward/success{suffix}": Metric.of([v == 1.0 for v in values]),
        f"reward/zero_std_groups{suffix}": Metric.of(len(set(v)) == 1 for v in of_groups),
        f"reward/solved_all_groups{suffix}": Metric.of(set(v) == {1.0} for v in of_groups),
        f"reward/solved_no_groups{suffix}": Metric.of(1.0 not in v for v in of_groups),
        **{f"reward/{name}{suffix}": Metric(float(v), 1) for name, v in single.items()},
        **{f"reward/pass_at{k}{suffix}": rate for k, rate in pass_rates(of_groups).items()},
    }
    if len(values) > 1:
        row[f"reward/std{suffix}"] = Metric(float(np.std(values, ddof=1)), 1)
    return row


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    found: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward.parts.items():
            found.setdefault(name, []).append(value)
    return {f"reward/part.{name}": Metric.of(values) for name, values in sorted(found.items())}


def _length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    sampled = [t.num_sampled for t in trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    row = {
        "length/response": Metric.of(sampled),
        "length/response_p90": Metric(
            float(np.percentile(sampled, 90)) if sampled else math.nan, 1
        ),
        "length/response_ended": Metric.of(
            n for t, n in zip(trajectories, sampled) if t.outcome is not Outcome.TRUNCATED
        ),
        "length/response_max": Metric(float(max(sampled, default=math.nan)), 1),
        "length/turns": Metric.of(len(t.turns) for t in trajectories),
        "length/truncated": Metric.of(t.outcome is Outcome.TRUNCATED for t in trajectories),
    }
    for reason in FinishReason:
        if reason is not FinishReason.ERROR:
            row[f"finish/{reason.value}"] = Metric.of(turn.finish is reason for turn in turns)
    return row


def _count_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    return {
        name: value
        for name, value in counts.items()
        if name.startswith(("episodes/", "envs/", "rewards/", "curriculum/"))
    }
