"""The code tool: levels, the tool's words, rewards, and the end of what it started."""

import random

import pytest

from envs.code_tool import LEVELS, CodeTool
from rl_jax.types import Action, ToolCall
from tests.sandbox.opened import sandbox_or_skip

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def sandbox():
    sandbox_or_skip()


def opened(**config):
    task = CodeTool.tasks({"num_tasks": 4, "eval_size": 4, **config}, "train")[0]
    env = CodeTool()
    env.reset(task, 0)
    return env, task


def call(code):
    return Action("", (ToolCall("python", {"code": code}),))


def test_solutions_of_every_level_pass_and_rise_in_length():
    tasks = CodeTool.tasks({"num_tasks": 15, "eval_size": 5, "max_level": LEVELS, "max_calls": 0}, "train")  # fmt: skip
    assert [task.payload["level"] for task in tasks] == [1, 2, 3, 4, 5] * 3
    lengths = dict.fromkeys(range(1, LEVELS + 1), 0)
    for task in tasks:
        env = CodeTool()
        env.reset(task, 0)
        result = env.step(Action(env.script(random.Random(0), 1.0).content))
        assert (result.reward, result.done, result.info["success"]) == (1.0, True, 1.0), task
        lengths[task.payload["level"]] += len(task.payload["solution"])
    assert lengths[1] < lengths[2] < lengths[3] < lengths[5]
    assert all("expected" not in m.content for task in tasks for m in task.messages)


def test_an_episode_by_hand():
    env, task = opened(max_calls=2)
    said = [env.step(call(c)).messages[0].content for c in ("print(1 + 1)", "1 // 0", "print(3)")]
    assert said == [
        "2\n",
        "error: ZeroDivisionError: integer division or modulo by zero",
        "error: no more than 2 calls; answer with the code",
    ]
    result = env.step(Action(f"```python\n{task.payload['solution']}\n```"))
    assert (result.reward, result.done) == (1.0, True)
    assert result.info == {"success": 1.0, "tests_passed": 1.0, "calls": 3.0, "failed_calls": 2.0}
    assert task.max_turns == 4


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1", "(it printed nothing)"),
        ("while True: print('y' * 999)", "error: stopped: it printed too much"),
        ("print('\\x1b[31mred\\x1b[0m\\x00')", "red\ufffd\n"),
        ("import sys; sys.exit(7)", "error: exit status 7"),
        ("print('x' * 300)", f"{'x' * 50}\n... 201 characters left out ...\n{'x' * 49}\n"),
        ("open('/etc/shadow')", "No such file or directory: '/etc/shadow'"),
        ("import socket; socket.create_connection(('169.254.169.254', 80), 2)", "Network is unreachable"),
    ],
)  # fmt: skip
def test_what_the_tool_says(code, said):
    env, _ = opened(max_chars=100)
    assert env.step(call(code)).messages[0].content[-len(said) :] == said


def test_a_call_that_is_none_is_told():
    env, _ = opened()
    for name, arguments in (("bash", {"code": "x"}), ("python", {"code": 3}), ("python", {})):
        result = env.step(Action("", (ToolCall(name, arguments),)))
        assert result.messages[0].content == "error: the tool is python(code: string)"


def test_a_part_of_the_tests_is_a_part_of_the_reward_only_where_asked():
    for reward_by, reward in (("all", 0.0), ("fraction", 1 / 3)):
        env, task = opened(reward_by=reward_by, num_tests=3)
        first = task.payload["tests"][0]
        code = f"def f(a, b, c):\n    return {first['expected']} if [a, b, c] == {first['args']} else 'x'"
        result = env.step(Action(code))
        assert result.reward == pytest.approx(reward)
        assert result.info["tests_passed"] == pytest.approx(1 / 3)


def test_without_a_sandbox_there_are_no_tasks():
    with pytest.raises(RuntimeError, match="sandbox nsjail: /no/nsjail is no program"):
        CodeTool.tasks({"sandbox": "nsjail:/no/nsjail"}, "train")
    with pytest.raises(RuntimeError, match="has no Python python9"):
        CodeTool.tasks({"python": "python9"}, "train")
    with pytest.raises(ValueError, match="no sandbox 'none'; use one of bubblewrap"):
        CodeTool.tasks({"sandbox": "none"}, "train")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_tests": 0}, "num_tests=0 must be at least 1"),
        ({"max_level": 6}, "must rise within 1..5"),
        ({"min_level": 3, "max_level": 2}, "must rise within 1..5"),
        ({"wall_s": 0.0}, "wall_s=0 above 0"),
        ({"reward_by": "most"}, "is not one of all, fraction"),
        ({"num_tasks": 400, "max_digits": 1}, "lower num_tasks or eval_size"),
    ],
)
def test_settings_that_cannot_be_are_told(config, said):
    with pytest.raises(ValueError, match=said):
        CodeTool.tasks(config, "train")
