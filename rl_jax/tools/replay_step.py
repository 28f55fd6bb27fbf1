"""One step of a run trained again, from a checkpoint and the recorded batches, and held against what the run recorded.

Owns: `Replay`. Life: 1 `open`: the newest checkpoint before the step that verifies, else the weights that the config
begins with; where neither gives this step, that is told before anything runs. 2 `run`: the learner is rebuilt as
job.py builds it, without servers; the recorded batches up to the step are trained silently, each published version
against its digest; the step itself with all figures. 3 `Outcome`: which figures and digests are equal, bit for bit.
Invariant: nothing below the run directory is written, moved or locked.
Must not: sample, or know an algorithm: what changes from step to step is the driver's and the learner's own code.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kernels import digest
from rl_jax.algorithms.plugin import make_algorithm
from rl_jax.build_roles import Setting
from rl_jax.checkpoint import Checkpointer, CheckpointError
from rl_jax.driver import Driver, Parts
from rl_jax.guards import alarm_metrics
from rl_jax.job import machine
from rl_jax.learner.batch import Batch
from rl_jax.learning import LearnsHere
from rl_jax.mesh import MeshPlan, build_meshes
from rl_jax.metrics import Metric, values_of
from rl_jax.names import resolve
from rl_jax.preflight import build_model, load_names, load_plugin, present_devices
from rl_jax.recorder import group_metrics
from rl_jax.resume import CHECKPOINTS, Decision, RunDirError, check_template
from rl_jax.tools.recorded import Recorded
from rl_jax.tools.token_figures import (
    TokenFigures,
    by_lag,
    per_episode,
    summary,
    token_figures,
    worst,
)
from rl_jax.types import Group

Pair = tuple[float | None, float | None]  # recorded, replayed; None: only the other has it
WORST = 10  # tokens that are shown
# Of families that a batch decides, what depends on the rollout: the bound, and figures of all that was completed.
BOUND, OF_ALL = "staleness/bound", "_all"


class NotReplayable(RunDirError):
    """The run does not hold what this step was made of."""


class _Quiet:
    """The recorder of a replay: nothing is recorded."""

    @staticmethod
    def doing(name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclass(frozen=True)
class Outcome:
    """What the replay of a step found."""

    step: int
    start: int  # version that it began with
    reasons: tuple[str, ...]  # why it need not be equal
    digests: Mapping[int, tuple[str, str]]  # version -> (recorded, replayed), where recorded
    metrics: Mapping[str, Pair]  # name -> (recorded, replayed)
    other: tuple[str, ...]  # names of the row that no batch decides
    alarms: tuple[str, ...]
    figures: TokenFigures
    grad_norms: Mapping[str, float]  # by parameter, before clipping
    worst: tuple[Mapping[str, Any], ...]

    @property
    def differing(self) -> list[str]:
        """What is not equal bit for bit: versions by their digest, then names of metrics."""
        found = [f"version {v}" for v, (a, b) in self.digests.items() if a != b]
        return found + [name for name, (a, b) in self.metrics.items() if a != b]

    def to_tree(self) -> dict[str, Any]:
        """For JSON; with every trained token."""
        figures = self.figures
        return {
            "step": self.step,
            "start": self.start,
            "equal": not self.differing,
            "differing": self.differing,
            "reasons": list(self.reasons),
            "digests": {
                str(v): {"recorded": a, "replayed": b} for v, (a, b) in self.digests.items()
            },
            "metrics": {n: {"recorded": a, "replayed": b} for n, (a, b) in self.metrics.items()},
            "not_replayed": list(self.other),
            "alarms": list(self.alarms),
            "by_lag": by_lag(figures),
            "advantage": summary(figures.advantage),
            "ratio": summary(figures.ratio),
            "grad_norms": dict(self.grad_norms),
            "worst": list(self.worst),
            "episodes": list(per_episode(figures)),
        }


@dataclass(frozen=True)
class Replay:
    recorded: Recorded
    start: int  # a checkpoint's step; 0 without one: what the config begins with
    has_checkpoint: bool

    @classmethod
    def open(cls, run: Path, step: int) -> "Replay":
        """Raises: NotReplayable, RunDirError, ConfigError."""
        recorded, faults = Recorded.read(run, step), []
        reader = Checkpointer(run, recorded.settings.checkpoint)
        for start in recorded.starts():
            if (fault := reader.fault(start)) is None:
                return cls(recorded, start, True)._checked()
            faults.append(f"step_{start}: {fault}")
        if recorded.settings.warm_start.steps and recorded.mode == "train":
            kept = "; ".join(faults) or f"the first one is {_first(run)}"
            raise NotReplayable(
                f"step {step} has no checkpoint before it to start from ({kept}), and the start is a warm start, which"
                " is not recorded: set checkpoint.every, and checkpoint.keep to as many as you want to come back to"
            )
        return cls(recorded, 0, False)._checked()

    def _checked(self) -> "Replay":
        if missing := self.recorded.missing(self.start):
            every = self.recorded.settings.metrics.rollouts_every
            names = ", ".join(map(str, missing[:5])) + (" ..." if len(missing) > 5 else "")
            raise NotReplayable(
                f"step {self.recorded.step} is made of the batches of steps {self.start + 1} to {self.recorded.step},"
                f" and there are no complete traces of: {names} (metrics.rollouts_every={every}; a replay needs 1, or"
                " a checkpoint just before the step)"
            )
        return self

    def reasons(self) -> list[str]:
        """Why the bits need not be equal. Initialises JAX's backend."""
        return self.recorded.differences(self.start, machine())

    def run(self, note: Callable[[str], None]) -> Outcome:
        """Raises: TraceError, CheckpointError, RunDirError, ConfigError, NonFiniteError."""
        recorded = self.recorded
        reasons = self.reasons()
        with tempfile.TemporaryDirectory(prefix="rl_jax_replay_") as spare:
            folder = recorded.run if self.has_checkpoint else Path(spare)
            driver, decode = self._rebuild(folder, note)
            digests: dict[int, tuple[str, str]] = {}
            self._compare_digest(driver, self.start, digests)
            if not self.has_checkpoint and any(a != b for a, b in digests.values()):
                raise NotReplayable(
                    f"{recorded.run} did not start from the weights that its config begins with (a fork of another"
                    f" run?), and has no checkpoint before step {recorded.step}"
                )
            for step in range(self.start + 1, recorded.step):
                driver.update(step, driver.make_batch(recorded.groups(step)))
                self._compare_digest(driver, step, digests)
            return self._last(driver, decode, reasons, digests)

    def _last(
        self,
        driver: Driver,
        decode: Callable,
        reasons: Sequence[str],
        digests: dict[int, tuple[str, str]],
    ) -> Outcome:
        """The step itself, with its figures."""
        recorded, step, policy = self.recorded, self.recorded.step, driver.parts.learner.policy
        groups = recorded.groups(step)
        batch = driver.make_batch(groups)
        members = [t for group in groups for t in group.trajectories]
        logprobs = policy.score(batch, {policy.gives})[policy.gives]
        figures = token_figures(batch, members, logprobs, step - 1, recorded.settings.algorithm)
        norms = policy.grad_norms(batch, step - 1)
        learned = driver.update(step, batch)
        self._compare_digest(driver, step, digests)
        metrics, other, alarms = _compare(driver, step, groups, batch, learned, recorded.row)
        shown = tuple(worst(figures, WORST, decode))
        return Outcome(
            step, self.start, tuple(reasons), digests, metrics, other, alarms, figures, norms, shown
        )

    def _rebuild(
        self, folder: Path, note: Callable[[str], None]
    ) -> tuple[Driver, Callable[..., str]]:
        """The driver and learner as they stood at `start`; tokens -> text. folder: stands for the run directory."""
        recorded = self.recorded
        settings = load_plugin(recorded.here, resolve)
        plan = MeshPlan.from_settings(settings.mesh, settings.model)
        meshes = build_meshes(plan, present_devices(plan))
        renderer = load_names(settings, plan, resolve, recorded.mode)
        check_template(recorded.run, renderer.template_sha256, "strict")
        model = build_model(settings, resolve, renderer.tokenizer.vocab_size)
        setting = Setting(
            settings, plan, meshes, folder, resolve, note, recorded.mode, is_reader=True
        )
        source = recorded.run / CHECKPOINTS / f"step_{self.start}" if self.has_checkpoint else None
        decision = Decision(recorded.run, recorded.run_id, 0, source, (), is_exact=True)
        algorithm = make_algorithm(settings.algorithm, resolve)
        checkpointer = Checkpointer(recorded.run, settings.checkpoint)
        learning = LearnsHere(setting, model, algorithm, decision, checkpointer)
        state, _ = learning.begin()
        learning.open()
        if state.version != self.start:
            raise CheckpointError(
                f"the weights to start from are of version {state.version}, not {self.start}"
            )
        parts = Parts(learning.roles, None, None, None, None, algorithm, checkpointer, _Quiet(), {})
        return Driver(parts, settings, state), renderer.tokenizer.decode

    def _compare_digest(
        self, driver: Driver, version: int, found: dict[int, tuple[str, str]]
    ) -> None:
        """Of the weights as they are served."""
        if version in self.recorded.digests:
            dtype = jnp.dtype(driver.settings.model.dtype)
            values = digest.digest_arrays(driver.parts.learner.params, dtype)
            found[version] = (self.recorded.digests[version], digest.of_all(values))


