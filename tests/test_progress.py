"""progress.py: lines a person can read, and a heartbeat that names where the run is and what it awaits."""

import io
import json
import math

import pytest

from rl_jax.metrics import Metric
from rl_jax.progress import Progress, duration, format_step


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


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
        "goodput/sample": 0.934,
    }
    assert format_step(3, 120, row, eta_s=249.0) == (
        "step   3/120  reward 0.500+-0.050  a 0.750 ok 75%  b 0.250  tok/s decode 1.23k"
        "  stale 0.5/1  wait 25%  mismatch 1.2e-06  G_sample 93%  step 2.0 s  eta 4m09s"
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
        "... 61 s after step 1, waiting for unknown: status raised ZeroDivisionError: division by zero",
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


def test_heartbeat_inside_a_phase_says_what_of_the_phase_is_done():
    clock, out = Clock(), io.StringIO()
    progress = Progress(1, "plain", heartbeat_s=30, stream=out, clock=clock)
    with progress.phase("warm start", status=lambda: f"step {int(clock.now)} of 450"):
        for clock.now in (30.0, 75.0):
            progress.beat(lambda: "nothing of the loop")
    with pytest.raises(ValueError), progress.phase("servers"):
        clock.now = 120.0
        progress.beat(lambda: "nothing of the loop")
        raise ValueError
    clock.now = 150.0
    progress.beat(lambda: "a batch")  # a phase that failed is no longer where the run is
    assert [line for line in out.getvalue().splitlines() if line.startswith("... ")] == [
        "... 30 s in warm start: step 30 of 450",
        "... 75 s in warm start: step 75 of 450",
        "... 45 s in servers",
        "... 75 s before the first step, waiting for a batch",
    ]


def test_first_heartbeat_of_a_phase_comes_early():
    """An environment whose import hangs is named while somebody still sits before the terminal."""
    clock, out = Clock(), io.StringIO()
    progress = Progress(1, "plain", heartbeat_s=30, stream=out, clock=clock)
    with progress.phase("environments", status=lambda: "import in env_0"):
        clock.now = 9.0
        assert progress.beat(lambda: "") == 1.0
        clock.now = 10.0
        assert progress.beat(lambda: "") == 30.0
        clock.now = 39.0
        assert progress.beat(lambda: "") == 1.0
    with progress.doing("the update of step 1"):  # of each step: as patient as ever
        clock.now = 60.0
        assert progress.beat(lambda: "") > 0
    lines = [line for line in out.getvalue().splitlines() if line.startswith("... ")]
    assert lines == ["... 10 s in environments: import in env_0"]


def test_closed_terminal_does_not_stop_the_run():
    out = io.StringIO()
    progress = Progress(1, "plain", stream=out)
    out.close()
    progress.note("lost")
    progress.step(1, {})
