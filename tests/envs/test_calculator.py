"""The calculator: its arithmetic and its limits, its answers, and an episode by hand."""

import time

import pytest

from envs.calculator import Calculator, evaluate, show
from rl_jax.types import Action, ToolCall


def ask(*expressions):
    return Action("", tuple(ToolCall("calculator", {"expression": e}) for e in expressions))


def opened(**config):
    task = Calculator.tasks({"num_tasks": 4, "eval_size": 4, **config}, "train")[0]
    env = Calculator()
    env.reset(task, 0)
    return env, task


@pytest.mark.parametrize(
    "text, value",
    [
        ("4821 * 377", 1817517),
        ("(1 + 2) * -3", -9),
        ("7 / 2", 3.5),
        ("8 / 2", 4),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("2 ** 100", 2**100),
        ("2 ** -1", 0.5),
        ("99999999999999999999 * 99999999999999999999", 99999999999999999999**2),
        (" 1_000 + 1 ", 1001),
        ("1.5 + 1.5", 3.0),
        ("10 ** 400 / 10 ** 399", 10),
    ],
)
def test_values_by_hand(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "no arithmetic"),
        ("2 +", "no arithmetic"),
        ("\x00", "no arithmetic"),
        ("(" * 300 + "1" + ")" * 99, "no arithmetic"),
        ("1 " * 300, "longer than 400"),
        ("__import__('os')", "only numbers"),
        ("abs(3)", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("[1] * 9", "only numbers"),
        ("True + 1", "only numbers"),
        ("1j * 2", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1 << 9", "only numbers"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** 4097", "too large"),
        ("10.0 ** 999", "too large"),
        ("1e999", "too large"),
        ("(-8) ** 0.5", "no real number"),
        ("10 ** 1200 / 7", "too large"),
    ],
)
def test_what_it_refuses_is_told_at_once(text, why):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=why):
        evaluate(text)
    assert time.perf_counter() - start < 0.5


def test_operators_of_a_call_are_bounded():
    assert evaluate("(1 + 2)", 1) == 3
    with pytest.raises(ValueError, match="at most 1 operator a call"):
        evaluate("1 + 2 + 3", 1)


def test_results_read_as_numbers():
    assert [show(v) for v in (3.0, 3.5, 10**30, 1e300)] == ["3", "3.5", str(10**30), "1e+300"]


def test_an_episode_by_hand():
    env, task = opened(min_steps=2, max_steps=2)
    a, one, b, two, c = task.payload["problem"]
    assert task.messages[1].content == f"({a} {one} {b}) {two} {c} = ?"
    assert [tool["function"]["name"] for tool in task.tools] == ["calculator"]
    first = env.step(ask(f"{a} {one} {b}"))
    assert [m.role for m in first.messages] == ["tool"] and first.reward == 0.0 and not first.done
    middle = first.messages[0].content
    both = env.step(ask(f"{middle} {two} {c}", f"{a} {one} {b} {two} {c}"))
    assert [m.content for m in both.messages] == [
        task.payload["answer"],
        "error: at most 1 operator a call",
    ]
    last = env.step(Action(f"Answer: 1, no: answer: **{int(task.payload['answer']):,}**."))
    assert (last.reward, last.done) == (1.0, True)
    assert last.info == {"success": 1.0, "calls": 3.0, "failed_calls": 1.0, "idle_turns": 0.0}


def test_a_turn_without_call_or_answer_is_told_what_to_do():
    env, _ = opened()
    result = env.step(Action("hm"))
    assert (result.messages[0].role, result.reward, result.done) == ("user", 0.0, False)
    assert 'End with the text "Answer: N".' in result.messages[0].content
    assert result.info["idle_turns"] == 1.0


@pytest.mark.parametrize("answer_by", ["text", "submit"])
def test_solved_examples_come_first_and_are_of_no_split(answer_by):
    sizes = {"num_tasks": 30, "eval_size": 10, "min_steps": 1, "max_steps": 2, "max_digits": 1}
    config = {**sizes, "examples": 3, "answer_by": answer_by}
    tasks = {split: Calculator.tasks(config, split) for split in ("train", "eval")}
    plain = Calculator.tasks({**sizes, "answer_by": answer_by}, "eval")
    assert [t.payload for t in tasks["eval"]] == [t.payload for t in plain]  # the same tasks
    asked = {t.messages[-1].content for split in tasks.values() for t in split}
    for task in (*tasks["train"], *tasks["eval"]):
        system, *shown, _ = task.messages
        assert system.role == "system" and shown == list(tasks["train"][0].messages[1:-1])
        assert not asked & {m.content for m in shown}
    roles = [m.role for m in shown]
    assert roles.count("user") == 3 and roles[:3] == ["user", "assistant", "tool"]
    calls = [m for m in shown if m.tool_calls]
    assert len(calls) == roles.count("tool") + (3 if answer_by == "submit" else 0)


@pytest.mark.parametrize("answer, reward", [("{}", 1.0), (" +{} ", 1.0), ("{}.0", 0.0), ("x", 0.0)])
def test_submitted_answers_are_exact(answer, reward):
    env, task = opened(answer_by="submit", operators="+")
    text = answer.replace("{}", task.payload["answer"])
    result = env.step(Action("", (ToolCall("submit", {"answer": text}),)))
    assert (result.reward, result.done) == (reward, True)


def test_many_calls_in_a_turn_are_bounded():
    env, _ = opened()
    result = env.step(ask(*["1 + 1"] * 12))
    assert [m.content for m in result.messages] == ["2"] * 8 + ["error: at most 8 calls a turn"] * 4


@pytest.mark.parametrize(
    "config, why",
    [
        ({"min_steps": 3, "max_steps": 2}, "must rise within 1..8"),
        ({"operators": "/"}, "must be some of"),
        ({"answer_by": "mail"}, "not one of text, submit"),
        ({"max_digits": 1, "min_steps": 1, "max_steps": 1, "operators": "+", "num_tasks": 500}, "only .* distinct"),
        ({"num_tasks": 0}, "must be at least 1"),
        ({"examples": -1}, "examples=-1 at least 0"),
        ({"max_digits": 0}, "must be in 1..12"),
    ],
)  # fmt: skip
def test_impossible_settings_are_told_with_the_remedy(config, why):
    with pytest.raises(ValueError, match=why):
        Calculator.tasks(config, "train")
