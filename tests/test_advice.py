"""Rules over metrics rows: each speaks at its threshold and not below it, and bugs silence tuning."""

import re
from dataclasses import replace

import pytest

from rl_jax import schema
from rl_jax.advice import KINDS, RULES, TESTS, advise, spans
from rl_jax.metrics import unknown_names

BY_NAME = {rule.name: rule for rule in RULES}
CONFIG = {"engine": {"slots": 32}}


def rows_of(values, metric, **others):
    """One row a minute, each with the metric's value (None: absent)."""
    made = []
    for i, value in enumerate(values):
        row = {"step": i + 1, "time": 1000.0 + 60.0 * i, "attempt": 0, "time/step_s": 2.0}
        row |= {
            name: others[name] if not callable(others[name]) else others[name](i) for name in others
        }
        if value is not None:
            row[metric] = value
        made.append(row)
    return made


def names(rows, **kw):
    return [one.rule for one in advise(rows, CONFIG, **kw).advice]


def test_table_is_whole():
    assert len(BY_NAME) == len(RULES)
    for rule in RULES:
        assert rule.kind in KINDS and rule.test in TESTS and rule.meaning and rule.remedy
        assert (rule.test == "share") == bool(rule.per)
        metrics = [m for m in (rule.metric, rule.per, rule.less) if m and m != "nonfinite_dropped"]
        assert unknown_names(metrics) == ()


def test_remedies_name_settings_that_exist():
    keys = set(schema.leaf_keys())
    parts = "|".join(sorted({key.split(".")[0] for key in keys if "." in key}))
    named = {
        key.rstrip(".")
        for rule in RULES
        for key in re.findall(rf"\b(?:{parts})\.[a-z_.]*[a-z]", rule.remedy)
        if not key.endswith((".log", ".jsonl"))
    }
    assert len(named) > 8
    known = keys | {key.rsplit(".", 1)[0] for key in keys}
    assert named <= known


@pytest.mark.parametrize(
    "rule", [r for r in RULES if r.test in ("above", "below")], ids=lambda r: r.name
)
def test_threshold_holds_where_it_stands(rule):
    """On the threshold nothing is said; beyond it something is, after as many steps as the rule says and not before."""
    num = max(rule.steps, 1)
    past = rule.threshold + 0.01 if rule.test == "above" else rule.threshold - 0.01
    others = {"serve/running": 3.0} if rule.only_below else {}
    assert names(rows_of([rule.threshold] * (num + 3), rule.metric, **others)) == []
    assert names(rows_of([past] * num, rule.metric, **others)) == [rule.name]
    if num > 1:
        assert names(rows_of([past] * (num - 1), rule.metric, **others)) == []
    (one,) = advise(rows_of([past] * num, rule.metric, **others), CONFIG).advice
    assert rule.metric in one.text and f"{rule.threshold:g}" in one.text
    assert rule.meaning in one.text and rule.remedy in one.text


def test_bugs_silence_tuning_and_the_silence_is_counted():
    slow = rows_of([0.05] * 6, "perf/train_mfu")
    assert names(slow) == ["mfu_low"]
    broken = [{**row, "mismatch/k3": 0.3} for row in slow]
    advised = advise(broken)
    assert [one.rule for one in advised.advice] == ["mismatch_k3"]
    assert advised.num_suppressed == 1 and "1 lines" in advised.lines[-1]
    # Health is not tuning: a policy that collapses is told beside the bug, and after it.
    both = [{**row, "policy/entropy": 0.01} for row in broken]
    assert names(both) == ["mismatch_k3", "entropy_low"]


def test_jump_compares_with_the_median_before():
    assert names(rows_of([1.0, 1.1, 0.9, 1.0, 3.2], "policy/entropy")) == ["entropy_jump"]
    assert names(rows_of([1.0, 1.1, 0.9, 1.0, 2.9], "policy/entropy")) == []
    assert names(rows_of([1.0, 3.2], "policy/entropy")) == []  # nothing to compare with


