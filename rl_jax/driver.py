"""THE loop. The Driver owns only the order in which the parts act; each part owns its own state.

One step s turns version s-1 into s:
1. `rollout.want` raises the quota (the scheduler itself runs on every event, in the rollout's own thread).
2. `buffer.take` waits for a batch of complete groups; stale groups, and those that `algorithm.select` refused when they
   completed, are dropped, counted and replaced.
3. groups -> Batch -> advantages -> one learner step. The groups are TRAINED in the ledger only after the step returned.
4. `sync.publish` moves the new weights to every server, between two of its decode blocks, while generation goes on.
Synchronous and asynchronous training differ by one integer, `rollout.max_staleness`, which only the rollout's admission
and the buffer's sweep read; staleness_policy=adaptive moves it there, below that, between two steps. Evaluation happens
between steps, so one version serves all of it.
Whoever wants to stop between two steps and go on (a notebook's cells) calls `open`, `advance` and `finish`, which `run`
calls in a row; `hold`, from any thread or a signal, makes `advance` return where no step is half done.

Must not: know an environment, a text, a kernel or a mesh; catch what it cannot handle.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from rl_jax.algorithms.contract import check_select, check_state
from rl_jax.data.corpus import Rows, batches
from rl_jax.guards import Guards, GuardTripped, alarm_metrics
from rl_jax.learner.batch import Batch, pack, token_advantages, with_advantages
from rl_jax.metrics import Metric, merge_rows
from rl_jax.rollout.bound import ADAPTIVE, Bound, Limits, Seen
from rl_jax.rollout.buffer import Interrupted, TakeTimeout
from rl_jax.rollout.evaluation import EvaluationFailed, EvaluationUnplayable
from rl_jax.rollout.player import EnvBudgetExhausted, FleetExhausted
from rl_jax.rollout.selection import SelectionExhausted
from rl_jax.rollout.traces import sampled_by
from rl_jax.settings import Settings
from rl_jax.signals import Preempted, interrupt, on_signal
from rl_jax.timeline import OFF, Track
from rl_jax.types import Group, SyncResult

LOG = logging.getLogger(__name__)

SAVED = "rollout_only"  # why an episode that was saved and not trained is DROPPED in the ledger


class SyncFailed(RuntimeError):
    """Weights could not be published within the retries; at max_staleness 0 nothing else can go on."""


class Held(RuntimeError):
    """`hold` was called: the loop stands where it can go on, nothing is half done, nothing was saved for it."""


# What ends a run though nothing is wrong with what it learned.
OUTAGES = (
    EnvBudgetExhausted,
    FleetExhausted,
    TakeTimeout,
    SyncFailed,
    EvaluationFailed,
    EvaluationUnplayable,
)


@dataclass
class Parts:
    """What launch wired; the Driver is the only one that calls across them."""

    learner: Any  # rl_jax.learner.roles.Roles
    rollout: Any  # None in train_only, as the three that follow
    buffer: Any
    ledger: Any
    sync: Any
    algorithm: Any
    checkpointer: Any
    recorder: Any  # rl_jax.recorder.Recorder: metrics, progress, traces
    evaluations: Mapping[str, Sequence[Any]]  # name -> pinned tasks
    stream: Any = None  # of a supervised run: rl_jax.data.stream.ExampleStream
    held_out: Rows = ()  # its rows that are not trained on


@dataclass
class DriverState:
    """What the loop carries from step to step and through a checkpoint, beside the learner's own state."""

    version: int = 0
    # the version of these weights where rollout_only publishes them under later ones too; None = `version`
    weights_version: int | None = None
    algorithm: Any = None
    # name -> {"first": success, "last": success}; of a supervised run: name of a held-out figure -> its values
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluated: int = -1  # the version that was evaluated last, all of it
    bound: Bound | None = None  # None: rollout.staleness_policy=fixed, or nothing was seen yet
    # what steering changed: key -> [the config's value, the one in its place]
    steered: dict[str, Any] = field(default_factory=dict)


