"""Guards: what a step's numbers must not be, each with one line that names the cause and what to do about it.

Owns: the tests of GuardSettings and how often each may speak. A guard that trips is in the step's metrics row each time
(alarm/NAME), in the terminal and in events.jsonl the first time and then once in settings.every steps, with how often
it tripped in between. Nothing is stopped unless a guard's word is `raise`; then the run ends after the step, saved.
Guards:
zero_signal  no token is trained, or every advantage is 0: nothing pulls, and the reward curve would stay flat silently.
nonfinite    the update was skipped (learner.max_skipped ends the run), or another figure of the step is not finite.
ess          effective sample size of the importance weights over their number (is/ess): a few tokens carry the step.
k3           trainer against sampler over all trained tokens: staleness and numerics together.
truncated    nearly every episode was cut by its context or its turn's length: what it would have done is not seen.
lag0         mean |difference| where the same weights sampled and train: numerics alone, so never staleness.
Source: ESS predicts collapse, arXiv:2602.17616; the bounds of k3 and of lag 0 are what peers call broken.
Must not: touch a device, or change a step.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_jax.learner.batch import Batch
from rl_jax.metrics import Metric
from rl_jax.settings import GuardSettings
from rl_jax.types import Group, Outcome, Trajectory

GUARDS = ("zero_signal", "nonfinite", "truncated", "ess", "k3", "lag0")
LAG0_ABOVE = {"float32": 1e-3, "bfloat16": 0.05}  # of mean |trainer - sampler|, by model.dtype


class GuardTripped(RuntimeError):
    """A guard whose word is `raise` tripped."""


@dataclass(frozen=True)
class Alarm:
    name: str
    text: str
    speaks: bool  # not the same line again so soon
    is_fatal: bool

    @property
    def line(self) -> str:
        return f"ALARM {self.name}: {self.text}"


class Guards:
    """Sole writer of how often each guard tripped. dtype: model.dtype, by which lag 0 is judged."""

    def __init__(self, settings: GuardSettings, dtype: str):
        self._settings = settings
        self._lag0_above = settings.lag0_above or LAG0_ABOVE[dtype]
        self._last_line: dict[str, int] = {}  # name -> step at which it spoke
        self._silent: Counter[str] = Counter()  # times since

    def check(
        self,
        step: int,
        groups: Sequence[Group],
        batch: Batch,
        metrics: Mapping[str, Metric | float],
    ) -> list[Alarm]:
        """All that trip at this step. metrics: the learner's, of `batch`, which was made of `groups`."""
        s = self._settings
        found = [
            ("zero_signal", s.zero_signal, zero_signal(groups, batch)),
            ("nonfinite", s.nonfinite, nonfinite(metrics)),
            ("truncated", s.truncated, truncated(groups, s.truncated_above)),
            ("ess", s.ess, self._ess(metrics)),
            ("k3", s.k3, self._k3(metrics)),
            ("lag0", s.lag0, self._lag0(metrics)),
        ]
        return [
            self._alarm(step, name, text, word)
            for name, word, text in found
            if text is not None and word != "off"
        ]

    def _alarm(self, step: int, name: str, text: str, word: str) -> Alarm:
        last = self._last_line.get(name)
        if word == "warn" and last is not None and step - last < self._settings.every:
            self._silent[name] += 1
            return Alarm(name, text, False, False)
        if num := self._silent.pop(name, 0):
            text = f"{text} ({num} more times since step {last})"
        self._last_line[name] = step
        return Alarm(name, text, True, word == "raise")

    def _ess(self, metrics: Mapping[str, Metric | float]) -> str | None:
        value, bound = _value(metrics, "is/ess"), self._settings.ess_below
        if value is None or value >= bound:
            return None
        return (
            f"is/ess={value:.3g} is below guards.ess_below={bound:g}: a few tokens carry the importance weights; lower"
            " rollout.max_staleness or learner.learning_rate, or bound the weights with algorithm.correction"
        )

    def _k3(self, metrics: Mapping[str, Metric | float]) -> str | None:
        value, bound = _value(metrics, "mismatch/k3"), self._settings.k3_above
        if value is None or value <= bound:
            return None
        fresh = _value(metrics, "mismatch/k3_lag0_pure")
        if fresh is not None and fresh > bound:
            where = f"and {fresh:.3g} where the same weights sampled, so it is not staleness; see the guard lag0"
        else:
            where = (
                "by staleness: lower rollout.max_staleness or learner.learning_rate, or set weights.kv=recompute"
                " and algorithm.correction.reject_stat=k3"
            )
        return f"mismatch/k3={value:.3g} is above guards.k3_above={bound:g}, {where}"

    def _lag0(self, metrics: Mapping[str, Metric | float]) -> str | None:
        value, bound = _value(metrics, "mismatch/abs_mean_lag0_pure"), self._lag0_above
        if value is None or value <= bound:
            return None
        return (
            f"mismatch/abs_mean_lag0_pure={value:.3g} is above {bound:g} (guards.lag0_above): trainer and sampler"
            " disagree under the same weights; check the sampling settings, model.dtype against the servers' and the"
            " digests of the last sync, and do not trust a ratio until it is mended"
        )