def test_share_is_of_what_grew():
    issued = lambda i: 100.0 * (i + 1)
    few = rows_of(
        [0.04 * issued(i) for i in range(30)], "episodes/errored", **{"episodes/issued": issued}
    )
    assert names(few) == []
    many = rows_of(
        [0.06 * issued(i) for i in range(30)], "episodes/errored", **{"episodes/issued": issued}
    )
    assert names(many) == ["errored"]
    # What failed long ago, and fails no more, is not told.
    old = rows_of(
        [min(60.0, 10.0 * i) for i in range(60)], "episodes/errored", **{"episodes/issued": issued}
    )
    assert names(old) == []


def test_cancelled_counts_without_what_was_redundant_and_only_after_half_an_hour():
    issued = lambda i: 100.0 * (i + 1)
    cancelled = [0.2 * issued(i) for i in range(60)]
    rows = rows_of(cancelled, "episodes/cancelled", **{"episodes/issued": issued})
    assert names(rows) == ["aborted"]
    assert names(rows[:25]) == []  # 24 minutes
    redundant = {"episodes/cancelled_redundant": lambda i: 0.2 * issued(i)}
    assert (
        names(rows_of(cancelled, "episodes/cancelled", **{"episodes/issued": issued}, **redundant))
        == []
    )


def test_dropped_figures_are_told_when_their_number_grows():
    assert names(rows_of([None, None, 1, 1], "nonfinite_dropped")) == ["dropped_figures"]
    assert names(rows_of([None, 1] + [1] * 30, "nonfinite_dropped")) == []  # long ago
    assert names(rows_of([None] * 4, "nonfinite_dropped")) == []


def test_open_step_needs_a_running_run_and_half_an_hour():
    rows = rows_of([2.0] * 5, "time/step_s")
    last = rows[-1]["time"]
    assert names(rows, now_s=last + 1801) == ["stalled"]
    assert names(rows, now_s=last + 1799) == []
    assert names(rows) == []  # of a dead run nothing is open
    slow = rows_of([600.0] * 5, "time/step_s")
    assert names(slow, now_s=last + 3599) == []  # less than six times what a step takes


def test_kv_is_short_only_where_slots_are_free():
    full = lambda running: rows_of([0.95] * 3, "serve/kv_usage", **{"serve/running": running})
    assert names(full(15.0)) == ["kv_full"]
    assert names(full(17.0)) == []
    assert advise(full(15.0)).advice == ()  # without a config the limit is not known


def test_alarm_stays_for_twenty_steps_and_absent_means_quiet():
    values = [None, 1.0] + [None] * 20
    assert names(rows_of(values, "alarm/lag0")) == ["lag0"]
    assert names(rows_of([*values, None], "alarm/lag0")) == []


def test_tag_speaks_where_all_together_do_not():
    rows = rows_of([0.3] * 6, "reward/zero_std_groups")
    rows = [
        {**row, "reward/zero_std_groups.a": 0.9, "reward/zero_std_groups.b": 0.1} for row in rows
    ]
    (one,) = advise(rows).advice
    assert one.metric == "reward/zero_std_groups.a" and one.first == 1 and one.last == 6


def test_one_pools_waits_are_not_all_devices():
    rows = [{**row, "goodput/run.prefill": 0.05} for row in rows_of([0.5] * 6, "goodput/run")]
    assert names(rows) == []
    assert names(rows_of([0.2] * 6, "goodput/run")) == ["devices_wait"]


def test_evaluations_and_values_that_are_no_numbers_say_nothing():
    rows = [{"step": 1, "time": 0.0, "attempt": 0, "is/ess": 0.1}] * 5
    assert names(rows) == []  # no step took time
    odd = rows_of(["x", True, float("nan"), None, [1]], "is/ess")
    assert names(odd) == []
    assert names([]) == []


def test_spans_are_what_a_curve_is_marked_with():
    rule = replace(BY_NAME["ess"], steps=2)
    rows = rows_of([0.9, 0.1, 0.1, 0.9, 0.1, 0.9, 0.2, 0.2, 0.2], "is/ess")
    assert spans(rule, rows, "is/ess") == [(2, 3), (7, 9)]
