"""Supervised runs: rows -> steps -> a checkpoint that RL starts from."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from rl_jax import checkpoint, launch
from rl_jax.config import ConfigError, parse
from rl_jax.metrics import read_metrics
from rl_jax.recorder import Recorder

CONFIG = f"--config={Path(__file__).parent / 'job_config.py'}"
SFT = "--config.algorithm.name=sft"
ECHO = "--config.tasks.sources[0].env=rl_jax.testing.envs:EchoEnv"
TALK = [
    {"prompt": "2+2", "completion": "4"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"},
                  {"role": "user", "content": "bye"}, {"role": "assistant", "content": "see you"}]},
    {"prompt": "1+2", "completion": "3"},
    {"prompt": "x" * 200, "completion": "far too long"},
]  # fmt: skip


def run(directory, *words):
    return launch.main([CONFIG, f"--run_dir={directory}", *words])


def saved(directory, step):
    """Leaves of a checkpoint by name."""
    import orbax.checkpoint as ocp

    path = directory / "checkpoints" / f"step_{step}" / "state"
    return ocp.PyTreeCheckpointer().restore(path.absolute())


def losses(directory, name="sft/loss"):
    return {row["step"]: row[name] for row in read_metrics(directory) if name in row}


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "talk.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TALK))
    return path


@pytest.fixture(scope="module")
def words(talk):
    return [SFT, f"--config.data.path={talk}", f"--config.data.eval_path={talk}",
            "--config.data.epochs=40", "--config.data.batch_rows=2", "--config.eval.every=20",
            "--config.learner.learning_rate=1e-2"]  # fmt: skip


@pytest.fixture(scope="module")
def taught(tmp_path_factory, words):
    directory = tmp_path_factory.mktemp("taught") / "run"
    assert run(directory, *words) == 0
    return directory


@pytest.mark.slow
def test_sft_learns_its_rows_by_heart_and_says_so(taught):
    curve, held_out = losses(taught), losses(taught, "sft/loss.held_out")
    assert len(curve) == 60 and curve[1] > 4 and max(list(curve.values())[-5:]) < 0.1
    assert list(held_out) == [0, 20, 40, 60] and held_out[60] < 0.1
    summary = json.loads((taught / "summary.json").read_text())
    assert summary["steps"] == 60
    assert summary["held_out"]["sft/loss"] == {"first": held_out[0], "last": held_out[60]}
    assert summary["data"]["too_long"] == 2  # of both files
    assert json.loads((taught / "config.json").read_text())["steps"] == 60
    assert json.loads((taught / "STATUS.json").read_text())["state"] == "done"


@pytest.mark.slow
def test_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, taught, words):
    whole, sent = Recorder.fitted, []

    def signalled(self, step, metrics):
        whole(self, step, metrics)
        if step == 3 and not sent:
            sent.append(step)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Recorder, "fitted", signalled)
    assert run(tmp_path, *words) == 75
    assert [p.name for p in (tmp_path / "checkpoints").glob("step_*")] == ["step_3"]
    assert run(tmp_path, *words) == 0
    assert losses(tmp_path) == losses(taught)
    assert losses(tmp_path, "sft/loss.held_out") == losses(taught, "sft/loss.held_out")


@pytest.mark.slow
def test_ctrl_c_in_a_save_waits_for_it_and_says_interrupted(tmp_path, monkeypatch, words, capsys):
    hashed = checkpoint._sync_and_hash

    def slow(root):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)  # the driver's wait ends by then, and the save has not
        return hashed(root)

    monkeypatch.setattr(checkpoint, "_sync_and_hash", slow)
    words = [word.replace("epochs=40", "epochs=2") for word in words]
    assert run(tmp_path, *words) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("interrupted; start the same command again with --run_dir=")
    status = json.loads((tmp_path / "STATUS.json").read_text())
    assert (status["state"], status["error"]) == ("interrupted", "KeyboardInterrupt")
    (step,) = (tmp_path / "checkpoints").glob("step_*")
    assert checkpoint._verify(step) is None


@pytest.mark.slow
def test_full_disk_names_the_file_and_what_to_do(tmp_path, taught, words, capsys):
    shutil.copytree(taught, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "summary.json").symlink_to("/dev/full")
    assert run(tmp_path / "run", *words) == 7
    line = (
        f"{tmp_path}/run/summary.json: No space left on device; free some space, then start the same command again"
        f" with --run_dir={tmp_path}/run: it goes on from step 60, the last one saved"
    )
    assert f"error: {line}" in capsys.readouterr().err.splitlines()
    status = json.loads((tmp_path / "run" / "STATUS.json").read_text())
    assert (status["state"], status["error"]) == ("failed", line)


@pytest.mark.slow
def test_rl_starts_from_the_weights_with_an_optimizer_of_its_own(tmp_path, taught):
    assert run(tmp_path, f"--resume={taught}", "--config.steps=0") == 0
    before, after = saved(taught, 60), saved(tmp_path, 0)
    for name, value in before.items():
        if name.startswith("params/"):
            np.testing.assert_array_equal(value, after[name], err_msg=name)
    assert any(np.any(v) for n, v in before.items() if "/mu/" in n)
    assert not any(np.any(v) for n, v in after.items() if "/mu/" in n)
    evaluated = [row for row in read_metrics(tmp_path) if "eval/success.even" in row]
    assert [row["step"] for row in evaluated] == [0, 0]  # first, and last


@pytest.mark.slow
def test_taught_policy_is_evaluated_where_it_was_taught(taught, capsys):
    stored = json.loads((taught / "config.json").read_text())
    assert stored["data"]["path"]
    assert launch.main([f"--run_dir={taught}", "--mode=eval"]) == 0


@pytest.mark.slow
def test_scripts_are_rows_where_no_path_is_given(tmp_path):
    words = [SFT, ECHO, "--config.tasks.sources[0].script_episodes=6", "--config.data.batch_rows=4",
             "--config.rollout.max_new_tokens=12", "--config.data.eval_share=0.34"]  # fmt: skip
    assert run(tmp_path, *words) == 0
    assert list(losses(tmp_path)) == [1, 2, 3]
    data = json.loads((tmp_path / "summary.json").read_text())["data"]
    assert data["rows"] == 6 and data["trained_tokens"] > 0
    assert list(losses(tmp_path, "sft/loss.held_out")) == [0, 3]


@pytest.mark.slow
def test_dry_run_shows_the_rows_and_needs_no_environment(tmp_path, words, capsys):
    assert run(tmp_path, "--dry_run", *words) == 0
    out = capsys.readouterr().out
    assert "data: 8 rows, 2 dropped as too long; 3 to train on, 3 held out" in out
    assert "60 steps of 2" in out and "tag even" not in out
    assert json.loads((tmp_path / "plan.json").read_text())["data"]["steps"] == 60


def test_bad_rows_end_the_run_before_its_directory_is_made(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hi"}\n{"prompt": 1, "completion": "x"}\n')
    assert run(tmp_path / "run", SFT, f"--config.data.path={rows}") == 3
    told = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(told) == 2 and f"{rows}:1: the row has the keys prompt but no completion" in told[0]
    assert not (tmp_path / "run").exists()


REFUSED = [
    ([SFT, "--config.data.path=nowhere.jsonl"], "data.path=nowhere.jsonl names no file"),
    (["--config.data.path=x"], "data.path=x is not read by algorithm grpo; leave it out"),
    ([SFT, "--config.tasks.sources[0].script_episodes=0"], "algorithm.name=sft without data.path trains on scripts"),
    ([SFT, "--config.data.too_long=error"], "data.too_long=error is not read by sft without data.path"),
    (["--config.algorithm.name=rm"], "algorithm.name=rm learns from pairs; set data.path"),
    (["--config.algorithm.name=rm", "--config.data.path={here}", "--config.data.train_on=last"],
     "data.train_on=last is not read by rm; leave it out"),
    (["--config.algorithm.name=rm", "--mode=eval"], "rm makes a reward model, which plays no episodes"),
    (["--config.algorithm.name=dpo", "--config.data.path={here}", "--config.algorithm.aggregation=token-mean"],
     "the loss of dpo is a pair's, whatever its tokens; set it to none"),
    ([SFT, "--mode=rollout_only"], "--mode=rollout_only: sft learns from rows"),
    ([SFT, "--config.data.path={here}", "--config.data.eval_path={here}", "--config.data.eval_share=0.5"],
     "hold out by one of them"),
    ([SFT, "--config.data.eval_share=1"], "data.eval_share=1.0 must be in [0, 1)"),
    ([SFT, "--config.data.train_on=first"], "data.train_on=first is not one of all, last"),
]  # fmt: skip


@pytest.mark.parametrize("given, told", REFUSED)
def test_config_that_would_not_be_read_is_refused(given, told):
    given = [word.replace("{here}", __file__) for word in given]
    with pytest.raises(ConfigError) as error:
        parse([CONFIG, *given])
    assert len(error.value.errors) == 1 and told in error.value.errors[0], error.value.errors


PAIRS = [{"prompt": p, "chosen": f"yes{p}", "rejected": f"no{p}"} for p in "abcdefgh"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rm", "dpo"])
def test_pairs_are_told_apart_also_those_held_out(tmp_path, name, taught):
    """From the weights that sft made: a reward model, and a policy with that policy as its reference."""
    rows, directory = tmp_path / "pairs.jsonl", tmp_path / "run"
    rows.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    words = [f"--config.algorithm.name={name}", f"--config.data.path={rows}", f"--resume={taught}",
             "--config.data.batch_rows=3", "--config.data.epochs=5", "--config.data.eval_share=0.25",
             "--config.learner.learning_rate=1e-2"]  # fmt: skip
    assert run(directory, *words) == 0
    first, *_, last = losses(directory, "preference/loss").values()
    assert first == pytest.approx(np.log(2), rel=1e-4) and last < 0.3
    held_out = json.loads((directory / "summary.json").read_text())["held_out"]
    assert held_out["preference/accuracy"] == {"first": 0.0, "last": 1.0}
    assert held_out["preference/margin"]["last"] > 1.0
    if name == "rm":
        assert run(tmp_path / "rl", f"--resume={directory}", "--config.steps=0") == 3
        words = [f"--resume={taught}", f"--config.reward_model.checkpoint={directory}",
                 "--config.algorithm.reward_model_coef=0.5"]  # fmt: skip
        assert run(tmp_path / "scored", *words, "--config.steps=1") == 0
        (row,) = losses(tmp_path / "scored", "reward/model").values()
        assert row != 0 and np.isfinite(row)
