"""Verifiers: answers and near misses; what a task lacks is an error of its own, and what hangs ends by its deadline."""

import asyncio
import json
from dataclasses import replace

import pytest

from rl_jax.rewards.answer_format import AnswerFormat
from rl_jax.rewards.answers import boxed
from rl_jax.rewards.brevity import Brevity
from rl_jax.rewards.regex_match import RegexMatch
from rl_jax.rollout.process import Limit
from rl_jax.rollout.scorer_pool import ScorerPool
from rl_jax.settings import RewardSettings
from rl_jax.types import EpisodeView, Task

BLANK = Task("t", "e", "e", (), {}, "r", 1)


def score(scorer, *texts, **payload):
    """The value, of a reward whose one part is the scorer's."""
    reward = scorer.score(replace(BLANK, payload=payload), EpisodeView((), texts, {}, ()))
    assert (reward.status, list(reward.parts.values())) == ("scored", [reward.value])
    assert reward.scorer_version == scorer.version
    return reward.value


@pytest.mark.parametrize(
    "pattern, texts, value",
    [
        (r"\d+", ("12",), 1.0),
        (r"\d+", (" 12\n",), 1.0),
        (r"\d+", ("12.",), 0.0),  # the whole text
        (r"\d+", ("a12",), 0.0),
        (r"(?i)yes.*", ("Yes,\nindeed",), 1.0),
        (r"a|b", ("c", "b"), 1.0),  # the last turn
        (r"a|b", ("b", "c"), 0.0),
        (r"", (), 1.0),
        (r"a+", (), 0.0),
    ],
)
def test_regex(pattern, texts, value):
    assert score(RegexMatch(), *texts, pattern=pattern) == value


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]+$"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "text, value",
    [
        ('{"name": "ann", "age": 3}', 1.0),
        ('{"name": "ann"}', 1.0),
        ('```json\n{"name": "ann"}\n```', 1.0),
        ('```\n{"name": "ann"}\n```', 1.0),
        ('Here: {"name": "ann"}', 0.0),
        ('```json\n{"name": "ann"}\n``` there', 0.0),
        ('{"name": "Ann"}', 0.0),
        ('{"name": "ann", "age": -1}', 0.0),
        ('{"name": "ann", "age": 3.5}', 0.0),
        ('{"name": "ann", "age": "3"}', 0.0),
        ('{"name": "ann", "age": true}', 0.0),
        ('{"name": "ann", "size": 1}', 0.0),
        ('{"age": 3}', 0.0),
        ('{"name": "bob", "name": "ann"}', 0.0),  # a key stands twice
        ('{"name": "ann", "age": NaN}', 0.0),
        ("{'name': 'ann'}", 0.0),
        ('{"name": "ann",}', 0.0),
        ("[" * 100_000, 0.0),
        ('{"name": ' + "[" * 500 + "]" * 500 + "}", 0.0),
        ("null", 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(text, value):
    pytest.importorskip("jsonschema", reason="extra jsonschema")
    from rl_jax.rewards.json_schema import JsonSchema

    assert score(JsonSchema(), text, schema=SCHEMA) == value


@pytest.mark.parametrize(
    "schema, said",
    [
        ("{}", "no dict in payload"),
        ({"type": "objekt"}, "is no schema"),
        (
            {"$ref": "http://127.0.0.1:1/other.json"},
            "refers to 'http://127.0.0.1:1/other.json', which is not fetched",
        ),
    ],
)
def test_a_schema_that_is_none_or_lies_elsewhere_is_the_tasks_error(schema, said):
    pytest.importorskip("jsonschema", reason="extra jsonschema")
    from rl_jax.rewards.json_schema import JsonSchema

    with pytest.raises(ValueError, match=said):
        score(JsonSchema(), "1", schema=schema)


@pytest.mark.parametrize(
    "answer, text, value",
    [
        ("12", "12", 1.0),
        ("12", r"so it is \boxed{12}", 1.0),
        ("12", r"\boxed{13} or rather \boxed{12}", 1.0),  # the last
        ("12", r"\boxed{12}, no, \boxed{13}", 0.0),
        ("12", r"\boxed{12", 0.0),
        ("12", "13", 0.0),
        ("12", "12 or 13", 0.0),
        ("12", "12, 13", 0.0),
        ("12", "", 0.0),
        ("12", "12 " + "x" * 200, 0.0),  # long, and nothing boxed
        ("12", "long " * 50 + r"\boxed{12}", 1.0),
        (r"\frac{1}{2}", "1/2", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"\frac{1}{2}", "0.51", 0.0),
        ("1,000", "1000", 1.0),
        ("-3", "- 3", 1.0),
        ("-3", "3", 0.0),
        ("x^2+2x+1", "(x+1)^2", 1.0),
        ("x^2+2x+1", "(x-1)^2", 0.0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
        (r"\sqrt{8}", "2.83", 0.0),
        (r"\{1,2\}", r"\{2,1\}", 1.0),
        ("(1,2)", "(2,1)", 0.0),
        ("12", "__import__('os')._exit(1)", 0.0),  # text, whatever it says
        ("12", r"\boxed{__import__('os')._exit(1)}", 0.0),
    ],
)
def test_math(answer, text, value):
    pytest.importorskip("math_verify", reason="extra math_verify")
    assert score(math(), text, answer=answer) == value


def math():
    from rl_jax.rewards.math_answer import MathAnswer

    return MathAnswer()


def test_math_of_a_task_with_a_pattern_or_without_an_answer():
    pytest.importorskip("math_verify", reason="extra math_verify")
    tagged = {"answer": "12", "answer_pattern": "<a>(.*?)</a>"}
    assert score(math(), "13, <a>11</a> <a>12</a>", **tagged) == 1.0
    assert score(math(), "12", **tagged) == 0.0
    with pytest.raises(ValueError, match="no str in payload"):
        score(math(), "12", answer=12)
    with pytest.raises(ValueError, match="cannot be read as LaTeX"):
        score(math(), "12", answer="")


@pytest.mark.parametrize(
    "text, inside",
    [
        (r"\boxed{12}", "12"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{1", None),
        ("12", None),
    ],
)
def test_what_stands_in_a_box(text, inside):
    assert boxed(text) == inside


@pytest.mark.parametrize(
    "text, value",
    [
        ("<think>so</think><answer>12</answer>", 1.0),
        (" <think>so</think>\n\n<answer>12</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<answer>12</answer>", 0.0),
        ("<answer>12</answer><think>so</think>", 0.0),
        ("<think>so</think><answer>12</answer> done", 0.0),
        ("well <think>so</think><answer>12</answer>", 0.0),
        ("<think>so</think> and <answer>12</answer>", 0.0),
        ("<think>so</think><answer>12", 0.0),
        ("<think>so</think><answer>1</answer><answer>2</answer>", 0.0),
        ("<think><answer>12</answer></think>", 0.0),
        ("<think>a</think>b</think><answer>12</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_answer_format(text, value):
    assert score(AnswerFormat(), text) == value


def test_answer_format_of_other_tags():
    assert score(AnswerFormat(think="", answer="final"), "<final>1</final>") == 1.0
    with pytest.raises(ValueError, match="no name of a tag"):
        AnswerFormat(think="a b")


@pytest.mark.parametrize(
    "texts, value",
    [((), 0.0), (("12345", "12345"), 0.0), (("1" * 15,), -0.5), (("1" * 20,), -1.0), (("1" * 99,), -1.0)],
)  # fmt: skip
def test_brevity(texts, value):
    assert score(Brevity(max_chars=10), *texts) == value


@pytest.mark.slow
def test_reasoning_gyms_own_score():
    pytest.importorskip("reasoning_gym")
    from envs.reasoning_gym import ReasoningGym
    from rl_jax.rewards.reasoning_gym_answer import ReasoningGymAnswer

    config = {"dataset": "gcd", "size": 4, "eval_size": 2, "answer_tag": "a"}
    task = ReasoningGym.tasks(config, "train")[0]
    right = task.payload["answer"]
    for text, value in [(f"<a>{right}</a>", 1.0), (f"<a>{int(right) + 1}</a>", 0.0), ("", 0.0)]:
        assert score(ReasoningGymAnswer(), text, **task.payload) == value
    with pytest.raises(ValueError, match="no str in payload"):
        score(ReasoningGymAnswer(), right, answer=right)


HANGS = {
    "regex_match": ({"pattern": "(a+)+b"}, "a" * 40),
    "json_schema": ({"schema": {"type": "string", "pattern": "^(a+)+$"}}, json.dumps("a" * 40 + "b")),
    "math": ({"answer": "1"}, "9^{9^{9}} - 9^{9^{9}}"),
}  # fmt: skip


@pytest.mark.slow
def test_what_hangs_in_a_verifier_is_killed_and_the_next_answer_is_scored():
    """Patterns that backtrack without end, powers that SymPy multiplies out: a timeout, not a 0."""
    extras = {"json_schema": "jsonschema", "math": "math_verify"}
    for package in extras.values():
        pytest.importorskip(package, reason="an extra")
    targets = {
        "regex_match": "rl_jax.rewards.regex_match:RegexMatch",
        "json_schema": "rl_jax.rewards.json_schema:JsonSchema",
        "math": "rl_jax.rewards.math_answer:MathAnswer",
    }
    good = {"regex_match": ({"pattern": "a"}, "a"), "json_schema": ({"schema": {}}, "1"),
            "math": ({"answer": "1"}, "1")}  # fmt: skip

    async def play():
        pool = ScorerPool(targets, RewardSettings(workers=3), Limit(60.0, "start"))
        await pool.check()
        await pool.start()

        async def ask(name, payload, text, limit_s):
            task = replace(BLANK, payload=payload)
            view = EpisodeView((), (text,), {}, ())
            return (await pool.score(name, task, view, limit_s=limit_s)).reward

        try:
            hung = await asyncio.gather(*(ask(n, *HANGS[n], 2.0) for n in targets))
            return hung, await asyncio.gather(*(ask(n, *good[n], 60.0) for n in targets))
        finally:
            await pool.close()

    hung, scored = asyncio.run(asyncio.wait_for(play(), 120))
    assert [(r.status, r.value) for r in hung] == [("timeout", None)] * 3
    assert [r.value for r in scored] == [1.0] * 3
