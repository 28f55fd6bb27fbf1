"""recorder.py: what a step's row holds of its groups, rates of the step alone, and the summary's fields."""

import io
import json
import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rl_jax.metrics import Metric, unknown_names
from rl_jax.progress import Progress
from rl_jax.recorder import Recorder, group_metrics
from rl_jax.settings import MetricsSettings
from rl_jax.testing.trajectories import fake_group
from rl_jax.timeline import Traces
from rl_jax.types import FinishReason, Outcome, Turn


def with_turns(trajectory, *finishes):
    """Turns of two tokens each that ended so."""
    two = np.zeros(2, np.int32)
    turn = Turn(
        two, two, np.zeros(2, np.float32), None, (), np.zeros(2, bool), FinishReason.STOP,
        cached_prompt=0, server="s", pool="p", times_s={},
    )  # fmt: skip
    turns = tuple(replace(turn, finish=finish) for finish in finishes)
    cut = finishes[-1] is FinishReason.LENGTH
    return replace(trajectory, turns=turns, outcome=Outcome.TRUNCATED if cut else Outcome.OK)


def some_group():
    group = fake_group(0, [1.0, 0.0], [12, 12])
    first, second = group.trajectories
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    members = (with_turns(first, stop, stop, stop), with_turns(second, length))
    return replace(group, trajectories=members)


@pytest.fixture
def recorder(tmp_path):
    rows = []
    run_dir = SimpleNamespace(
        path=tmp_path, status=lambda *a, **k: None, rollouts=lambda s, k: tmp_path
    )
    writer = SimpleNamespace(write=lambda step, row: rows.append((step, dict(row))))
    progress = Progress(2, "plain", stream=io.StringIO())
    made = Recorder(run_dir, writer, progress, MetricsSettings(rollouts_every=0), lambda tokens: "")
    yield made, rows
    made.close()
    progress.close()


def test_row_says_how_turns_and_episodes_ended():
    row = group_metrics([some_group()])
    assert (row["finish/stop"].mean, row["finish/length"].mean) == (0.75, 0.25)
    assert row["length/truncated"].mean == 0.5
    assert (row["length/response"].mean, row["length/turns"].mean) == (4.0, 2.0)
    assert row["reward/success"].mean == 0.5
    assert (row["length/response_ended"].mean, row["length/response_max"].mean) == (6.0, 6.0)


def test_row_says_how_rewards_lie_and_which_groups_are_solved():
    rewards = [[1.0, 1.0], [0.0, 0.0], [0.5, 1.0], [0.25, 0.25]]
    groups = [fake_group(i, values, [12, 12]) for i, values in enumerate(rewards)]
    first = groups[0].trajectories[0]
    parts = replace(first, reward=replace(first.reward, parts={"env": 0.75, "format": 0.25}))
    groups[0] = replace(groups[0], trajectories=(parts, groups[0].trajectories[1]))
    row = {name: metric.mean for name, metric in group_metrics(groups).items()}
    assert not unknown_names(row)
    found = [row[f"reward/{name}"] for name in ("min", "max", "p10", "p90")]
    np.testing.assert_allclose(found, [0.0, 1.0, *np.percentile(np.ravel(rewards), [10, 90])])
    assert row["reward/solved_all_groups"] == 0.25 and row["reward/solved_no_groups"] == 0.5
    assert row["reward/zero_std_groups"] == 0.75
    assert (row["reward/part.env"], row["reward/part.format"]) == (0.75, 0.25)
    assert row["reward/pass_at2"] == 0.5 and "reward/pass_at1" not in row


def test_rates_of_a_step_leave_out_the_tokens_of_an_evaluation_before_it(recorder):
    recorder, rows = recorder
    served = {"decode_tokens": 0.0}
    recorder.watch(lambda: served, lambda: "nothing")
    group = some_group()
    served["decode_tokens"] = 100.0  # 8 of the evaluation, the others of episodes in flight
    recorder.evaluation(
        0,
        "t",
        SimpleNamespace(success=0.5, num_episodes=2, seconds=1.0, trajectories=group.trajectories),
    )
    served["decode_tokens"] = 140.0
    metrics = {
        "time/step_s": Metric(4.0, 1), "time/train_s": Metric(2.0, 1),
        "batch/tokens": Metric(80.0, 1), "batch/trained_tokens": Metric(66.0, 1),
    }  # fmt: skip
    recorder.step(1, [group], metrics, {})
    row = rows[-1][1]
    assert row["perf/decode_tokens_per_s"] == 10.0
    assert row["goodput/sample"] == 66 / (100 - 8 + 40)


def test_what_may_still_be_trained_is_not_counted_as_lost(recorder):
    recorder, rows = recorder
    served = {"decode_tokens": 0.0}
    recorder.watch(lambda: served, lambda: "nothing")
    steps = (  # sampled since the start, open, trained in the step, skipped -> of the run so far
        (200, 120, 80, 0, 80 / 80),  # an asynchronous start: more is under way than was trained
        (300, 90, 80, 0, 160 / 210),  # 50 tokens were of episodes that ended otherwise
        (400, 110, 80, 1, 160 / 290),  # its update was not committed
        (400, 0, 260, 0, 1.0),  # a server that died took the count of its last tokens along
    )
    for step, (sampled, num_open, trained, skipped, _) in enumerate(steps, 1):
        served["decode_tokens"] = sampled
        metrics = {
            "time/step_s": Metric(4.0, 1), "time/train_s": Metric(2.0, 1), "optim/skipped": Metric(skipped, 1),
            "batch/tokens": Metric(90.0, 1), "batch/trained_tokens": Metric(trained, 1),
        }  # fmt: skip
        recorder.step(step, [some_group()], metrics, {"open_tokens": num_open})
    assert [row["goodput/sample"] for _, row in rows] == [want for *_, want in steps]


