"""Each adapter against a stand-in of its package and, where that is installed, against the package itself, offline."""

import json
import struct
import sys
import time
from pathlib import Path

import pytest

from rl_jax.trackers import TRACKERS, missing
from rl_jax.trackers.tracker import FlatNames, RunInfo, Sample

STAND_INS = Path(__file__).parent / "stand_ins"
ROWS = [(1, {"reward/mean": 0.5, "reward/mean.sums": 1.0}), (2, {"reward/mean": 0.75})]
HPARAMS = {"seed": 0, "mesh.pools[0].name": "all", "model.source": "", "algorithm.kl": None}
HOSTILE = "<script>alert(1)</script>\x1b[31m\x00 '\"\n| a | b |"
SAMPLE = Sample("r/0/1/0", "sums", 1.0, "ok", 2, 8, HOSTILE)


def feed(tracker, rows=ROWS):
    tracker.log_hparams(HPARAMS)
    for step, values in rows:
        tracker.log_metrics(step, values)
    tracker.log_rollouts(2, [SAMPLE])
    tracker.close()


def info(tmp_path, attempt=0, resume_step=0):
    return RunInfo("run-1", tmp_path, attempt, resume_step)


def test_names_with_one_slash_stay_and_none_begins_another():
    names = FlatNames()
    given = ["a/b", "a/b/c", "a/b_c", "a", "a.b", "a/b.c", "reward/part.pkg:attr", "x/", "/y"]
    given += ["a/b.c"]  # again
    flat = [names.of(name) for name in given]
    assert flat[0] == "a/b" and flat[-1] == flat[5]
    distinct = flat[:-1]
    assert len(set(distinct)) == len(distinct)
    assert all(name.count("/") == 1 and all(name.split("/")) for name in distinct)


def test_a_missing_package_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert len(missing(TRACKERS)) == 3 and "rl_jax[tensorboard]" in missing(["tensorboard"])[0]
    assert missing(["package.module:Class"]) == []


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def events_of(directory):
    """Of all event files: TFRecords, length u64, crc u32, data, crc u32."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(Path(directory).glob("events.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


@pytest.mark.slow
def test_tensorboard_files_have_the_rows_and_a_resume_purges_what_it_makes_again(tmp_path):
    pytest.importorskip("tensorboardX")
    from rl_jax.trackers.tensorboard import TensorBoardTracker

    feed(TensorBoardTracker(info(tmp_path)))
    found = [(e.step, v.tag, v.simple_value) for e in events_of(tmp_path) for v in e.summary.value]
    scalars = [row for row in found if row[1].startswith("reward/")]
    assert scalars == [
        (1, "reward/mean", 0.5), (1, "reward/mean.sums", 1.0), (2, "reward/mean", 0.75),
    ]  # fmt: skip
    assert any(tag.startswith("rollouts/0") for _, tag, _ in found)
    again = tmp_path / "again"
    again.mkdir()
    tracker = TensorBoardTracker(info(again, attempt=1, resume_step=1))
    tracker.log_metrics(2, {"reward/mean": 0.7})
    tracker.close()
    starts = [
        e.step for e in events_of(again) if e.session_log.status == 1
    ]  # START purges from there
    assert starts == [2]


# --- Weights & Biases ------------------------------------------------------------------------------------------------


def test_wandb_is_offline_unless_told_and_steps_are_values(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    from rl_jax.trackers.wandb import WandbTracker

    feed(WandbTracker(info(tmp_path)))
    wandb = sys.modules["wandb"]
    (run,) = wandb.RUNS
    assert run.given["mode"] == "offline" and run.given["id"] == "run-1"
    assert run.given["resume"] == "allow" and run.given["dir"] == str(tmp_path)
    assert run.logged[:2] == [{"step": step, **values} for step, values in ROWS]
    assert run.logged[2]["rollouts"].data[0][-1] == HOSTILE
    assert ("*", "step") in run.metrics and run.hparams == HPARAMS and run.finished
    WandbTracker(info(tmp_path), mode="online", project="p")
    assert wandb.RUNS[1].given["mode"] == "online" and wandb.RUNS[1].given["project"] == "p"
    del sys.modules["wandb"]  # else the package itself would not be found


@pytest.mark.slow
def test_wandb_itself_keeps_it_in_its_offline_file(tmp_path):
    pytest.importorskip("wandb")
    from rl_jax.trackers.wandb import WandbTracker

    feed(WandbTracker(info(tmp_path)))
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-run-1.wandb")
    end_s = (
        time.monotonic() + 30
    )  # wandb's own process writes it, and finish() does not always wait for the disk
    while not (b"reward/mean.sums" in (data := kept.read_bytes()) and b"0.75" in data):
        assert time.monotonic() < end_s, data[:200]
        time.sleep(0.05)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/rollouts_*.json")
    assert json.loads(table.read_text())["data"][0][-1] == HOSTILE


# --- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mlflow_store_of_files_holds_names_that_begin_each_other_and_a_resume_goes_on(tmp_path):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    from rl_jax.trackers.mlflow import RUN_TAG, MlflowTracker

    nested = (3, {"a/b": 1.0, "a/b/c": 2.0, "reward/part.pkg:attr": 3.0})
    feed(MlflowTracker(info(tmp_path)), [*ROWS, nested])
    tracker = MlflowTracker(info(tmp_path, attempt=1, resume_step=3))
    tracker.log_hparams({**HPARAMS, "seed": 7})
    tracker.log_metrics(4, {"reward/mean": 1.0})
    tracker.close()
    client = MlflowClient(tracking_uri=tmp_path.as_uri())
    where = client.get_experiment_by_name("rl_jax").experiment_id
    (run,) = client.search_runs([where])
    assert run.data.metrics == {
        "reward/mean": 1.0, "reward/mean.sums": 1.0, "a/b": 1.0, "a/b_c": 2.0, "reward/part.pkg_attr": 3.0,
    }  # fmt: skip
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 0.75), (4, 1.0)]
    assert run.data.params["mesh.pools.0.name"] == "all" and run.data.params["seed"] == "0"
    assert run.data.tags["changed.seed"] == "7" and run.data.tags[RUN_TAG] == "run-1"
    (file,) = tmp_path.glob("*/*/artifacts/rollouts/step_2.jsonl")
    assert json.loads(file.read_text())["text"] == HOSTILE
