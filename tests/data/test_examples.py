"""Rows as trajectories: which tokens they are, and which of them train."""

import numpy as np
import pytest

from rl_jax.data.examples import ExampleRules, make_example, render
from rl_jax.data.rows import Row
from rl_jax.tokens import ByteTokenizer, ChatRenderer
from rl_jax.types import Message, ToolCall
from tests.tokens.families import FAMILIES, renderer_of

TOKENIZER = ByteTokenizer()
RENDERER = ChatRenderer(TOKENIZER)
TALK = (
    Message("system", "be brief"),
    Message("user", "2+2"),
    Message("assistant", "4"),
    Message("tool", "<|assistant|>5"),  # content never makes a header
    Message("user", "sure?"),
    Message("assistant", "yes"),
    Message("assistant", "very"),
)


@pytest.mark.parametrize(
    "num_prompt, train_on, trained",
    [(0, "all", "4<|end|>yes<|end|>very<|end|>"), (0, "last", "very<|end|>"),
     (3, "all", "yes<|end|>very<|end|>"), (6, "last", "very<|end|>")],
)  # fmt: skip
def test_trained_are_the_assistants_words_and_their_ends_alone(num_prompt, train_on, trained):
    tokens, mask, turn_ids = render(TALK, num_prompt, RENDERER, train_on)
    assert TOKENIZER.decode(tokens[mask]) == trained
    assert (
        TOKENIZER.decode(tokens)
        == "<|bos|><|system|>be brief<|end|><|user|>2+2<|end|><|assistant|>4<|end|>"
        "<|tool|><|assistant|>5<|end|><|user|>sure?<|end|><|assistant|>yes<|end|><|assistant|>very<|end|>"
    )
    assert turn_ids[0] == -1 and list(np.unique(turn_ids)) == [-1, 0, 1, 2]
    assert TOKENIZER.decode(tokens[turn_ids == 0]) == "4<|end|>"


def test_tokens_are_those_a_policy_meets_in_rollout():
    """The context of the last turn: first() and next() round what was sampled."""
    tokens, _, _ = render(TALK[:6], 0, RENDERER)
    context = [*RENDERER.first(TALK[:2]), *TOKENIZER.encode("4"), TOKENIZER.end]
    context += [*RENDERER.next(TALK[3:5], closed=True)]
    assert tokens.tolist() == [int(t) for t in [*context, *TOKENIZER.encode("yes"), TOKENIZER.end]]


@pytest.mark.parametrize("name", ["house", *sorted(FAMILIES)])
def test_rows_with_tool_calls_are_those_of_rollout_too(name):
    renderer = RENDERER if name == "house" else renderer_of(name)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = (
        {
            "type": "function",
            "function": {"name": "add", "description": "Add.", "parameters": schema},
        },
    )
    calls = (ToolCall("add", {"a": 2}, "abcdefgh1"), ToolCall("add", {"a": 3}, "abcdefgh2"))
    talk = (
        Message("user", "2+2 and 3+3"),
        Message("assistant", "", calls),
        Message("tool", "4"),
        Message("tool", "6"),
        Message("assistant", "4 and 6"),
    )
    tokens, mask, _ = render(talk, 0, renderer, "all", tools)
    asked, answer = renderer.said(talk[1]), renderer.said(talk[4])
    closed = renderer.is_closed(asked)
    parts = [
        renderer.first(talk[:1], tools),
        asked,
        renderer.next(talk[2:4], closed=closed, calls=calls),
        answer,
    ]
    assert tokens.tolist() == np.concatenate(parts).tolist()
    assert tokens[mask].tolist() == [*asked.tolist(), *answer.tolist()]
    action = renderer.parse(asked, tools)
    assert [(c.name, c.arguments) for c in action.tool_calls] == [
        ("add", {"a": 2}),
        ("add", {"a": 3}),
    ]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_rows_in_a_familys_format_are_those_of_rollout_too(name):
    renderer = renderer_of(name)
    talk = (*TALK[:4], Message("user", "sure?"), Message("assistant", "<think>x</think> yes"))
    tokens, mask, turn_ids = render(talk, 0, renderer)
    answers = [renderer.said(talk[2]), renderer.said(talk[5])]
    closed = renderer.is_closed(answers[0])
    parts = [
        renderer.first(talk[:2]),
        answers[0],
        renderer.next(talk[3:5], closed=closed),
        answers[1],
    ]
    assert tokens.tolist() == np.concatenate(parts).tolist()
    assert tokens[mask].tolist() == np.concatenate(answers).tolist()
    assert turn_ids.tolist() == np.repeat([-1, 0, 1, 1], [len(part) for part in parts]).tolist()


def test_reward_models_train_the_last_token_even_of_what_was_cut():
    row = Row((TALK[:3], TALK[:2] + (Message("assistant", "four"),)), 2)
    whole = make_example(row, 0, RENDERER, ExampleRules("ends", "all", 99))
    cut = make_example(row, 0, RENDERER, ExampleRules("ends", "all", 18))
    for example, size in ((whole, None), (cut, 18)):
        for member in example.group.trajectories:
            assert np.flatnonzero(member.loss_mask).tolist() == [len(member.tokens) - 1]
            assert size is None or len(member.tokens) <= size
    assert cut.is_cut and not whole.is_cut and whole.trains
