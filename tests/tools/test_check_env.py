"""check_env finds what is wrong with an environment, one line a fault, and nothing with those that are shipped."""

import json
import sys
import textwrap

import pytest

from envs import ENVS
from rl_jax.tools import check_env
from rl_jax.tools.check_env import ArgumentError, named, read_values
from rl_jax.tools.env_checks import Played
from rl_jax.types import Action, Message, StepResult, Task
from tests.envs.test_common import CASES, MARKS

MISBEHAVING = "rl_jax.testing.envs:MisbehavingEnv"
FAST = ["--step_timeout_s=0.4", "--reset_timeout_s=0.4"]

# Of each environment of the table the first case.
SHIPPED = {case.env: case for case in reversed(CASES.values()) if case.env in ENVS}

# An environment that is right unless its config's `fault` says what to break.
OWN = """
    import os
    from rl_jax.types import Message, StepResult, Task

    seen = []  # of the whole process


    class Own:
        def __init__(self):
            self.fault = ""

        @classmethod
        def tasks(cls, cfg, split):
            fault = cfg.get("fault", "")
            first = 0 if split == "train" or fault == "shared" else 4
            ids = "x/{1}" if fault == "ids" else "{0}/{1}"
            payload = {"fault": fault, "pid": os.getpid() if fault == "tasks" else 0}
            return [
                Task(ids.format(split, i % 4), "", "", (), {**payload, "i": i}, "env", 3)
                for i in range(first, first + 4)
            ]

        def reset(self, task, seed):
            self.fault, self.i = task.payload["fault"], task.payload["i"]
            seen.append(self.i)
            first = StepResult((Message("user", "" if self.fault == "nothing" else f"say {self.i}"),))
            if self.fault == "reset_reward":
                return StepResult(first.messages, reward=0.0)
            return StepResult(first.messages, done=self.fault == "reset_done")

        def step(self, action):
            if self.fault == "surrogate":
                action.text.encode()
            if self.fault == "empty":
                action.text[0]
            is_right = str(self.i) in action.text
            told = str(os.getpid() if self.fault == "process" else seen[-1] if self.fault == "global" else "no")
            done = is_right and self.fault != "never_done"
            return StepResult((Message("user", told),), float(is_right and self.fault != "zeros"), done)

        def close(self): ...

        def script(self, rng, skill):
            if self.fault == "no_script":
                raise LookupError
            right = skill == (0.0 if self.fault == "script" else 1.0)
            return str(self.i) if right else "?"
"""


