"""The guards: each trips on its own cause, names it, speaks once in a while, and ends a run only if asked to."""

import re
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.algorithms.grpo import Grpo
from rl_jax.guards import GUARDS, Guards, nonfinite, zero_signal
from rl_jax.learner.batch import pack, with_advantages
from rl_jax.metrics import METRICS, Metric, unknown_names
from rl_jax.settings import AlgorithmSettings, GuardSettings, LearnerSettings
from rl_jax.testing.trajectories import PROMPT, fake_group
from rl_jax.types import Outcome

FINE = {"is/ess": Metric(0.9, 1), "mismatch/k3": Metric(0.01, 10)}


def batch_of(groups, **options):
    settings = AlgorithmSettings(**options)
    batch = pack(groups, LearnerSettings(row_tokens=32))
    return with_advantages(batch, groups, {}, Grpo(settings), None, settings)[0]


def trips(metrics, groups=None, settings=GuardSettings(), dtype="float32"):
    groups = groups or [fake_group(0, [0.0, 1.0], [8, 8])]
    found = Guards(settings, dtype).check(1, groups, batch_of(groups), {**FINE, **metrics})
    return {alarm.name: alarm for alarm in found}


def unscored(group):
    return replace(group, trajectories=tuple(
        replace(t, reward=replace(t.reward, value=None, status="timeout")) for t in group.trajectories
    ))  # fmt: skip


def cut(group):
    members = [replace(t, outcome=Outcome.TRUNCATED) for t in group.trajectories]
    return replace(group, trajectories=tuple(members))


def rejected(group):
    members = [replace(t, loss_mask=np.zeros_like(t.loss_mask)) for t in group.trajectories]
    return replace(group, trajectories=tuple(members))


def test_a_step_without_fault_trips_nothing():
    assert trips({"mismatch/abs_mean_lag0_pure": Metric(1e-5, 1)}) == {}


@pytest.mark.parametrize(
    ("groups", "options", "line"),
    [
        ([fake_group(0, [1.0, 1.0], [8, 9]), fake_group(1, [1.0, 1.0], [8, 9])], {},
         "every advantage is 0: every episode earned 1, so the task is solved"),
        ([fake_group(0, [1.0, 1.0], [8, 9]), fake_group(1, [0.0, 0.0], [8, 9])], {},
         r"equal within each of 2 groups \(means 0 to 1\)"),
        ([fake_group(0, [1.0], [8]), fake_group(1, [0.0, None], [8, 9])], {}, "every advantage is 0"),
        ([unscored(fake_group(0, [1.0, 0.0], [8, 9]))], {}, r"of 2 episodes 2 not scored \(timeout\)"),
        ([cut(fake_group(0, [1.0, 0.0], [8, 9]))], {"overlong_filter": True},
         "2 truncated and left out by algorithm.overlong_filter"),
        ([rejected(fake_group(0, [1.0, 0.0], [8, 9]))], {}, "2 left out by algorithm.filter"),
        ([fake_group(0, [1.0, 0.0], [PROMPT, PROMPT])], {}, "2 sampled no token"),
        ([], {}, "there is none"),
    ],
)  # fmt: skip
def test_zero_signal_names_its_cause(groups, options, line):
    """S4."""
    assert re.search(line, zero_signal(groups, batch_of(groups, **options)))


def test_episodes_cut_by_a_length_are_told_with_what_to_raise():
    def cut_by(*causes):
        group = fake_group(0, [0.0] + [1.0] * (len(causes) - 1), [8] * len(causes))
        pairs = zip(group.trajectories, causes)
        members = [
            replace(t, outcome=Outcome.TRUNCATED, truncated_by=cause) if cause else t
            for t, cause in pairs
        ]
        return replace(group, trajectories=tuple(members))

    found = trips({}, [cut_by("context", "context", "length")])["truncated"]
    assert "3 of 3 episodes were cut by context (2) and length (1)" in found.text
    assert "raise engine.context" in found.text and "raise rollout.max_new_tokens" in found.text
    assert trips({}, [cut_by("context", "context", None)]) == {}
    assert trips({}, [cut_by("turn_limit", "turn_limit")]) == {}  # a limit of the task's own
    half = GuardSettings(truncated_above=0.5)
    assert list(trips({}, [cut_by("context", "context", None)], half)) == ["truncated"]
    off = GuardSettings(truncated="off")
    assert trips({}, [cut_by("length", "length")], off) == {}


def test_one_group_that_differs_is_a_signal():
    groups = [fake_group(0, [1.0, 1.0], [8, 9]), fake_group(1, [1.0, 0.0], [8, 9])]
    assert zero_signal(groups, batch_of(groups)) is None


@pytest.mark.parametrize(
    ("name", "metrics", "advice"),
    [
        ("ess", {"is/ess": Metric(0.49, 1)}, "lower rollout.max_staleness"),
        ("k3", {"mismatch/k3": Metric(0.06, 1)}, "by staleness"),
        ("k3", {"mismatch/k3": Metric(0.06, 1), "mismatch/k3_lag0_pure": Metric(0.07, 1)}, "not staleness"),
        ("lag0", {"mismatch/abs_mean_lag0_pure": Metric(2e-3, 1)}, "under the same weights"),
        ("nonfinite", {"policy/entropy": Metric(np.nan, 1)}, "policy/entropy not finite, the update was applied"),
        ("nonfinite", {"optim/skipped": Metric(1, 1), "policy/loss": Metric(np.inf, 1)}, "was skipped"),
        ("nonfinite", {"critic/skipped": Metric(1, 1)}, "was skipped (critic/skipped)"),
    ],
)  # fmt: skip
def test_each_guard_trips_beyond_its_bound_with_advice(name, metrics, advice):
    """S2: on numbers of the step, whatever made them."""
    found = trips(metrics)
    assert list(found) == [name] and advice in found[name].text
    assert found[name].speaks and not found[name].is_fatal
    assert f"alarm/{name}" in METRICS
    assert trips(metrics, settings=GuardSettings(**{name: "off"})) == {}
    assert trips(metrics, settings=GuardSettings(**{name: "raise"}))[name].is_fatal


def test_lag_0_is_judged_by_the_dtype():
    gap = {"mismatch/abs_mean_lag0_pure": Metric(2e-3, 1)}
    assert trips(gap, dtype="bfloat16") == {}
    assert list(trips(gap, settings=GuardSettings(lag0_above=1e-3), dtype="bfloat16")) == ["lag0"]


def test_an_alarm_speaks_once_in_a_while_and_counts_between():
    groups = [fake_group(0, [0.0, 1.0], [8, 8])]
    guards, batch, bad = (
        Guards(GuardSettings(every=3), "float32"),
        batch_of(groups),
        {"is/ess": Metric(0.1, 1)},
    )
    spoke = [guards.check(step, groups, batch, bad)[0] for step in range(1, 8)]
    assert [alarm.speaks for alarm in spoke] == [True, False, False, True, False, False, True]
    assert "2 more times since step 1" in spoke[3].text


def test_settings_have_a_word_for_each_guard():
    assert all(getattr(GuardSettings(), name) == "warn" for name in GUARDS)
    assert nonfinite({"unmeasured": Metric(0.0, 0)}) is None


def test_each_guard_has_a_name_in_the_table_of_metrics():
    assert unknown_names([f"alarm/{guard}" for guard in GUARDS]) == ()
