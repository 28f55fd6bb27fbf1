"""What every environment must do, whatever it is: one line in CASES for a new one.

Deterministic by seed, ends, survives garbage, closes; its tasks can cross a process and held-out tasks are disjoint.
"""

import asyncio
import importlib
import inspect
import json
import random
import textwrap
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest

import envs
from envs import ENVS
from rl_jax.rewards.check import from_steps
from rl_jax.rollout import wire
from rl_jax.rollout.worker import EnvPool
from rl_jax.settings import RolloutSettings, TaskSource
from rl_jax.types import Action, Message
from tests.sandbox.opened import sandbox_or_skip

MAX_OBS_BYTES = 65_536


@dataclass(frozen=True)
class Case:
    env: str  # a name of ENVS or "module:attribute"
    held_out: str  # the split whose tasks train must not hold
    config: dict[str, Any] = field(default_factory=dict)


CASES = {
    "frozen_lake": Case("frozen_lake", "unseen"),
    "code_tool": Case(
        "code_tool", "eval", {"num_tasks": 6, "eval_size": 4, "max_level": 5, "max_calls": 1}
    ),
    "shell": Case("shell", "eval", {"num_tasks": 6, "eval_size": 4}),
    "frozen_lake_8x8_slippery": Case(
        "frozen_lake",
        "unseen",
        {"map_size": 8, "max_turns": 40, "is_slippery": True, "instructions": ""},
    ),
    "calculator": Case("calculator", "eval", {"num_tasks": 20, "eval_size": 8}),
    "calculator_submit": Case(
        "calculator",
        "eval",
        {"num_tasks": 20, "eval_size": 8, "answer_by": "submit", "call_operators": 0},
    ),
    "gymnasium": Case("gymnasium", "eval", {"id": "Taxi-v4", "num_tasks": 12, "eval_size": 4}),
    "maze": Case("maze", "eval"),
    "outside_agent": Case(
        "outside_agent",
        "eval",
        {"agent": "rl_jax.testing.outside_agents:plain", "num_tasks": 4, "eval_size": 2},
    ),
    "sokoban": Case("sokoban", "eval", {"level": 4, "num_tasks": 12, "eval_size": 4}),
    "textarena": Case("textarena", "eval", {"id": "LightsOut-v0", "split_by": "observation"}),
    "two_player": Case("two_player", "eval", {"opponent": "perfect"}),
    "echo": Case("rl_jax.testing.envs:EchoEnv", "eval"),
    "chain_sum": Case("reasoning_gym", "eval", {"dataset": "chain_sum", "bare": True, "size": 100}),
    "countdown": Case("reasoning_gym", "eval", {"dataset": "countdown", "size": 5, "eval_size": 3}),
    "mixture": Case(
        "reasoning_gym",
        "eval",
        {
            "mixture": {"gcd": 1, "chain_sum": {"weight": 3, "config": {"max_terms": 3}}},
            "answer_tag": "answer",
            "size": 40,
            "eval_size": 8,
        },
    ),
}
SANDBOXED = ("code_tool", "shell")  # what their policies write runs in one, or not at all
# Importing reasoning_gym takes seconds, sandboxes a part of one; textarena is an extra.
MARKS = {
    **dict.fromkeys(SANDBOXED, [pytest.mark.slow]),
    "reasoning_gym": [pytest.mark.slow],
    "textarena": [
        pytest.mark.skipif(not find_spec("textarena"), reason="needs the extra textarena")
    ],
}
PARAMS = [
    pytest.param(case, id=name, marks=MARKS.get(case.env, [])) for name, case in CASES.items()
]
GARBAGE = [
    "",
    " ",
    "\x00",
    "\ud835",
    "💥" * 100,
    "x" * 100_000,
    "<|end|>",
    "{",
    "nan",
    "-1",
    "L" * 50,
    "\n\n",
    "é",
]


@pytest.fixture(params=PARAMS)
def case(request):
    if request.param.env in SANDBOXED:
        sandbox_or_skip()
    return request.param


def env_class(case: Case):
    module, _, attribute = ENVS.get(case.env, case.env).partition(":")
    return getattr(importlib.import_module(module), attribute)


def sent(result) -> dict[str, Any]:
    """A result as it crosses to the driver; raises if it is none."""
    return json.loads(wire.dumps(wire.step_to_wire(result, MAX_OBS_BYTES)))


def play(cls, task, seed: int, texts) -> list[dict[str, Any]]:
    """All results of an episode that says `texts`, until it is done or its turns are used up."""
    env = cls()
    results = [sent(env.reset(task, seed))]
    for text, _ in zip(texts, range(task.max_turns)):
        if results[-1].get("d"):
            break
        results.append(sent(env.step(Action(text))))
    env.close()
    return results


def test_every_environment_of_the_table_has_a_case():
    assert set(ENVS) <= {case.env for case in CASES.values()}


