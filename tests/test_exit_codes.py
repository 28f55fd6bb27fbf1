"""What a config, a plugin, an environment or saved data gets wrong is one line and an exit code, not a trace."""

import json
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from rl_jax import launch
from rl_jax.config import ConfigError, parse
from rl_jax.exit_codes import exit_code
from rl_jax.learner.batch import BatchError
from rl_jax.learner.learner import Learner
from rl_jax.preflight import prepare_tasks
from rl_jax.rollout.evaluation import EvaluationFailed
from rl_jax.rollout.scripted import ScriptError
from rl_jax.rollout.tasks import TaskError, TaskStream
from rl_jax.rollout.traces import TraceError, read_traces
from rl_jax.settings import WarmStartSettings
from rl_jax.testing.envs import EvenEnv
from rl_jax.types import SyncResult
from rl_jax.warm_start import warm_start
from rl_jax.weights.plan import SyncPlanError
from rl_jax.weights.sync import WeightSync

CONFIG = f"--config={Path(__file__).parent / 'job_config.py'}"
UNTRAINED = ("--mode=eval", "--resume=never")  # plays what the seed made


def told(capsys, directory, *words):
    """(exit code, the lines of stderr that are errors); fails on a trace."""
    code = launch.main([CONFIG, f"--run_dir={directory}", *words])
    err = capsys.readouterr().err
    assert "Traceback" not in err, err
    return code, [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """One step's episodes on disk."""
    directory = tmp_path_factory.mktemp("sampled") / "run"
    words = ["--mode=rollout_only", "--config.steps=1"]
    assert launch.main([CONFIG, f"--run_dir={directory}", *words]) == 0
    return directory


@pytest.mark.parametrize(
    "words, line",
    [
        (["--config.warm_start.steps=1"], "script_episodes=512, but environment rl_jax.testing.envs:EvenEnv has no"),
        (["--config.algorithm.name=json:Grpo"], "json:Grpo cannot be loaded: AttributeError: module 'json' has no"),
        (["--config.model.family=rl_jax.no_such:Model"], "rl_jax.no_such:Model cannot be loaded: ModuleNotFoundError"),
        (["--config.model.vocab_size=100"], "model.vocab_size=100 is below the 264 tokens of model.tokenizer=byte"),
    ],
)  # fmt: skip
def test_what_the_preflight_finds_is_one_line_and_no_directory(tmp_path, capsys, words, line):
    code, lines = told(capsys, tmp_path / "r", *words)
    assert code == 2 and len(lines) == 1 and line in lines[0], lines
    assert not (tmp_path / "r").exists()


def test_a_first_observation_over_the_context_is_told_before_there_is_a_directory(tmp_path, capsys):
    """So the remedy that it names can be typed with the same --run_dir."""
    small = ["--config.engine.context=64", "--config.learner.row_tokens=64"]
    lake = "--config.tasks.sources[0].env=frozen_lake"
    code, lines = told(capsys, tmp_path / "r", lake, *small)
    assert code == 2 and lines, lines
    for line, split in zip(lines, ("train", "eval", "unseen"), strict=True):
        assert line.startswith(f"error: tag even: the first prompt of task even/{split}/"), line
        assert "above the 61 that engine.context=64 leaves" in line
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "fault, line",
    [
        ("raise", "each failed; the first: reset: RuntimeError: the environment is broken (envs.py:"),
        ("hang", "took more than rollout.reset_timeout_s=0.7; it was at envs.py:"),
    ],
)  # fmt: skip
def test_environment_of_which_no_reset_comes_back_is_refused_before_there_is_a_directory(
    tmp_path, capsys, fault, line
):
    source = "--config.tasks.sources[0]"
    words = [f"{source}.env=rl_jax.testing.envs:MisbehavingEnv", f"{source}.config.fault={fault}"]
    words += [f"{source}.config.at=reset", "--config.rollout.reset_timeout_s=0.7"]
    code, lines = told(capsys, tmp_path / "r", *words)
    assert code == 2 and len(lines) == 1, lines
    assert lines[0].startswith("error: tag even: ") and line in lines[0], lines
    assert not (tmp_path / "r").exists()