def _compare(
    driver: Driver,
    step: int,
    groups: Sequence[Group],
    batch: Batch,
    learned: Mapping[str, Metric],
    row: Mapping[str, float],
) -> tuple[dict[str, Pair], tuple[str, ...], tuple[str, ...]]:
    """Every figure that the batch decides: recorded and replayed; the row's other names; lines of alarms."""
    alarms = driver.guards.check(step, groups, batch, learned)
    ours, _ = values_of({**learned, **group_metrics(groups), **alarm_metrics(alarms)})
    families = {name.split("/")[0] for name in ours} | {"alarm"}
    metrics: dict[str, Pair] = {n: (row.get(n), value) for n, value in sorted(ours.items())}
    other = []
    for name, value in row.items():
        if name in metrics or "/" not in name:
            continue
        base = name.split(".")[0]
        of_batch = base != BOUND and not base.endswith(OF_ALL)
        if name.split("/")[0] in families and of_batch:
            metrics[name] = (value, None)
        else:
            other.append(name)
    return metrics, tuple(other), tuple(alarm.line for alarm in alarms)


def _first(run: Path) -> str:
    names = sorted((p.name for p in (run / CHECKPOINTS).glob("step_*")), key=lambda n: int(n[5:]))
    return names[0] if names else "missing"