class Driver:
    """Sole writer of the version; `run` returns the state the loop ended in."""

    def __init__(self, parts: Parts, settings: Settings, state: DriverState, steering: Any = None):
        """steering: rl_jax.steering.Steering; None: nobody steers."""
        self.parts, self.settings, self.state = parts, settings, state
        self._steering = steering
        self.guards = Guards(settings.guards, settings.model.dtype)
        self._limits, self._slots_idle_s = Limits(settings.rollout.max_staleness), 0.0
        # the signal that asked to stop, seen between steps and while waiting
        self._stop: int | None = None
        self._interrupt: on_signal | None = None
        self._saved = state.version  # the version saved last, or that of the start
        self.is_between = True  # two steps: learner, version and ledger are of one step
        self.is_held = False
        if steering is not None:
            steering.begin(self)

    def run(self) -> DriverState:
        """A whole run of episodes or of rows: every step up to the last.

        Raises SyncFailed, Preempted, and what buffer.take, stream.next and learner.step raise.
        """
        with self._signals(), self.kept():
            self.open()
            self.advance(self.settings.steps)
            self.finish()
        return self.state

    def open(self) -> None:
        """Before the first step: the start's weights are served. Raises as run()."""
        p = self.parts
        if p.stream is None:
            p.buffer.select = p.algorithm.select  # here only: what is not trained is not filtered
            if self.settings.rollout.staleness_policy == ADAPTIVE:
                self.state.bound = self.state.bound or Bound.first(self._limits)
                p.rollout.set_bound(self.state.bound.now)
            self.publish(self.state.version)
        self._keep_safe()

    def advance(self, last: int) -> None:
        """The steps up to `last`, with the evaluations and the saves that are due between them.

        Raises Held, and as run(); after Held the next call goes on where this one stopped.
        """
        state = self.state
        act, evaluate = self._step_and_evaluation()
        if not state.evaluations:
            evaluate("first")
        elif self._is_evaluation_due() and state.evaluated < state.version:
            evaluate("last")  # a stop cut it short
        while state.version < last and self._goes_on(act):
            if self._is_evaluation_due():
                evaluate("last")
            every = self.settings.checkpoint.every
            if every and state.version % every == 0 and state.version < self.settings.steps:
                self.save()
            self._keep_safe()

    def finish(self) -> None:
        """After the last step: evaluated, saved, and nothing is in flight any more. Raises as advance()."""
        p, (_, evaluate) = self.parts, self._step_and_evaluation()
        if self.is_held:  # an evaluation may be over before it looks
            raise Held(f"stopped after step {self.state.version}")
        evaluate("last")
        self.save()  # before the drain: what that cancels is issued again by a resume with more steps
        if p.stream is None:
            p.rollout.drain()
            p.ledger.check(in_flight=0)

    @property
    def num_unsaved(self) -> int:
        """Steps since the last save, or since the start."""
        return self.state.version - self._saved

    def hold(self) -> None:
        """Ask advance() to raise Held at the next place where nothing is half done; from any thread or a signal."""
        self.is_held = True

    def release(self) -> None:
        """Forget hold()."""
        self.is_held = False

    def rested(self, num_tokens: int) -> None:
        """Time passed outside of the loop, in which `num_tokens` tokens were sampled for somebody else: neither counts
        as a step's. Call it before advance()."""
        p = self.parts
        if p.rollout is not None:
            counts = p.rollout.counts()
            self._slots_idle_s = counts["time/slots_idle_s"]
            p.recorder.rested(counts, num_tokens)

    def collect(self) -> DriverState:
        """rollout_only: `steps` batches under the starting weights, saved and not trained.

        The weights are published again under each next version, so that batches follow each other as in training; what
        is saved names the version whose weights sampled it, the start's, so that a replay reads true ages. Raises as
        run().
        """
        p = self.parts
        if self.state.weights_version is None:
            self.state.weights_version = self.state.version
        with self._signals():
            self.publish(self.state.version)
            self.save()  # what train_only starts from
            while self._goes_on(self._collect_step):
                pass
            self.save()  # where a resume with more steps goes on
            p.rollout.drain()
            p.ledger.check(in_flight=0)
        return self.state

    def replay(self, batches: Iterable[tuple[int, Sequence[Group]]]) -> DriverState:
        """train_only: learner steps on saved groups, (step, groups) each; no servers, nothing sampled.

        Raises Preempted, and what learner.step raises.
        """
        with self._signals():
            self._keep_safe()
            for step, groups in batches:
                if not self._or_stop(step, partial(self._replay_step, groups)):
                    break
                self._keep_safe()
            self.save()
        return self.state

    def step(self, step: int) -> None:
        """One turn of the loop: version step-1 -> step."""
        p, cfg = self.parts, self.settings
        clock = Stopwatch(p.recorder.track, step)
        p.rollout.want(step, cfg.rollout.batch_groups, last_step=cfg.steps)
        groups = p.buffer.take(step, should_stop=self._is_called)
        self.is_between = False
        selected = {**p.buffer.selection_metrics(), **p.rollout.redundancy_metrics()}
        clock.lap("time/wait_for_batch_s")
        batch, learned = self._learn(step, groups, clock)
        with p.recorder.doing(f"the ledger's records of step {step}"):
            p.rollout.consumed(step, groups)
        if cfg.tasks.curriculum.name != "none":
            p.rollout.learned(_mean_advantages(batch, groups))
        clock.lap("time/train_s")
        try:
            synced = self.publish(step)
        except (
            SyncFailed
        ):  # what was learned need not be lost with the servers: a resume publishes it first
            self.state.version, self.is_between = step, True
            raise
        clock.lap("time/sync_s")
        p.rollout.check()
        metrics = {**learned, **selected, **clock.metrics(), **_sync_metrics(synced)}
        metrics |= self._paused()
        counts = p.rollout.counts()
        metrics["staleness/bound"] = Metric(self._adapt(step, metrics, counts), 1)
        with self._guarded(step, groups, batch, metrics) as metrics:
            with p.recorder.doing(f"the figures and traces of step {step}"):
                trained = partial(token_advantages, batch, groups)
                p.recorder.step(step, groups, metrics, counts, trained)

    def make_batch(self, groups: Sequence[Group]) -> Batch:
        """Groups -> Batch with advantages and loss weights."""
        p, cfg = self.parts, self.settings
        batch = pack(groups, cfg.learner, p.learner.balance)
        extras = p.learner.score(batch, p.algorithm.needs)
        batch, self.state.algorithm = with_advantages(
            batch, groups, extras, p.algorithm, self.state.algorithm, cfg.algorithm
        )
        return batch

    def update(self, step: int, batch: Batch) -> dict[str, Metric]:
        """One learner step on the batch of make_batch; the learner's metrics."""
        learned = dict(self.parts.learner.step(batch, version=step - 1))
        algorithm = self.parts.algorithm
        state = algorithm.learned(self.state.algorithm, learned)
        self.state.algorithm = check_state(algorithm, "learned", state)
        return learned

    def publish(self, version: int) -> SyncResult:
        """New weights to every server; a sync that ends ABORTED is retried `weights.retries` times."""
        p, cfg = self.parts, self.settings
        result: Any = None
        tries = 0
        while tries <= cfg.weights.retries:
            tries += 1
            with p.recorder.doing(f"the sync of version {version}"):
                result = p.sync.publish(p.learner.params, version)
            if result.state != "PUBLISHED":
                p.recorder.event(
                    "sync",
                    state=result.state,
                    version=version,
                    fenced=list(result.fenced),
                    detail=result.detail,
                )
            if result.state in ("PUBLISHED", "PARTIAL"):
                self.state.version, self.is_between = version, True
                p.rollout.published(version)
                p.recorder.event("published", version=version, digest=result.digest)
                return result
            if result.state == "FAILED":
                break
        raise SyncFailed(
            f"weights of version {version} ended {result.state} after {tries} of {1 + cfg.weights.retries} tries:"
            f" {result.detail}; fenced servers: {', '.join(result.fenced) or 'none'}"
        )

    def evaluate(self, when: str) -> None:
        """The same pinned tasks each time, on the version published last; `when` is first or last.

        Counts when every name has its result: what a stop cut short is done again by a resume.
        """
        p, cfg, state = self.parts, self.settings, self.state
        found: dict[str, float] = {}
        for name, tasks in p.evaluations.items():
            try:
                result = p.rollout.evaluate(name, tasks, cfg.eval, self.is_stopping)
            except Interrupted:
                self._save_and_stop(f"in the evaluation of version {state.version}")
            found[name] = result.success
            p.recorder.evaluation(state.version, name, result)
        self._evaluated(when, found)

    def measure(self, when: str) -> None:
        """What evaluate is to a supervised run: the algorithm's figures of all held-out rows at the current weights.

        Counts when it is done: what a stop cut short is done again by a resume.
        """
        p, state = self.parts, self.state
        clock, found, figures = Stopwatch(), [], {}
        for groups in batches(p.held_out, self.settings.data.batch_rows):
            if self.is_stopping():
                self._save_and_stop(f"in the evaluation of version {state.version}")
            batch = pack(groups, self.settings.learner, p.learner.balance)
            extras = p.learner.score(batch, p.algorithm.measured)
            found.append(p.algorithm.measure(groups, _per_member(batch, groups, extras)))
        if found:
            figures = merge_rows(found)
            clock.lap("time/eval_s.held_out")
            p.recorder.held_out(state.version, figures, clock.metrics()["time/eval_s.held_out"])
        self._evaluated(when, {name: m.sum / m.count for name, m in figures.items()})

    def save(self) -> None:
        p = self.parts
        extra = {
            "version": self.state.version,
            "weights_version": self.state.weights_version,
            "algorithm": self.state.algorithm,
            "evaluations": self.state.evaluations,
            "evaluated": self.state.evaluated,
            "bound": None if self.state.bound is None else self.state.bound.to_tree(),
            "steered": self.state.steered,
        }
        if p.rollout is not None:
            extra.update(p.rollout.position(), ledger_seq=p.ledger.seq)
        if p.stream is not None:
            extra.update(rows=p.stream.state(), supervised=self.settings.algorithm.name)
        with p.recorder.doing(f"the save of version {self.state.version}"):
            p.recorder.flush()
            p.checkpointer.save(self.state.version, p.learner.state, extra)
            p.checkpointer.wait()
        self._saved = self.state.version
        p.recorder.event("saved", step=self.state.version)

    def _step_and_evaluation(self) -> tuple[Callable[[int], None], Callable[[str], None]]:
        """What a step and an evaluation are: of episodes, or of a supervised run's rows."""
        if self.parts.stream is not None:
            return self._fit_step, self.measure
        return self.step, self.evaluate

    def _keep_safe(self) -> None:
        """Save where the learner could not come back from its last save, or not soon."""
        if self.parts.learner.wants_save:
            self.save()

    def _learn(
        self, step: int, groups: Sequence[Group], clock: "Stopwatch"
    ) -> tuple[Batch, dict[str, Metric]]:
        """The batch of the groups and the learner's metrics of one step on it."""
        with self.parts.recorder.doing(f"the update of step {step}"):
            batch = self.make_batch(groups)
            clock.lap("time/batch_s")
            return batch, self.update(step, batch)

    def _adapt(self, step: int, metrics: Mapping[str, Metric], counts: Mapping[str, float]) -> int:
        """What the step's batch was bound by; under staleness_policy=adaptive, what those from the next take on are."""
        bound, idle_s = self.state.bound, counts["time/slots_idle_s"]
        idle_s, self._slots_idle_s = idle_s - self._slots_idle_s, idle_s
        if bound is None:
            return self._limits.most
        if (seen := Seen.of(metrics, idle_s)) is not None:
            self.state.bound = bound.saw(seen, self._limits)
        if (now := self.state.bound.now) != bound.now:
            self.parts.rollout.set_bound(now)
            rates = {str(key): sums.rate for key, sums in self.state.bound.brought.items()}
            self.parts.recorder.event(
                "staleness_bound", step=step, bound=now, before=bound.now, worth_per_s=rates
            )
        return bound.now

    def _evaluated(self, when: str, found: Mapping[str, float]) -> None:
        """An evaluation is done: its figures by name, as the first or the last of the run."""
        state = self.state
        for name, value in found.items():
            state.evaluations.setdefault(name, {})[when] = value
            state.evaluations[name].setdefault("last", value)
        state.evaluated = state.version

    def _collect_step(self, step: int) -> None:
        p, cfg, clock = self.parts, self.settings, Stopwatch(self.parts.recorder.track, step)
        p.rollout.want(step, cfg.rollout.batch_groups, last_step=cfg.steps)
        groups = p.buffer.take(step, should_stop=self._is_called)
        clock.lap("time/wait_for_batch_s")
        p.buffer.discard(step, SAVED)
        self.publish(step)
        p.rollout.check()
        assert self.state.weights_version is not None, "collect sets it"
        groups = [sampled_by(group, self.state.weights_version) for group in groups]
        metrics = {**clock.metrics(), **p.rollout.redundancy_metrics()}
        p.recorder.step(step, groups, metrics, p.rollout.counts())

    def _replay_step(self, groups: Sequence[Group], step: int) -> None:
        p, clock = self.parts, Stopwatch(self.parts.recorder.track, step)
        groups, dropped = check_select(p.algorithm, p.algorithm.select(groups))
        if dropped:
            p.recorder.event("filtered", step=step, dropped=[list(drop) for drop in dropped])
        batch, learned = self._learn(step, groups, clock)
        clock.lap("time/train_s")
        self.state.version = step
        with self._guarded(step, groups, batch, {**learned, **clock.metrics()}) as metrics:
            trained = partial(token_advantages, batch, groups)
            p.recorder.step(step, groups, metrics, {}, trained)

    @contextmanager
    def _guarded(self, step: int, groups: Sequence[Group], batch: Batch, metrics: Mapping):
        """The step's row with its alarms; they are told after it. Raises GuardTripped where that is asked for."""
        alarms = self.guards.check(step, groups, batch, metrics)
        yield {**metrics, **alarm_metrics(alarms)}
        for alarm in alarms:
            self.parts.recorder.alarm(step, alarm)
        if fatal := [alarm.line for alarm in alarms if alarm.is_fatal]:
            raise GuardTripped(f"step {step}: {'; '.join(fatal)}")

    def _paused(self) -> dict[str, Metric]:
        """Seconds of the pauses since the step before, if there were any."""
        steering = self._steering
        if steering is None or not steering.paused_s:
            return {}
        paused_s, steering.paused_s = steering.paused_s, 0.0
        return {"time/paused_s": Metric(paused_s, 1)}

    def _fit_step(self, step: int) -> None:
        p, clock = self.parts, Stopwatch(self.parts.recorder.track, step)
        with p.recorder.doing(f"the rows of step {step}"):
            groups = p.stream.next()
        clock.lap("time/wait_for_batch_s")
        batch, learned = self._learn(step, groups, clock)
        clock.lap("time/train_s")
        self.state.version = step
        loss, figures = learned.pop("policy/loss"), {}
        if p.algorithm.measured <= batch.extras.keys():  # at step start
            figures = p.algorithm.measure(groups, _per_member(batch, groups, batch.extras))
        figures.setdefault(p.algorithm.loss_name, loss)
        seen = {"data/epoch": Metric(p.stream.epoch, 1)}
        p.recorder.fitted(step, {**learned, **figures, **seen, **clock.metrics()})

    def _goes_on(self, act: Callable[[int], None]) -> bool:
        """One more step, if there is one to do."""
        step = self.state.version + 1
        return step <= self.settings.steps and self._or_stop(step, act)

    def _or_stop(self, step: int, act: Callable[[int], None]) -> bool:
        """The step, unless steering says that the run ends now (False). SIGTERM ends a run of any mode between two
        steps or while it waits for a batch, after a save."""
        steering = self._steering
        while not self.is_stopping():
            try:
                if steering is not None and not steering.between(self, step):
                    return False
                if not self.is_stopping():
                    with self.parts.recorder.profiled(step):
                        act(step)
                    return True
            except Interrupted:
                continue  # the step has not begun: its groups are pending, and taken or issued again
            except (SelectionExhausted, GuardTripped):
                self.save()  # no step is half done; a task that is solved may end so: what solved it is kept
                raise
        self._save_and_stop(f"before step {step}")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """An outage, or Ctrl-C between two steps, ends the run after a save of what was learned since the last one; its
        cause is told in any case. A second Ctrl-C ends the save too."""
        try:
            yield
        except (*OUTAGES, KeyboardInterrupt):
            if self.is_between and self.state.version > self._saved:
                try:
                    self.save()
                except Exception as error:  # boundary: it must not hide what ended the run
                    LOG.warning("version %d could not be saved: %s", self.state.version, error)
            raise

    def _save_and_stop(self, where: str) -> NoReturn:
        if self._stop is None:
            raise Held(f"stopped {where}")
        self.save()
        raise Preempted(f"stopped by signal {self._stop} {where}; saved, --resume=auto goes on")

    def _ask_stop(self, signum: int) -> None:
        if self._stop is not None:
            raise Preempted(
                f"stopped at once by a second signal {signum}; the last save stands, --resume=auto goes on from it"
            )
        self._stop = signum

    def _is_evaluation_due(self) -> bool:
        """Between two steps; the first and the last version are evaluated in any case."""
        every, version = self.settings.eval.every, self.state.version
        return bool(every) and version % every == 0 and 0 < version < self.settings.steps

    def is_stopping(self) -> bool:
        """Whether a signal ends the run. Raises: KeyboardInterrupt that was lost."""
        if self._interrupt is not None:
            self._interrupt.check()
        return self.is_held or self._stop is not None

    def _is_called(self) -> bool:
        """Whether a wait for a batch shall end: for a signal, or for what steering has to do first."""
        steering = self._steering
        return self.is_stopping() or (steering is not None and steering.is_called())

    def change(self, settings: Settings, key: str) -> None:
        """Steering: the settings from the next step on. key: the one in which they differ."""
        p, self.settings = self.parts, settings
        if key.startswith("guards."):
            self.guards = Guards(settings.guards, settings.model.dtype)
        elif key == "rollout.max_staleness":
            self._limits = Limits(settings.rollout.max_staleness)
            if p.rollout is not None:
                p.rollout.set_bound(settings.rollout.max_staleness)
        p.recorder.change(settings)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM asks for a stop; a lost interrupt comes again between steps, while waiting or at the end."""
        with (
            on_signal(signal.SIGTERM, self._ask_stop),
            on_signal(signal.SIGINT, interrupt) as self._interrupt,
        ):
            yield
            self._interrupt.check()


class Stopwatch:
    """Named laps of one step, in seconds of the monotonic clock, for the metrics and for the timeline."""

    def __init__(self, track: Track = OFF, step: int = 0):
        self._start = self._last = time.monotonic()
        self._laps: dict[str, float] = {}
        self._track, self._step = track, step

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps[name] = now - self._last
        self._track.add(name, self._last, now, step=self._step)
        self._last = now

    def metrics(self) -> dict[str, Metric]:
        self._track.add("time/step_s", self._start, self._last, step=self._step)
        laps = {**self._laps, "time/step_s": self._last - self._start}
        return {name: Metric(seconds, 1) for name, seconds in laps.items()}


def _per_member(
    batch: Batch, groups: Sequence[Group], extras: Mapping[str, Any]
) -> dict[str, list]:
    """Extras f32[B, T] as one array a trajectory."""
    num_members = sum(len(group.trajectories) for group in groups)
    return {name: batch.gather(array, num_members) for name, array in extras.items()}


def _mean_advantages(batch: Batch, groups: Sequence[Group]) -> dict[str, list[float]]:
    """By tag, of each episode that trains: over its trained tokens."""
    tags = [trajectory.tag for group in groups for trajectory in group.trajectories]
    out: dict[str, list[float]] = {}
    for member, values in batch.trained(batch.advantages):
        out.setdefault(tags[member], []).append(float(values.mean()))
    return out


def _sync_metrics(result: SyncResult) -> dict[str, Metric]:
    return {
        "sync/stage_s": Metric(result.stage_s, 1),
        "sync/pause_s": Metric(result.pause_s, 1),
        "sync/bytes": Metric(result.num_bytes, 1),
        "sync/link_bytes": Metric(result.link_bytes, 1),
    }