def test_reward_that_cannot_be_made_is_named(tmp_path, capsys):
    reward = "--config.tasks.sources[0].reward=json:JSONDecoderr"
    code, lines = told(capsys, tmp_path / "r", reward)
    assert code == 2 and "reward json:JSONDecoderr: AttributeError: " in lines[0], lines
    assert not (tmp_path / "r").exists()


def test_environment_must_offer_what_the_mode_needs():
    tasks = lambda tag, split: [SimpleNamespace(id=f"{tag}/{split}/0")]
    pool = SimpleNamespace(prepare=lambda: None, splits=lambda tag: ("eval",), list_tasks=tasks)
    with pytest.raises(ConfigError, match="has no split train, only eval"):
        prepare_tasks(parse([CONFIG]).settings, pool, "train")
    pool.splits = lambda tag: ("train",)
    prepare_tasks(parse([CONFIG]).settings, pool, "train")
    with pytest.raises(ConfigError, match="--mode=eval: no environment has a split beside train"):
        prepare_tasks(parse([CONFIG]).settings, pool, "eval")


@pytest.mark.parametrize(
    ("directory", "words", "line"),
    [
        ("", [], "--mode=eval: no --run_dir was named, so the weights would be random; name a run with --run_dir=DIR"),
        ("new", [], "new has no checkpoint, so the weights would be random"),
        ("new", ["--resume=strict"], "new holds no run to resume"),
        ("new", ["--config.algorithm.name=tests.test_plugins:Capped"], "new has no checkpoint, so the weights"),
    ],
)  # fmt: skip
def test_evaluating_what_nothing_trained_is_refused(tmp_path, capsys, directory, words, line):
    named = [f"--run_dir={tmp_path / directory}"] if directory else []
    assert launch.main([CONFIG, "--mode=eval", *named, *words]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert line in told
    assert not (tmp_path / "new").exists()


def test_held_out_tasks_with_ids_of_train_are_counted_and_named():
    ids = {"train": range(8), "eval": range(4, 12), "hard": range(20, 22)}
    tasks = lambda tag, split: [SimpleNamespace(id=f"{tag}/{i}") for i in ids[split]]
    pool = SimpleNamespace(prepare=lambda: None, splits=lambda tag: tuple(ids), list_tasks=tasks)
    with pytest.raises(ConfigError) as error:
        prepare_tasks(parse([CONFIG]).settings, pool, "train")
    (line,) = error.value.errors
    assert "4 of the 8 tasks of split eval have ids of train ('4', '5', '6', ...)" in line
    ids["eval"] = range(8, 12)
    prepare_tasks(parse([CONFIG]).settings, pool, "train")


@pytest.mark.slow
def test_evaluation_that_scores_nothing(tmp_path, capsys):
    code, lines = told(capsys, tmp_path, *UNTRAINED, "--config.eval.timeout_s=0.001")
    assert code == 5 and len(lines) == 1 and "none of 2 episodes got a score" in lines[0]
    # An environment that fails in each of a few episodes: no server is to blame, and its own words are told.
    broken = ["--config.tasks.sources[0].env=rl_jax.testing.envs:MisbehavingEnv", *UNTRAINED]
    code, lines = told(capsys, tmp_path / "broken", *broken)
    assert code == 4 and len(lines) == 1, lines
    assert "none of 2 episodes" in lines[0] and "the last failure, env_error: " in lines[0]
    assert "2 failed in each of 3 attempts" in lines[0] and "eval.timeout_s" not in lines[0]
    assert f"traceback is in {tmp_path / 'broken' / 'logs' / 'attempt_0' / 'env_0.log'}" in lines[0]
    # What hung is told by the limit that ended it.
    hung = [
        *broken,
        "--config.rollout.step_timeout_s=0.3",
        "--config.tasks.sources[0].config.fault=hang",
    ]
    code, lines = told(capsys, tmp_path / "hung", *hung)
    assert code == 4 and len(lines) == 1, lines
    assert "took more than rollout.step_timeout_s=0.3; " in lines[0], lines
    assert "eval.timeout_s" not in lines[0]


OUTAGE_ENV = """
import os
from rl_jax.testing.envs import EvenEnv

class Env(EvenEnv):
    def step(self, action):
        if os.path.exists({path!r}):
            raise ConnectionError("the environment's host is down")
        return super().step(action)
"""


def environments_fail(tmp_path, directory, monkeypatch):
    """After two steps, until the function that it returns is called. Also returns the words of the run."""
    down, metrics = tmp_path / "down", directory / "metrics.jsonl"
    (tmp_path / "outage_env.py").write_text(OUTAGE_ENV.format(path=str(down)))
    monkeypatch.syspath_prepend(tmp_path)

    def break_it():
        while not metrics.exists() or metrics.read_text().count("policy/loss") < 2:
            time.sleep(0.005)
        down.touch()

    threading.Thread(target=break_it, daemon=True).start()
    return ["--config.tasks.sources[0].env=outage_env:Env"], down.unlink


def syncs_fail(tmp_path, directory, monkeypatch):
    """That of version 2 and all after it: its update is done by then."""
    publish = WeightSync.publish

    def fail(sync, params, version):
        if version < 2:
            return publish(sync, params, version)
        return SyncResult("FAILED", 1, (), ("all.0",), 0, 0.0, 0.0, "all.0: its process ended")

    monkeypatch.setattr(WeightSync, "publish", fail)
    return [], lambda: monkeypatch.setattr(WeightSync, "publish", publish)


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize(
    "begin, code, line",
    [
        (environments_fail, 4, "the environment's host is down"),
        (syncs_fail, 5, "weights of version 2 ended FAILED"),
    ],
)
def test_outage_saves_what_was_learned_and_the_run_goes_on_after_it(
    tmp_path, capsys, monkeypatch, begin, code, line
):
    """Fault 11: nothing is wrong with the weights when servers or environments are gone."""
    directory = tmp_path / "run"
    words, end = begin(tmp_path, directory, monkeypatch)
    words += ["--config.rollout.max_env_failures=3"]
    found, lines = told(capsys, directory, *words, "--config.steps=200")
    assert found == code and line in lines[0], lines
    (saved,) = (directory / "checkpoints").glob("step_*")
    step, file = int(saved.name.removeprefix("step_")), directory / "ledger.jsonl"
    read = lambda: [json.loads(row) for row in file.read_text().splitlines()]
    assert 2 <= step == max(row["step"] for row in read() if row["state"] == "TRAINED")
    end()
    more = f"--config.steps={step + 2}"
    assert launch.main([CONFIG, f"--run_dir={directory}", *words, more]) == 0
    trained = Counter(row["uid"] for row in read() if row["state"] == "TRAINED")
    assert set(trained.values()) == {1} and len(trained) == 4 * (step + 2)


@pytest.mark.slow
def test_run_that_an_environment_ended_starts_anew_in_its_directory_once_that_is_mended(
    tmp_path, capsys
):
    broken = "--config.tasks.sources[0].env=rl_jax.testing.envs:MisbehavingEnv"
    code, lines = told(capsys, tmp_path, broken, "--config.steps=1")
    assert code == 4 and len(lines) == 1 and (tmp_path / "ledger.jsonl").exists(), lines
    words = ["--config.steps=1", "--config.metrics.progress=plain"]
    assert launch.main([CONFIG, f"--run_dir={tmp_path}", *words]) == 0
    out = capsys.readouterr().out
    assert f"older records are in {tmp_path}/quarantine" in out
    assert "config changed since: " in out and "tasks.sources" in out
    aside = tmp_path / "quarantine" / "before_attempt_1" / "ledger.jsonl"
    assert '"ERRORED"' in aside.read_text()
    assert '"ERRORED"' not in (tmp_path / "ledger.jsonl").read_text()


@pytest.mark.slow
def test_one_error_of_an_environment_is_one_line_of_the_terminal(tmp_path, capsys):
    words = ["--config.tasks.sources[0].env=rl_jax.testing.envs:MisbehavingEnv", *UNTRAINED]
    launch.main([CONFIG, f"--run_dir={tmp_path / 'r'}", *words])
    first, last = (
        capsys.readouterr().err.splitlines()
    )  # that it happened, and that it ended the run
    log = tmp_path / "r" / "logs" / "attempt_0" / "env_0.log"
    for part in (
        "warning: episode ERRORED (env_error, charged to infra): ",
        "tag even, task even/eval/8 of rl_jax.testing.envs:MisbehavingEnv): ",
        "RuntimeError: the environment is broken (envs.py:",
        f"the traceback is in {log}",
    ):
        assert part in first, first
    assert "in _raise" in log.read_text() and last.startswith("error: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [*UNTRAINED, "--config.rollout.temperature=0"],
        ["--config.steps=0", "--config.learner.schedule=cosine", "--config.learner.warmup_steps=2"],
    ],
)
def test_settings_that_only_training_reads_do_not_stop_what_does_not_train(tmp_path, capsys, words):
    assert told(capsys, tmp_path, *words) == (0, [])


