"""Options of a chat template: those that it reads, with values that are no free text."""

import re

import pytest

from rl_jax.types import Message
from tests.tokens.families import renderer_of


def test_options_of_a_template_are_those_that_it_reads():
    renderer = renderer_of("qwen3")
    messages = [Message("user", "hi")]
    quick, decode = renderer.with_options({"enable_thinking": False}), renderer.tokenizer.decode
    plain = decode(renderer.first(messages))
    assert decode(quick.first(messages)) == plain + "<think>\n\n</think>\n\n"
    assert decode(renderer.first(messages)) == plain and renderer.with_options({}) is renderer
    assert renderer.with_options({"enable_thinking": True}).first(messages).tolist() == (
        renderer.first(messages).tolist()
    )
    for options, told in (
        ({"thinking": True}, "'thinking' is no option of this template; it reads enable_thinking"),
        ({"messages": "x"}, "'messages' is no option"),
        (
            {"enable_thinking": "<|im_end|>"},
            "enable_thinking is '<|im_end|>'; it may be False, True",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            renderer.with_options(options)
    with pytest.raises(ValueError, match="it reads none"):
        renderer_of("qwen25").with_options({"enable_thinking": False})
