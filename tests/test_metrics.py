"""metrics.py: pairs instead of means of means, missing is not 0, valid JSON always, and lines a person can read."""

import io
import json
import math

import pytest

from rl_jax.metrics import (
    Metric,
    MetricsWriter,
    Progress,
    duration,
    format_step,
    merge_rows,
    read_metrics,
    unknown_names,
    values_of,
)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


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


def test_step_line_has_what_was_measured_and_nothing_else():
    row = {
        "reward/mean": Metric(32, 64),
        "reward/std": 0.4,
        "reward/mean.a": Metric(24, 32),
        "reward/success.a": 0.75,
        "reward/mean.b": Metric(8, 32),
        "perf/decode_tokens_per_s": 1234.0,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "time/step_s": 2.0,
        "time/wait_for_batch_s": 0.5,
        "mismatch/abs_mean": 1.2e-6,
    }
    assert format_step(3, 120, row, eta_s=249.0) == (
        "step   3/120  reward 0.500+-0.050  a 0.750 ok 75%  b 0.250  tok/s decode 1.23k"
        "  stale 0.5/1  wait 25%  mismatch 1.2e-06  step 2.0 s  eta 4m09s"
    )
    assert format_step(1, 9, {}, None) == "step 1/9"


def test_duration_reads_like_a_person_says_it():
    assert [duration(s) for s in (0.04, 9.9, 42.4, 249, 7500)] == [
        "0.0 s",
        "9.9 s",
        "42 s",
        "4m09s",
        "2h05m",
    ]


def test_heartbeat_names_what_is_awaited_and_only_after_silence():
    clock, out = Clock(), io.StringIO()
    progress = Progress(10, "plain", heartbeat_s=30, stream=out, clock=clock)
    clock.now = 20.0
    progress.step(1, {})
    clock.now = 49.0
    assert progress.beat(lambda: "a batch") == 1.0
    clock.now = 50.0
    assert progress.beat(lambda: "a batch: 3 of 8 groups, oldest episode r/0/7/2") == 30.0
    clock.now = 81.0
    progress.beat(lambda: 1 / 0)
    assert out.getvalue().splitlines() == [
        "step  1/10",
        "... 30 s after step 1, waiting for a batch: 3 of 8 groups, oldest episode r/0/7/2",
        "... 31 s after step 1, waiting for unknown: status raised ZeroDivisionError: division by zero",
    ]


def test_heartbeat_thread_ends_with_close():
    progress = Progress(1, "none", heartbeat_s=60.0)
    progress.start_heartbeat(lambda: "nothing")
    thread = progress._beat
    progress.close()
    assert not thread.is_alive()


def test_eta_is_the_pace_since_the_first_step():
    clock, out = Clock(), io.StringIO()
    progress = Progress(10, "json", stream=out, clock=clock)
    for step, now in ((1, 60.0), (2, 61.0), (3, 62.0)):  # the first holds the compile
        clock.now = now
        progress.step(step, {"policy/loss": math.nan})
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["eta_s"] for line in lines] == [None, 8.0, 7.0]
    assert "policy/loss" not in lines[0]


def test_phase_prints_a_banner_and_its_seconds():
    clock, out = Clock(), io.StringIO()
    progress = Progress(1, "plain", stream=out, clock=clock)
    with progress.phase("compiling", "first use; kept in .cache"):
        clock.now = 12.0
    assert out.getvalue() == "compiling ... (first use; kept in .cache)\ncompiling: 12 s\n"


def test_closed_terminal_does_not_stop_the_run():
    out = io.StringIO()
    progress = Progress(1, "plain", stream=out)
    out.close()
    progress.note("lost")
    progress.step(1, {})