def test_memory_that_is_too_small(tmp_path, capsys, monkeypatch):
    def init(self, key):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nat x"
        )

    monkeypatch.setattr(Learner, "init", init)
    code, lines = told(capsys, tmp_path)
    assert code == 2 and len(lines) == 1
    assert "memory is too small: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.;" in lines[0]
    assert "in init" in (tmp_path / "logs" / "latest" / "driver.log").read_text()  # the trace


@pytest.mark.slow
def test_saved_episodes_that_do_not_fit_or_are_damaged(tmp_path, capsys, sampled):
    words = ["--mode=train_only", f"--config.rollout.replay_dir={sampled}"]
    small = ["--config.engine.context=16", "--config.learner.row_tokens=16"]
    code, lines = told(capsys, tmp_path / "small", *words, *small)
    assert code == 3 and len(lines) == 1 and "more than learner.row_tokens=16" in lines[0]
    shutil.copytree(sampled, tmp_path / "copy")
    traces = tmp_path / "copy" / "rollouts" / "step_1" / "train" / "traces.jsonl"
    traces.write_bytes(traces.read_bytes()[:-100])
    words = ["--mode=train_only", f"--config.rollout.replay_dir={tmp_path / 'copy'}"]
    code, lines = told(capsys, tmp_path / "cut", *words)
    assert code == 3 and len(lines) == 1 and "traces.jsonl:4 is no trajectory" in lines[0]
    with pytest.raises(TraceError):
        read_traces(traces.parent)
    shutil.rmtree(traces.parent)
    code, lines = told(capsys, tmp_path / "none", *words)
    assert code == 3 and "has no rollouts/step_N/train" in lines[0]
    assert not (tmp_path / "none").exists()


