"""metrics.py: pairs instead of means of means, missing is not 0, valid JSON always."""

import math
from itertools import combinations

import pytest

from rl_jax.metrics import (
    Metric,
    MetricsWriter,
    merge_rows,
    pass_rates,
    read_metrics,
    unknown_names,
    values_of,
)


def test_merged_mean_is_the_global_mean_not_the_mean_of_means():
    one, thousand = Metric.of([1.0]), Metric.of([0.0] * 999 + [5.0])
    merged = one.merge(thousand)
    assert merged == Metric(6.0, 1001, 0.0, 5.0)
    assert merged.mean == 6.0 / 1001
    assert one.merge(thousand) == thousand.merge(one)


def test_missing_is_none_and_never_zero():
    assert Metric.of([]).mean is None
    assert values_of({"reward/mean": Metric.of([]), "policy/loss": None}) == ({}, 0)
    assert merge_rows([{"a/b": Metric(1, 1)}, {"c/d": Metric(2, 1)}]) == {
        "a/b": Metric(1, 1),
        "c/d": Metric(2, 1),
    }


def test_extreme_known_on_one_side_survives_a_merge():
    assert Metric(1, 1).merge(Metric(4, 2, 1.0, 3.0)) == Metric(5, 3, 1.0, 3.0)


def test_every_name_must_be_in_the_table_up_to_tag_and_lag():
    assert unknown_names(["reward/mean", "reward/mean.chain_sum"]) == ()
    assert unknown_names(["mismatch/k3_lag0_pure", "mismatch/abs_mean_lag12_mixed"]) == ()
    assert unknown_names(["reward/meen", "mismatch/k3_lag_pure"]) == (
        "reward/meen",
        "mismatch/k3_lag_pure",
    )


def test_pass_at_k_is_the_share_of_all_draws_of_k_members_that_hold_a_solved_one():
    groups = [[1.0, 0.0, 0.5, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 1.0], [0.0] * 5]
    rates = pass_rates(
        [*groups, [1.0, None, 0.0]]
    )  # the last has two rewards: nothing to say of 4 or 5
    assert sorted(rates) == [2, 4, 5]
    for k, counted in ((2, [*groups, [1.0, 0.0]]), (4, groups), (5, groups)):
        draws = [[1.0 in draw for draw in combinations(g, k)] for g in counted]
        assert rates[k].mean == pytest.approx(sum(sum(d) / len(d) for d in draws) / len(counted))
    assert rates[5] == Metric(2.0, 3, 0.0, 1.0)  # any of the group
    assert pass_rates([[1.0], [None]]) == {} == pass_rates([])
    assert (
        unknown_names(f"reward/pass_at{k}{end}" for k in rates for end in ("", "_all", ".x")) == ()
    )


def test_writer_drops_and_counts_what_is_not_finite(tmp_path):
    writer = MetricsWriter(tmp_path, strict=True)
    writer.write(1, {"reward/mean": Metric(2.0, 4), "policy/loss": math.nan, "sync/bytes": 10})
    writer.write(2, {"policy/loss": Metric(math.inf, 1)})
    writer.close()
    first, second = read_metrics(tmp_path)
    assert (first["step"], first["reward/mean"], first["sync/bytes"]) == (1, 0.5, 10)
    assert "policy/loss" not in first and first["nonfinite_dropped"] == 1
    assert second["nonfinite_dropped"] == writer.num_nonfinite == 2


def test_unknown_name_raises_if_strict_and_is_written_otherwise(tmp_path):
    with pytest.raises(ValueError, match="METRICS: reward/meen"):
        MetricsWriter(tmp_path, strict=True).write(1, {"reward/meen": 1.0})
    MetricsWriter(tmp_path).write(1, {"reward/meen": 1.0})
    assert read_metrics(tmp_path)[0]["reward/meen"] == 1.0


def test_full_disk_costs_rows_not_the_run(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    for step in range(3):
        writer.write(step, {"reward/mean": 1.0})
    writer.close()
    assert writer.num_lost == 3


def test_an_evaluation_of_the_version_that_a_resume_goes_on_from_supersedes_no_step(tmp_path):
    for attempt, steps in ((0, (1, 2, 3)), (1, (3,))):
        writer = MetricsWriter(tmp_path, attempt)
        if attempt:
            writer.write(2, {"eval/success.a": 1.0, "time/eval_s.a": 1.0})
        for step in steps:
            writer.write(step, {"policy/loss": float(10 * attempt + step)})
        writer.close()
    rows = [(r["step"], r.get("policy/loss")) for r in read_metrics(tmp_path)]
    assert rows == [(1, 1), (2, 2), (2, None), (3, 13)]


def test_later_attempt_supersedes_steps_that_were_lost(tmp_path):
    for attempt, steps in ((0, (1, 2, 3, 4)), (1, (3, 4, 5))):
        writer = MetricsWriter(tmp_path, attempt)
        for step in steps:
            writer.write(step, {"policy/loss": float(10 * attempt + step)})
        writer.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "tr')  # killed while writing
    rows = read_metrics(tmp_path)
    assert [(r["step"], r["policy/loss"]) for r in rows] == [
        (1, 1),
        (2, 2),
        (3, 13),
        (4, 14),
        (5, 15),
    ]
