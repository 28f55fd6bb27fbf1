"""A step trained again from the files of a run: the same bits, or why not; and the run's files are left alone."""

import fcntl
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from rl_jax import launch
from rl_jax.job import machine
from rl_jax.learner.batch import pack
from rl_jax.rollout.traces import TraceError
from rl_jax.settings import AlgorithmSettings, LearnerSettings
from rl_jax.testing.trajectories import fake_trajectory
from rl_jax.tools import replay
from rl_jax.tools.recorded import DEVICE_FLAG, Recorded
from rl_jax.tools.token_figures import by_lag, token_figures, worst
from rl_jax.types import Group

pytestmark = pytest.mark.slow(seconds=15)

CONFIG = """
from ml_collections import ConfigDict
from tests.job_config import get_config as base

def get_config():
    config = base()
    sources = [{"tag": tag, "env": "rl_jax.testing.envs:EvenEnv", "config": {}} for tag in "ab"]
    config.tasks.sources = [ConfigDict(source) for source in sources]
    return config
"""
# All that a step may carry on from the one before: a critic, a reference, an algorithm's state, a bound that moves, a
# curriculum, and a learning rate that depends on how many steps there are.
EVERYTHING = (
    "--config.algorithm.name=ppo", "--config.algorithm.kl.coef=0.1", "--config.algorithm.entropy_coef=0.01",
    "--config.algorithm.entropy.target=2.0", "--config.critic.head_start=1", "--config.learner.schedule=linear",
    "--config.rollout.max_staleness=2", "--config.rollout.staleness_policy=adaptive",
    "--config.tasks.curriculum.name=dump", "--config.checkpoint.every=2", "--config.checkpoint.keep=9",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Steps 1 to 3, saved at 2 and 3; resumed for steps 4 and 5, saved at 4 and 5."""
    folder = tmp_path_factory.mktemp("replayed")
    (folder / "two_tags.py").write_text(CONFIG)
    directory = folder / "run"
    words = [f"--config={folder / 'two_tags.py'}", f"--run_dir={directory}", *EVERYTHING]
    assert launch.main([*words, "--config.steps=3"]) == 0
    assert launch.main([*words, "--config.steps=5"]) == 0
    return directory


def copied(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "run", symlinks=True))


def replayed(capsys, run, step):
    """(exit code, the document, what was told on stderr)."""
    capsys.readouterr()
    code = replay.main([str(run), f"--step={step}", "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def state_of(run):
    return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in run.rglob("*")}


@pytest.fixture(scope="module")
def last(run, tmp_path_factory):
    """The document of step 5, replayed while another process holds the run's lock."""
    out, before = tmp_path_factory.mktemp("found") / "5.json", state_of(run)
    with open(run / "LOCK", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert replay.main([str(run), "--step=5", "--json", "-o", str(out)]) == 0
    assert state_of(run) == before
    return json.loads(out.read_text())


@pytest.mark.bits
def test_a_step_after_a_resume_is_equal_bit_for_bit_and_nothing_is_touched(last):
    assert last["start"] == 4 and last["reasons"] == []
    assert last["equal"] and set(last["digests"]) == {"4", "5"}
    metrics = last["metrics"]
    assert all(m["recorded"] == m["replayed"] is not None for m in metrics.values())
    assert {"critic/loss", "optim/grad_norm", "mismatch/abs_mean", "reward/mean"} <= metrics.keys()
    assert len(metrics) > 60


@pytest.mark.bits
def test_a_step_before_it_is_equal_too_and_a_person_reads_that_first(run, tmp_path):
    """Under the schedule of its own attempt, which had other steps. Text of the model is inert."""
    out = tmp_path / "found.txt"
    assert replay.main([str(run), "--step=3", "-o", str(out)]) == 0
    lines = out.read_text(encoding="ascii").splitlines()
    assert lines[0].startswith("step 3, replayed from version 2: EQUAL bit for bit: ")
    assert lines[0].endswith("and 2 digests of published versions")
    assert not any(ord(c) < 32 for line in lines for c in line)


@pytest.mark.bits
def test_from_the_start_one_bit_of_one_figure_is_all_that_differs(run, tmp_path, capsys):
    copy = copied(run, tmp_path)
    path = copy / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = next(row for row in rows if row["step"] == 1 and "critic/loss" in row)
    row["critic/loss"] = float(np.nextafter(row["critic/loss"], 9))
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    code, document, _ = replayed(capsys, copy, 1)
    assert code == 1 and document["differing"] == ["critic/loss"]
    assert document["start"] == 0 and set(document["digests"]) == {"0", "1"}


def test_the_figures_are_those_of_the_step(last):
    metrics = {name: value["recorded"] for name, value in last["metrics"].items()}
    rows, episodes = last["by_lag"], last["episodes"]
    num = sum(row["tokens"] for row in rows)
    assert num == metrics["batch/trained_tokens"] == sum(len(e["token"]) for e in episodes)
    mean = sum(row["abs_mean"] * row["tokens"] for row in rows) / num
    assert math.isclose(mean, metrics["mismatch/abs_mean"], rel_tol=1e-4, abs_tol=1e-9)
    norm = math.hypot(*last["grad_norms"].values())
    assert math.isclose(norm, metrics["optim/grad_norm"], rel_tol=1e-4)
    differences = [abs(t["trainer"] - t["sampler"]) for t in last["worst"]]
    assert differences == sorted(differences, reverse=True) and len(differences) == 10
    assert max(differences) == max(row["abs_max"] for row in rows)


def test_steps_before_are_trained_again_where_a_checkpoint_is_bad(run, tmp_path, capsys):
    """From 2 over 3, which the first attempt trained under another schedule, and over the resume: told first."""
    copy = copied(run, tmp_path)
    for step in (3, 4):
        manifest = copy / "checkpoints" / f"step_{step}" / "MANIFEST.json"
        manifest.write_text(manifest.read_text().replace('"version": ', '"version":  1'))
    code, document, err = replayed(capsys, copy, 5)
    assert code == 0 and document["start"] == 2 and "under steps=[3, 5]" in err
    assert set(document["digests"]) == {"2", "3", "4", "5"}
    assert not document["equal"] and "version 3" in document["differing"]
    assert not (copy / "checkpoints" / "quarantine").exists()


def test_a_changed_trace_is_noticed_by_name_before_it_is_trained(run, tmp_path, capsys):
    copy = copied(run, tmp_path)
    traces = copy / "rollouts" / "step_5" / "train" / "traces.jsonl"
    lines = traces.read_text().splitlines()
    record = json.loads(lines[1])
    record["reward"]["value"] += 1e-9
    traces.write_text("\n".join([lines[0], json.dumps(record), *lines[2:]]) + "\n")
    code, document, err = replayed(capsys, copy, 5)
    assert code == 3 and document is None
    assert f"{record['uid']}#{record['attempt']} is not what was trained" in err
    traces.write_text("\n".join(lines[1:]) + "\n")
    code, _, err = replayed(capsys, copy, 5)
    assert code == 3 and f"lack {json.loads(lines[0])['uid']}#" in err


def test_what_cannot_be_equal_or_replayed_is_told_in_one_line(run, tmp_path, capsys):
    recorded, here = Recorded.read(run, 5), machine()
    assert recorded.differences(4, here) == []
    changed = {**here, "device_kind": "H200", "xla_flags": f"{here['xla_flags']} {DEVICE_FLAG}=99"}
    assert recorded.differences(4, changed) == ["device_kind was cpu, here it is H200"]
    copy = copied(run, tmp_path)
    shutil.rmtree(copy / "rollouts" / "step_5")
    code, document, err = replayed(capsys, copy, 5)
    assert code == 2 and document is None
    assert "no complete traces of: 5 (metrics.rollouts_every=1" in err
    code, _, err = replayed(capsys, copy, 9)
    assert code == 2 and "has no step 9 in metrics.jsonl; it trained steps: 1 to 5" in err
    with pytest.raises(SystemExit):
        replay.main([str(copy), "--step=5", f"--output={copy / 'found.txt'}"])


def test_only_the_history_that_survives_is_read(run):
    recorded = Recorded.read(run, 5)
    assert recorded.attempts == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    assert recorded.settings.steps == 5 and Recorded.read(run, 2).settings.steps == 3
    assert sorted(recorded.digests) == [0, 1, 2, 3, 4, 5]


def test_what_a_resume_made_void_is_not_missed_in_the_traces(run, tmp_path):
    """A run that was killed after step 5, and went on from step 4, has trained a step 5 twice."""
    copy = copied(run, tmp_path)
    ledger = copy / "ledger.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    first = next(i for i, r in enumerate(lines) if r["state"] == "TRAINED" and r["step"] == 5)
    lost = {**lines[first], "attempt": lines[first]["attempt"] + 1}
    void = {"state": "VOID", "step": 4, "seq": 0}
    groups = Recorded.read(copy, 5).groups(5)
    for resumed in ([], [{**void, "step": 5}], [void]):
        records = [*lines[:first], lost, *resumed, *lines[first:]]
        ledger.write_text("".join(json.dumps(record) + "\n" for record in records))
        if resumed == [void]:
            assert len(Recorded.read(copy, 5).groups(5)) == len(groups)
        else:
            with pytest.raises(TraceError, match=f"lack {lost['uid']}#{lost['attempt']}"):
                Recorded.read(copy, 5).groups(5)


def test_guards_are_those_that_the_step_was_steered_to(run, tmp_path):
    copy = copied(run, tmp_path)
    steer = {"kind": "steer", "answer": "done", "key": "guards.ess_below", "attempt": 0}
    steers = [
        {**steer, "step": 1, "old": 0.5, "new": 0.3},
        {**steer, "step": 2, "old": 0.3, "new": 0.2, "answer": "refused"},
        {**steer, "step": 3, "old": 0.3, "new": 0.1, "attempt": 1},
    ]
    with open(copy / "events.jsonl", "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in steers)
    below = [Recorded.read(copy, step).settings.guards.ess_below for step in range(1, 6)]
    assert below == [0.5, 0.3, 0.3, 0.1, 0.1]


# --- the figures alone ---


def test_token_figures_of_a_batch_checked_by_hand():
    one = fake_trajectory(0)
    group = Group("g", one.task_id, one.tag, one.epoch, one.index, (one,))
    batch = pack([group], LearnerSettings(row_tokens=64))
    batch.advantages[batch.targets_mask] = 1.0
    logprobs = batch.behaviour_logprobs + np.where(batch.targets_mask, np.float32(0.5), 0)
    settings = AlgorithmSettings(clip_low=0.2, clip_high=0.2)
    figures = token_figures(batch, [one], logprobs, int(one.versions.max()) + 3, settings)
    assert figures.position.tolist() == np.flatnonzero(one.loss_mask).tolist()
    assert (figures.lag == 3).all() and figures.clipped.all()  # e^0.5 is above 1.2
    (row,) = by_lag(figures)
    assert math.isclose(row["abs_mean"], 0.5, rel_tol=1e-6)
    assert math.isclose(row["ratio_mean"], math.exp(0.5), rel_tol=1e-6)
    assert math.isclose(row["k3"], math.exp(0.5) - 1.5, rel_tol=1e-5)
    (shown,) = worst(figures, 1, lambda tokens: ",".join(map(str, tokens)))
    at = shown["position"]
    assert shown["text"] == str(one.tokens[at]) and shown["before"].endswith(
        str(one.tokens[at - 1])
    )