def checked(capsys, *argv):
    """(exit code, what stands on stdout as JSON)"""
    code = check_env.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own_env.py"
    path.write_text(textwrap.dedent(OWN), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def same_path(monkeypatch):
    """A file's folder becomes importable; not for the tests after this one."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=MARKS.get(env, []), id=env) for env, case in SHIPPED.items()]
)
def test_nothing_is_wrong_with_what_is_shipped(capsys, case):
    words = [f"{key}={value!r}" for key, value in case.config.items()]
    code, told = checked(capsys, case.env, "--config", *words)
    assert (code, told["faults"]) == (0, []) and told["episodes"] > 20
    assert told["env"] == case.env and told["tasks"]["train"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, at, check, detail",
    [
        ("raise", "step", "random policy", "step: RuntimeError: the environment is broken"),
        ("raise", "reset", "reset", "reset: RuntimeError: the environment is broken"),
        ("raise", "close", "close", "close() raised, died or took more than"),
        ("raise", "script", "script", "script: RuntimeError: the environment is broken"),
        ("raise", "tasks", "start", "tasks: RuntimeError: the environment is broken"),
        ("exit", "step", "random policy", "the process ended with exit code 3"),
        ("hang", "step", "random policy", "took more than rollout.step_timeout_s=0.4"),
        ("hang", "reset", "reset", "took more than rollout.reset_timeout_s=0.4"),
        ("none_reward", "step", "reward", "reward of step 1 is None, no finite number"),
        ("text_reward", "step", "reward", "reward of step 1 is '1.0' (str), no finite number"),
        ("bytes", "step", "random policy", "content is bytes; content must be str"),
    ],
)
def test_what_misbehaves_is_found(capsys, fault, at, check, detail):
    code, told = checked(
        capsys, MISBEHAVING, "--config", f"fault={fault}", f"at={at}", "num_tasks=1", *FAST
    )
    assert code == 1
    details = [f["detail"] for f in told["faults"] if f["check"] == check]
    assert any(detail in one for one in details), told["faults"]
    assert all("\n" not in one["detail"] and one["remedy"] for one in told["faults"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, check, detail",
    [
        ("", None, None),
        ("tasks", "tasks", "tasks() of split 'train' differs between two processes"),
        ("ids", "tasks", "task id 'x/0' is in the splits 'train' and 'eval'"),
        ("shared", "tasks", "problems that train has too: 4 of 'eval'"),
        ("nothing", "reset", "neither the task's messages nor reset() say anything"),
        ("reset_reward", "reset", "reset() gives a reward, which nobody reads"),
        ("reset_done", "reset", "reset() says done"),
        ("surrogate", "hostile text", "hostile text (a lone surrogate): step: UnicodeEncodeError"),
        ("empty", "hostile text", "hostile text (empty text): step: IndexError"),
        ("process", "determinism", "step 1 answers otherwise in another process"),
        ("global", "determinism", "answers otherwise beside another episode"),
        ("script", "script", "its script earns 0 with skill 1 and 4 with skill 0"),
        ("never_done", "script", "no episode of its script with skill 1 came to done"),
    ],
)
def test_what_is_wrong_with_a_file_of_ones_own_is_found(capsys, own, fault, check, detail):
    code, told = checked(capsys, f"{own}:Own", "--config", f"fault={fault}")
    if check is None:
        assert (code, told["faults"], told["notes"]) == (0, [], [])
        return
    assert code == 1
    details = [f["detail"] for f in told["faults"] if f["check"] == check]
    assert any(detail in one for one in details), told["faults"]


@pytest.mark.slow
def test_a_script_that_a_task_does_not_have_and_rewards_of_zero_are_noted(capsys, own):
    code, told = checked(capsys, f"{own}:Own", "--config", "fault=no_script")
    assert code == 0 and told["notes"] == ["it has no script for these tasks: no warm start"]
    code, told = checked(capsys, f"{own}:Own", "--config", "fault=zeros")
    assert code == 0 and "got a reward other than 0" in told["notes"][0]


@pytest.mark.slow
def test_faults_are_lines_for_people_with_their_remedy(capsys, own):
    assert check_env.main([f"{own}:Own", "--config", "fault=empty"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAULT hostile text: hostile text (empty text): step: IndexError")
    assert lines[0].endswith("; catch it, and answer the policy in words")
    assert lines[-1].startswith("own_env:Own: 1 fault; tasks: 4 train, 4 eval; ")


@pytest.mark.slow
def test_a_scorer_is_asked_and_all_checks_end_by_their_deadline(capsys, own):
    code, told = checked(capsys, f"{own}:Own", "--reward=rl_jax.testing.envs:MisbehavingScorer")
    assert code == 1 and "gave status error: " in told["faults"][0]["detail"]
    words = ["--config", "fault=text_reward", "at=step", "num_tasks=1"]
    code, told = checked(capsys, MISBEHAVING, *words, "--reward=exact_match")
    assert any("reward of step 1 is '1.0' (str)" in fault["detail"] for fault in told["faults"])
    code, told = checked(
        capsys, MISBEHAVING, "--config", "fault=hang", "at=step", "--timeout_s=0.5"
    )
    assert code == 1 and told["faults"][0]["check"] == "time"


@pytest.mark.slow
def test_a_scorer_that_hangs_is_told_by_one_deadline_and_a_class_without_a_method_by_its_name(
    capsys, own, tmp_path
):
    (tmp_path / "slow_scorer.py").write_text(
        "import time\nclass Slow:\n    def score(self, task, episode):\n        time.sleep(60)\n"
    )
    code, told = checked(capsys, f"{own}:Own", f"--reward={tmp_path}/slow_scorer.py:Slow")
    timeouts = [(f["count"], f["detail"]) for f in told["faults"] if f["check"] == "reward"]
    assert code == 1 and [count for count, _ in timeouts] == [1]
    assert "took more than rewards.timeout_s=10; it was at slow_scorer.py:4" in timeouts[0][1]
    code, told = checked(capsys, f"{tmp_path}/slow_scorer.py:Slow")
    assert "Slow has no tasks(); it needs tasks, reset, step, close" in told["faults"][0]["detail"]


def test_a_scorer_sees_the_policys_turns_between_the_answers():
    task = Task("x", "", "", (Message("system", "rules"),), {}, "env", 3)
    answers = (
        StepResult((Message("user", "1?"),)),
        StepResult((Message("user", "2?"),), 0.5, info={"a": 1.0}),
        StepResult((), 1.0, True, info={"a": 2.0}),
    )
    view = Played(task, (Action("one"), Action("two")), answers).view
    assert [m.content for m in view.messages] == ["rules", "1?", "one", "2?", "two"]
    assert [m.role for m in view.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert (view.turn_texts, view.step_rewards) == (("one", "two"), (0.5, 1.0))
    assert view.info == {"a": 2.0}


@pytest.mark.slow
def test_after_two_hangs_no_further_episode_is_played(capsys):
    words = ["--config", "fault=hang", "at=step", "num_tasks=8", *FAST]
    code, told = checked(capsys, MISBEHAVING, *words)
    assert code == 1 and told["episodes"] == 16  # the resets that compare the splits
    assert [(f["check"], f["count"]) for f in told["faults"]] == [("random policy", 2)]


@pytest.mark.slow
def test_an_observation_over_the_bound_is_found(capsys):
    code, told = checked(capsys, "rl_jax.testing.envs:EchoEnv", "--max_obs_bytes=5")
    assert code == 1 and [fault["check"] for fault in told["faults"]] == ["observation"]
    assert "reset() says 3 bytes more than rollout.max_obs_bytes=5" in told["faults"][0]["detail"]


@pytest.mark.parametrize(
    "argv, line",
    [
        (["chess"], "error: no environment 'chess'; use one of calculator, "),
        (["gone.py:Env"], "error: gone.py is no file whose name can be imported"),
        (["maze", "--config", "level"], "error: --config 'level' is no KEY=VALUE"),
        (["maze", "--config", "a=1", "a.b=1"], "a has a value already, and no keys"),
        (["maze", "--reward=nice"], "error: no reward 'nice'; use one of env, "),
        (["maze", "--step_timeout_s=0"], "error: --step_timeout_s=0.0 must be above 0"),
    ],
)
def test_arguments_that_cannot_be_used_end_with_two(capsys, argv, line):
    assert check_env.main(argv) == 2
    assert line in capsys.readouterr().err


def test_what_is_not_there_is_the_first_fault(capsys):
    code, told = checked(capsys, "no_such_module:Env")
    assert code == 1 and told["faults"][0]["check"] == "start"
    assert "No module named 'no_such_module'" in told["faults"][0]["detail"]


def test_values_and_names_of_the_command_line(tmp_path):
    words = ["a=1", "b.c=[1, 2]", "b.d=x y", "e=true", "f=null", "g=1.5", "h="]
    read = {"a": 1, "b": {"c": [1, 2], "d": "x y"}, "e": True, "f": None, "g": 1.5, "h": ""}
    assert read_values(words) == read
    assert named("maze", ENVS, "environment") == "maze"
    assert named("a.b:C", ENVS, "environment") == "a.b:C"
    (tmp_path / "mine.py").touch()
    assert named(f"{tmp_path}/mine.py:C", ENVS, "environment") == "mine:C"
    assert sys.path[0] == str(tmp_path)
    (tmp_path / "not-mine.py").touch()
    with pytest.raises(ArgumentError, match="no file whose name can be imported"):
        named(f"{tmp_path}/not-mine.py:C", ENVS, "environment")
