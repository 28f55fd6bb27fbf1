"""SIGTERM in every mode: what is due is saved, the exit code is 75, and the same command goes on."""

import asyncio
import gc
import json
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest

from rl_jax import launch
from rl_jax.checkpoint import Checkpointer
from rl_jax.metrics import read_metrics
from rl_jax.recorder import Recorder
from rl_jax.rollout.evaluation import Evaluation
from rl_jax.rollout.rollout import Rollout

CONFIG = f"--config={Path(__file__).parent / 'job_config.py'}"


def run(directory, *words):
    return launch.main([CONFIG, f"--run_dir={directory}", *words])


def sigterm_at(monkeypatch, cls, name, value, signum=signal.SIGTERM):
    """The signal arrives once, when `cls.name` is called with this first argument."""
    whole, sent = getattr(cls, name), []

    def signalled(self, first, *args, **kwargs):
        if first == value and not sent:
            sent.append(first)
            signal.raise_signal(signum)
        return whole(self, first, *args, **kwargs)

    monkeypatch.setattr(cls, name, signalled)


def saved_steps(directory):
    return sorted(p.name for p in (directory / "checkpoints").glob("step_*"))


def state_of(directory):
    return json.loads((directory / "STATUS.json").read_text())["state"]


def losses(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return {
        row["step"]: row["policy/loss"] for row in map(json.loads, lines) if "policy/loss" in row
    }


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Three steps' episodes, sampled and not trained."""
    directory = tmp_path_factory.mktemp("sampled") / "run"
    assert run(directory, "--mode=rollout_only") == 0
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "rollout_only"])
def test_sigterm_while_a_batch_is_waited_for_saves_and_the_run_goes_on(
    tmp_path, monkeypatch, capsys, mode
):
    sigterm_at(monkeypatch, Rollout, "want", 2)
    assert run(tmp_path, f"--mode={mode}") == 75
    # A batch that is there before the stop is seen is trained first.
    seen = re.search(r"before step ([23]); saved", capsys.readouterr().err)
    assert seen is not None
    assert saved_steps(tmp_path)[-1] == f"step_{int(seen[1]) - 1}"
    assert state_of(tmp_path) == "preempted"
    assert run(tmp_path, f"--mode={mode}") == 0
    steps = sorted(p.name for p in (tmp_path / "rollouts").iterdir() if (p / "train").exists())
    assert steps == ["step_1", "step_2", "step_3"] and state_of(tmp_path) == "done"


@pytest.mark.slow
def test_ctrl_c_while_a_batch_is_waited_for_keeps_what_was_learned(tmp_path, monkeypatch, capsys):
    sigterm_at(monkeypatch, Rollout, "want", 3, signal.SIGINT)
    assert run(tmp_path, "--config.checkpoint.every=0") == 130
    assert saved_steps(tmp_path)[-1] == "step_2" and state_of(tmp_path) == "interrupted"
    assert "it goes on from step 2, the last one saved" in capsys.readouterr().err


@pytest.mark.slow
def test_sigterm_in_a_replay_saves_and_the_rest_is_trained_after_it(tmp_path, monkeypatch, sampled):
    words = ["--mode=train_only", f"--config.rollout.replay_dir={sampled}"]
    assert run(tmp_path / "whole", *words) == 0
    sigterm_at(monkeypatch, Recorder, "step", 1)
    assert run(tmp_path / "cut", *words) == 75
    assert saved_steps(tmp_path / "cut") == ["step_1"]
    assert run(tmp_path / "cut", *words) == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert list(losses(tmp_path / "cut")) == [1, 2, 3]


@pytest.mark.slow
def test_sigterm_in_an_evaluation_of_a_training_run_saves_and_a_resume_does_it_again(
    tmp_path, monkeypatch, capsys
):
    every = ["--config.eval.every=1", "--config.steps=2"]
    play, driver = Evaluation.run, threading.main_thread().ident
    sent = []

    async def stuck_once(self, name, tasks, sampling, version):
        if version == 1 and not sent:
            sent.append(name)
            signal.pthread_kill(driver, signal.SIGTERM)
            await asyncio.sleep(120)
        return await play(self, name, tasks, sampling, version)

    monkeypatch.setattr(Evaluation, "run", stuck_once)
    assert run(tmp_path, *every) == 75
    assert "in the evaluation of version 1; saved" in capsys.readouterr().err
    assert saved_steps(tmp_path)[-1] == "step_1" and state_of(tmp_path) == "preempted"
    assert run(tmp_path, *every) == 0
    played = {row["step"]: row for row in read_metrics(tmp_path) if "eval/success.even" in row}
    assert list(played) == [0, 1, 2]