def test_tasks_that_are_not_those_of_the_run():
    def stream(num):
        return TaskStream({"even": EvenEnv.tasks({"num_tasks": num}, "train")}, 0)

    with pytest.raises(TaskError, match="the 3 tasks of tag 'even' are not the 4"):
        stream(3).restore(stream(4).state())
    with pytest.raises(TaskError, match="no tasks to train on"):
        TaskStream({"even": []}, 0)


def test_too_few_scripted_episodes_are_a_script_error():
    with pytest.raises(ScriptError, match="batch_episodes=3 but only 0 scripted episodes"):
        warm_start(None, [], WarmStartSettings(steps=1, batch_episodes=3), 0, lambda *_: None)


@pytest.mark.parametrize(
    "kind, code",
    [(SyncPlanError, 2), (BatchError, 3), (TaskError, 3), (TraceError, 3), (ScriptError, 4), (EvaluationFailed, 5)],
)  # fmt: skip
def test_typed_errors_have_a_code(kind, code):
    assert exit_code(kind("x")) == code


def test_error_of_ours_keeps_its_trace(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Learner, "init", lambda self, key: {}["a bug"])
    assert launch.main([CONFIG, f"--run_dir={tmp_path}"]) == 1
    assert "Traceback" in capsys.readouterr().err