# --- for a person ---


def report_lines(outcome: Outcome) -> Iterator[str]:
    """The findings, widest first; text of a model is escaped."""
    yield from _verdict(outcome)
    yield from (f"  {line}" for line in outcome.alarms)
    figures = outcome.figures
    yield f"tokens: {len(figures.lag)} trained, of {len(figures.episodes)} episodes"
    yield "  lag  tokens  mean |d|   max |d|        k3  ratio min / mean / max  beyond clip"
    for row in by_lag(figures):
        lag = "none" if row["lag"] < 0 else f"{row['lag']:.0f}"
        ratios = f"{row['ratio_min']:.3f} / {row['ratio_mean']:.3f} / {row['ratio_max']:.3f}"
        yield (
            f"  {lag:>4} {row['tokens']:>7.0f} {row['abs_mean']:>9.2e} {row['abs_max']:>9.2e} {row['k3']:>9.2e}"
            f"  {ratios:>22}  {row['clipped']:>10.1%}"
        )
    for name, values in (("advantage", figures.advantage), ("ratio", figures.ratio)):
        if found := summary(values):
            yield f"{name}: " + "  ".join(f"{k} {v:.4g}" for k, v in found.items())
    yield "gradient, its norm by parameter before clipping (share of the square):"
    total = math.fsum(norm**2 for norm in outcome.grad_norms.values())
    for name, norm in sorted(outcome.grad_norms.items(), key=lambda item: -item[1]):
        yield f"  {norm:>9.3e}  {norm**2 / total if total else 0.0:>6.1%}  {name}"
    yield f"tokens that trainer and sampler differ in most, of {len(figures.lag)}:"
    for token in outcome.worst:
        yield (
            f"  {token['uid']} at {token['position']} (turn {token['turn']}, lag {token['lag']}): sampler"
            f" {token['sampler']:.4f}, trainer {token['trainer']:.4f}, ratio {token['ratio']:.4f}, advantage"
            f" {token['advantage']:.3g}"
        )
        yield f"    {token['before']!a} -> {token['text']!a} -> {token['after']!a}"


def _verdict(outcome: Outcome) -> Iterator[str]:
    bad, num = outcome.differing, len(outcome.metrics)
    told = f"step {outcome.step}, replayed from version {outcome.start}"
    digests = f"{len(outcome.digests)} digests of published versions"
    if not outcome.digests:
        digests = "no digest of a published version (none is recorded)"
    if not bad:
        yield f"{told}: EQUAL bit for bit: {num} figures and {digests}"
    else:
        yield f"{told}: DIFFERS in {len(bad)} of {num} figures and {digests}:"
        for version, (a, b) in outcome.digests.items():
            if a != b:
                yield f"  version {version}: digest {a} recorded, {b} replayed"
        for name, (a, b) in outcome.metrics.items():
            if a != b:
                yield f"  {name}: {a} recorded, {b} replayed"
    yield f"not replayed, as no batch decides it: {len(outcome.other)} figures of clocks, servers and queues"