def alarm_metrics(alarms: Sequence[Alarm]) -> dict[str, float]:
    """1 for each guard that tripped at the step; the others are absent."""
    return {f"alarm/{alarm.name}": 1 for alarm in alarms}


def zero_signal(groups: Sequence[Group], batch: Batch) -> str | None:
    """Why no token of the batch pulls; None if one does."""
    if batch.targets_mask.any():
        if batch.advantages[batch.targets_mask].any():
            return None
        return f"every advantage is 0: {_why_flat(groups)}"
    members = [trajectory for group in groups for trajectory in group.trajectories]
    causes = ", ".join(
        f"{num} {why}" for why, num in Counter(map(_why_untrained, members)).most_common()
    )
    return f"no token is trained: of {len(members)} episodes {causes or 'there is none'}; the update is skipped"


def nonfinite(metrics: Mapping[str, Metric | float]) -> str | None:
    """Which figures of the step are not finite; None if all are."""
    values = ((name, _value(metrics, name)) for name in metrics)
    bad = sorted(name for name, value in values if value is not None and not math.isfinite(value))
    skipped = [name for name in metrics if name.endswith("/skipped") and _value(metrics, name)]
    if not bad and not skipped:
        return None
    what = f"{', '.join(bad)} not finite" if bad else "a gradient is not finite"
    done = f"the update was skipped ({', '.join(skipped)})" if skipped else "the update was applied"
    return f"{what}, {done}: lower learner.learning_rate, and look at mismatch/* and the batch in quarantine/"


def truncated(groups: Sequence[Group], above: float) -> str | None:
    """What cut the episodes, where more than this share of them ended by a length; None where not.

    The limit of turns is not counted: it is part of a task.
    """
    members = [trajectory for group in groups for trajectory in group.trajectories]
    cut = Counter(t.truncated_by for t in members if t.truncated_by in ("context", "length"))
    if not members or cut.total() <= above * len(members):
        return None
    causes = {
        "context": "engine.context (and learner.row_tokens with it), or say less in the environment",
        "length": "rollout.max_new_tokens",
    }
    return (
        f"{cut.total()} of {len(members)} episodes were cut by "
        + " and ".join(f"{name} ({num})" for name, num in cut.most_common())
        + ", so that their ends were not seen: raise "
        + "; raise ".join(causes[name] for name, _ in cut.most_common())
    )


def _why_flat(groups: Sequence[Group]) -> str:
    values = list(_rewards(groups))
    differing = sum(len(set(own)) > 1 for own in values)
    if differing:
        return (
            f"rewards differ in {differing} of {len(values)} groups, but the algorithm makes nothing of it (groups of"
            " one, or members that algorithm.filter or overlong_filter left out)"
        )
    flat = [own[0] for own in values if own]
    if len(set(flat)) == 1:
        what = f"every episode earned {flat[0]:g}, so the task is solved, out of reach, or its reward is broken"
    else:
        low, high = min(flat, default=0), max(flat, default=0)
        what = f"rewards are equal within each of {len(values)} groups (means {low:g} to {high:g})"
    return f"{what}; change the difficulty, raise rollout.group_size, or set algorithm.filter.equal_rewards"


def _rewards(groups: Sequence[Group]) -> Iterator[list[float]]:
    for group in groups:
        yield [t.reward.value for t in group.trajectories if t.reward.value is not None]


def _why_untrained(t: Trajectory) -> str:
    if t.outcome not in (Outcome.OK, Outcome.TRUNCATED):
        return t.outcome.value
    if not (np.asarray(t.versions) >= 0).any() and not t.loss_mask.any():
        return "sampled no token"
    if not t.loss_mask.any():
        return "left out by algorithm.filter"
    if t.reward.status != "scored":
        return f"not scored ({t.reward.status})"
    if t.outcome is Outcome.TRUNCATED:
        return "truncated and left out by algorithm.overlong_filter"
    return "left out by the algorithm"


def _value(metrics: Mapping[str, Metric | float], name: str) -> float | None:
    metric = metrics.get(name)
    return metric.mean if isinstance(metric, Metric) else metric