@pytest.mark.slow
def test_a_second_sigterm_does_not_wait_for_a_save(tmp_path, monkeypatch, capsys):
    save = Checkpointer.save

    def signalled(self, step, state, extra):
        signal.raise_signal(signal.SIGTERM)
        return save(self, step, state, extra)

    sigterm_at(monkeypatch, Rollout, "want", 2)
    monkeypatch.setattr(Checkpointer, "save", signalled)
    assert run(tmp_path) == 75
    assert "at once by a second signal 15; the last save stands" in capsys.readouterr().err
    assert saved_steps(tmp_path) == [] and state_of(tmp_path) == "preempted"


@pytest.mark.slow
def test_collecting_in_three_parts_keeps_what_a_replay_of_all_starts_from(tmp_path, monkeypatch):
    words = ["--mode=rollout_only", "--config.checkpoint.keep=1"]
    for step in (2, 3):
        with monkeypatch.context() as patch:
            sigterm_at(patch, Rollout, "want", step)
            assert run(tmp_path / "run", *words) == 75
    assert run(tmp_path / "run", *words) == 0
    assert run(tmp_path / "run", *words, "--config.steps=4") == 0  # finished, then asked for more
    steps = sorted(p.name for p in (tmp_path / "run" / "rollouts").iterdir())
    assert steps == ["step_1", "step_2", "step_3", "step_4"]
    assert saved_steps(tmp_path / "run") == ["step_0", "step_4"]


@pytest.mark.slow
def test_a_replay_starts_where_its_first_batch_did_and_leads_on(tmp_path, capsys, sampled):
    words = ["--mode=train_only", f"--config.rollout.replay_dir={sampled}"]
    assert run(tmp_path / "replay", *words) == 0
    capsys.readouterr()
    # What it says may be done next can be done: evaluate it, or go on with RL from its weights elsewhere.
    assert run(tmp_path / "replay", "--mode=eval") == 0
    fork = [f"--resume={tmp_path / 'replay'}", "--config.steps=1"]
    assert run(tmp_path / "rl", *fork) == 0
    shutil.rmtree(sampled / "checkpoints" / "step_0")
    assert run(tmp_path / "blind", *words, "--config.seed=1") == 3
    told = capsys.readouterr().err
    assert "was sampled by version 0, and checkpoints/step_0 is not there (it has [3])" in told


@pytest.mark.slow
def test_sigterm_in_an_evaluation_ends_it_at_once(tmp_path, monkeypatch, capsys, sampled):
    shutil.copytree(sampled, tmp_path / "run", symlinks=True)
    sigterm_at(monkeypatch, Rollout, "evaluate", "even")
    assert run(tmp_path / "run", "--mode=eval") == 75
    assert "stopped by signal 15 with nothing to save; start it again" in capsys.readouterr().err
    assert state_of(tmp_path / "run") == "preempted"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert run(tmp_path / "run", "--mode=eval") == 0


@pytest.mark.slow
def test_a_fork_to_other_tags_takes_the_weights_alone(tmp_path, sampled):
    other = ["--config.tasks.sources[0].tag=odd", f"--resume={sampled}"]
    assert run(tmp_path / "elsewhere", *other, "--config.steps=1") == 0
    assert list(losses(tmp_path / "elsewhere")) == [1]  # from version 0, where the other has 3
    assert run(tmp_path / "evaluated", *other, "--mode=eval") == 0
    theirs = tmp_path / "evaluated" / "summary.json"
    assert list(json.loads(theirs.read_text())["tasks"]) == ["odd"]


@pytest.mark.slow
def test_records_that_were_deleted_are_missed(tmp_path, sampled, capsys):
    shutil.copytree(sampled, tmp_path / "run", symlinks=True)
    ledger = tmp_path / "run" / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[: len(lines) // 2]))
    assert run(tmp_path / "run", "--mode=rollout_only", "--config.steps=5") == 7
    told = capsys.readouterr().err.splitlines()[-1]
    assert "records were deleted; restore the file" in told
    ledger.unlink()
    assert run(tmp_path / "run", "--mode=rollout_only", "--config.steps=5") == 7


@pytest.mark.slow
def test_ctrl_c_lost_in_the_collector_ends_the_run_all_the_same(
    tmp_path, monkeypatch, sampled, capsys
):
    whole = Recorder.step

    def collected(self, step, *args, **kwargs):
        callback = lambda phase, info: phase == "start" and signal.raise_signal(signal.SIGINT)
        gc.callbacks.append(callback)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(callback)
        return whole(self, step, *args, **kwargs)

    monkeypatch.setattr(Recorder, "step", collected)
    replay = ("--mode=train_only", f"--config.rollout.replay_dir={sampled}")
    assert run(tmp_path / "run", *replay) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"interrupted; start the same command again with --run_dir={tmp_path / 'run'}: it goes on from the start, as no"
        " step is saved"
    )
    assert list(losses(tmp_path / "run")) == [1]
    assert state_of(tmp_path / "run") == "interrupted"
