"""Turns put behind each other against the whole rendering, of conversations of a task's own kind."""

import numpy as np
import pytest

from rl_jax.tokens import ByteTokenizer, ChatRenderer
from rl_jax.tokens.bridge import THOUGHT, is_rewritten, talk_of
from rl_jax.tokens.tool_calls import check_call
from rl_jax.types import Message
from tests.tokens.families import FAMILIES, renderer_of
from tests.tokens.test_templates import CALC

NAMES = sorted(FAMILIES)
USER, SYSTEM = Message("user", "2+2?"), Message("system", "Be brief.")
# Of each family that does not show every history: (tools, thought, system message) -> whether it shows another one.
REWRITES = {
    "llama2": lambda tools, thought, system: True,  # blanks stand round what was said
    "mistral": lambda tools, thought, system: tools or system,  # which move to the last question
    "qwen3": lambda tools, thought, system: thought and not tools,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("thought", ["", THOUGHT])
@pytest.mark.parametrize("tools", [(), (CALC,)])
def test_what_each_template_makes_of_a_history(name, tools, thought):
    renderer = renderer_of(name)
    for first in ((USER,), (SYSTEM, USER)):
        expected = REWRITES.get(name, lambda *of: False)(bool(tools), bool(thought), len(first) > 1)
        found = is_rewritten(renderer, talk_of(first, tools, thought), tools)
        assert found == expected, (len(first), tools)


def test_calls_of_the_conversation_are_made_and_answered():
    """Its turns are read as calls that the tools take, and not as text."""
    kinds = {"s": "string", "i": "integer", "n": "number", "b": "boolean", "a": "array", "o": "object"}  # fmt: skip
    properties = {**{k: {"type": v} for k, v in kinds.items()}, "e": {"enum": ["x", "y"]}, "more": {}}  # fmt: skip
    required = [*kinds, "e"]
    function = {"name": "f", "parameters": {"properties": properties, "required": required}}
    tools = ({"type": "function", "function": function},)
    for name in NAMES:
        talk, renderer = talk_of([USER], tools, THOUGHT), renderer_of(name)
        assert [m.role for m in talk] == ["user", *["assistant", "tool"] * 3]
        (call,) = renderer.parse(renderer.said(talk[1]), tools).tool_calls
        assert check_call(call, tools) is None and [*call.arguments] == required


def test_the_houses_format_shows_every_history():
    renderer = ChatRenderer(ByteTokenizer())
    assert not is_rewritten(renderer, talk_of([SYSTEM, USER], (CALC,), THOUGHT), (CALC,))


def test_the_tokens_of_turns_may_be_given():
    """Those that no text gives back keep their place; thoughts among them are dropped as any other."""
    renderer = renderer_of("qwen3")
    spelt = [i for letter in "hello" for i in renderer.tokenizer.encode(letter)]
    end = renderer.stop_token_ids[0]
    talk = [USER, Message("assistant", "hello"), Message("user", "And?")]
    assert not is_rewritten(renderer, talk, (), [np.array([*spelt, end], np.int32)])
    thought = renderer.said(Message("assistant", THOUGHT + "\nhello"))
    assert is_rewritten(renderer, talk, (), [thought])


def test_a_conversation_without_turns_has_no_bridge():
    for talk in ([USER], [USER, Message("assistant", "4")]):
        assert not is_rewritten(renderer_of("llama2"), talk)