def test_tasks_are_deterministic_and_cross_a_process(case):
    cls = env_class(case)
    for split in cls.splits:
        tasks = cls.tasks(case.config, split)
        again = cls.tasks(case.config, split)
        assert len(tasks) == len(again) > 0
        assert [tasks[i] for i in range(len(tasks))] == [again[i] for i in range(len(again))]
        assert len({task.id for task in tasks}) == len(tasks)
        for task in tasks:
            assert task.max_turns >= 1
            assert wire.task_from_wire(json.loads(wire.dumps(wire.task_to_wire(task)))) == task


def test_held_out_tasks_are_disjoint_from_training(case):
    cls = env_class(case)

    def problems(split):
        """Tasks by what is asked: the prompt with the first observation."""
        out = set()
        for task in cls.tasks(case.config, split):
            env = cls()
            out.add(tuple(m.content for m in (*task.messages, *env.reset(task, 0).messages)))
            env.close()
        return out

    train, held_out = problems("train"), problems(case.held_out)
    assert train and held_out and not train & held_out
    assert all(
        "".join(problem) for problem in train | held_out
    )  # a conversation begins with something


def test_episodes_are_deterministic_by_seed(case):
    cls = env_class(case)
    texts = [random.Random(1).choice("LDRU") for _ in range(20)]
    for task in list(cls.tasks(case.config, "train"))[:4]:
        assert play(cls, task, 7, texts) == play(cls, task, 7, texts)


def test_an_episode_of_garbage_ends_with_finite_rewards(case):
    cls = env_class(case)
    for i, task in enumerate(list(cls.tasks(case.config, "train"))[:3]):
        texts = GARBAGE[i:] + GARBAGE * (1 + task.max_turns // len(GARBAGE))
        results = play(cls, task, i, texts)
        assert 2 <= len(results) <= 1 + task.max_turns
        assert results[-1].get("d") or len(results) == 1 + task.max_turns
        assert from_steps([result.get("r") for result in results[1:]]).status == "scored"


def test_close_is_safe_at_any_time_and_an_instance_can_be_reset_again(case):
    cls = env_class(case)
    task = cls.tasks(case.config, "train")[0]
    env = cls()
    env.close()
    first = sent(env.reset(task, 3))
    env.step(Action("?"))
    assert sent(env.reset(task, 3)) == first
    env.close()
    env.close()


def test_scripts_solve_with_full_skill_and_never_without(case):
    cls = env_class(case)
    if not hasattr(cls, "script"):
        pytest.skip("it has no script")
    solved = {0.0: 0, 1.0: 0}
    tasks = list(cls.tasks(case.config, "train"))[:5]
    for skill in solved:
        for i, task in enumerate(tasks):
            env, rng, rewards = cls(), random.Random(i), []
            env.reset(task, i)
            for _ in range(task.max_turns):
                said = env.script(rng, skill)
                message = Message("assistant", said) if isinstance(said, str) else said
                result = env.step(Action(message.content, message.tool_calls))
                rewards.append(result.reward)
                if result.done:
                    break
            env.close()
            solved[skill] += sum(rewards) >= 1.0
    # A slippery lake may drown the best player.
    assert solved[1.0] == len(tasks) or case.config.get("is_slippery")
    assert solved[0.0] < len(tasks)


def test_wrong_config_and_split_are_told_with_the_remedy(case):
    cls = env_class(case)
    with pytest.raises(ValueError, match=r"unknown config keys of \w+: 'nonsense' \(use "):
        cls.tasks({**case.config, "nonsense": 1}, "train")
    with pytest.raises(ValueError, match=r"no split 'test'; use one of train, eval"):
        cls.tasks(case.config, "test")


def test_the_skeleton_of_the_docs_is_an_environment(tmp_path, monkeypatch):
    """Word by word as it stands there."""
    page = inspect.getdoc(envs) or ""
    start = page.index("    from dataclasses import dataclass")
    body = page[start : page.index("The policy's first context")]
    (tmp_path / "adder_env.py").write_text(textwrap.dedent(body), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    case = Case("adder_env:Adder", "eval", {"num_tasks": 8})
    for check in (
        test_tasks_are_deterministic_and_cross_a_process,
        test_held_out_tasks_are_disjoint_from_training,
        test_episodes_are_deterministic_by_seed,
        test_an_episode_of_garbage_ends_with_finite_rewards,
        test_close_is_safe_at_any_time_and_an_instance_can_be_reset_again,
        test_scripts_solve_with_full_skill_and_never_without,
    ):
        check(case)
    pool = EnvPool([TaskSource("adder", case.env, config=case.config)], RolloutSettings())
    pool.prepare()  # and what the worker checks of it
    assert len(pool.list_tasks("adder", "eval")) == 8
    asyncio.run(pool.close())