def test_what_servers_held_is_the_mean_over_the_blocks_of_the_step_alone(recorder):
    recorder, rows = recorder
    names = ("blocks", "block_running", "block_waiting", "block_held_pages", "block_pages")
    counts = [*names, "prompt_chunks", "chunk_prompts"]
    served = dict(zip(counts, (10, 40, 0, 90, 100, 1, 9)))
    recorder.watch(lambda: served, lambda: "nothing")
    served = dict(zip(counts, (14, 46, 2, 100, 140, 3, 12)))
    recorder.step(1, [some_group()], {}, {})
    recorder.step(2, [some_group()], {}, {})  # no block, no chunk: nothing was seen
    row = {name: metric.mean for name, metric in rows[0][1].items()}
    assert (row["serve/running"], row["serve/waiting"]) == (1.5, 0.5)
    assert (row["serve/kv_usage"], row["serve/prefill_prompts"]) == (0.25, 1.5)
    assert not {"serve/running", "serve/waiting", "serve/kv_usage"} & rows[1][1].keys()


@pytest.mark.parametrize("supervised", [False, True])
def test_a_slow_first_step_is_explained_after_its_line_and_once(recorder, supervised):
    recorder, _ = recorder
    out = recorder.progress._stream
    metrics = {"time/step_s": Metric(70.0, 1), "time/train_s": Metric(70.0, 1), "batch/tokens": Metric(9.0, 1),
               "batch/trained_tokens": Metric(9.0, 1)}  # fmt: skip
    for step in (1, 2):
        if supervised:
            recorder.fitted(step, metrics)
        else:
            recorder.step(step, [some_group()], metrics, {})
    first, why, second = out.getvalue().splitlines()
    assert first.startswith("step 1/2") and second.startswith("step 2/2")
    assert why == "the first step took 70 s: the update 70 s"


def test_summary_has_the_fields_that_others_read(recorder, tmp_path):
    recorder, _ = recorder
    recorder.step(1, [some_group()], {"mismatch/abs_mean_lag0_pure": Metric(4e-6, 2)}, {})
    recorder.summary({"t": {"first": 0.25, "last": 0.75}}, {"TRAINED": 2})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("wall_s") >= 0
    assert summary == {
        "steps": 1,
        "tasks": {"t": {"first": 0.25, "last": 0.75}},
        "mismatch": {"lag0_mean_abs": 2e-6},
        "episodes": {"TRAINED": 2},
    }


def test_heartbeat_names_what_the_loop_does(recorder):
    recorder, _ = recorder
    progress, out = recorder.progress, recorder.progress._stream
    progress.heartbeat_s = 0.0
    with recorder.doing("the update of step 1"):
        progress.beat(lambda: "a batch")
    progress.beat(lambda: "a batch")
    lines = [line.partition(" s ")[2] for line in out.getvalue().splitlines()]
    assert lines == ["in the update of step 1", "before the first step, waiting for a batch"]


def test_traces_are_written_beside_the_next_step_and_what_failed_is_raised_there(tmp_path):
    may_write, written = threading.Event(), tmp_path / "index.npz"

    def render(tokens):
        assert may_write.wait(20.0)
        return ""

    run_dir = SimpleNamespace(
        path=tmp_path, status=lambda *a, **k: None, rollouts=lambda s, k: tmp_path
    )
    progress = Progress(3, "plain", stream=io.StringIO())
    writer = SimpleNamespace(write=lambda step, row: None)
    recorder = Recorder(run_dir, writer, progress, MetricsSettings(), render)
    recorder.step(1, [some_group()], {}, {})
    assert not written.exists()  # and the loop has gone on
    may_write.set()
    recorder.flush()
    assert written.exists()
    shutil.rmtree(tmp_path)
    tmp_path.write_text("no directory")
    recorder.step(2, [some_group()], {}, {})
    with pytest.raises(FileExistsError):
        recorder.step(3, [some_group()], {}, {})
    recorder.close()
    progress.close()


def test_goodput_counts_the_devices_of_all_pools_and_of_the_step_alone(recorder):
    """L32: six devices that serve, four of them idle, and two that train."""
    recorder, rows = recorder
    busy = {"busy_s.decode": 100.0, "busy_s.idle": 7.0}
    recorder.watch(lambda: dict(busy), lambda: "nothing")
    recorder.trace(Traces(), {"decode": 2, "idle": 4, "train": 2}, "train")
    metrics = {
        "time/step_s": Metric(10.0, 1), "time/train_s": Metric(5.0, 1),
        "batch/tokens": Metric(90.0, 1), "batch/trained_tokens": Metric(80.0, 1),
    }  # fmt: skip
    busy["busy_s.decode"] += 8.0  # device seconds
    recorder.step(1, [some_group()], metrics, {})
    row = rows[-1][1]
    shares = {name: row[f"goodput/run.{name}"] for name in ("decode", "idle", "train")}
    assert shares == {"decode": 0.4, "idle": 0.0, "train": 0.5}
    assert row["goodput/run"] == (2 * 0.4 + 4 * 0.0 + 2 * 0.5) / 8
    # One pool that does both: a device cannot do more than all the time.
    recorder.trace(Traces(), {"decode": 2}, "decode")
    busy["busy_s.decode"] += 14.0
    recorder.step(2, [some_group()], metrics, {})
    assert rows[-1][1]["goodput/run"] == 1.0 and "goodput/run.decode" not in rows[-1][1]
