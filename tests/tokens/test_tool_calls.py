"""Parsers of tool calls: what is a call, what is an error that the policy can read; pieces make no difference."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.launch import resolve
from rl_jax.tokens import TOOL_PARSERS
from rl_jax.tokens.tool_calls import (
    MAX_ECHO,
    check_call,
    check_tools,
    parse_text,
    read_action,
    signatures,
)
from rl_jax.types import Action, ToolCall

PARSERS = {name: resolve(name, TOOL_PARSERS)() for name in TOOL_PARSERS}
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Work it out.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}, "digits": {"type": "integer"}},
            "required": ["expression"],
        },
    },
}
CALL = ToolCall("calc", {"expression": "1 + 2"})
H, L, M, G = "hermes", "llama3_json", "mistral", "gemma"
ONE = '{"name": "calc", "arguments": {"expression": "1 + 2"}}'
THOUGHT = f"<think>\n<tool_call>{ONE}</tool_call></think> no"
LLAMA = ONE.replace("arguments", "parameters")


@pytest.mark.parametrize(
    "parser, said, text, calls",
    [
        (H, f"<tool_call>{ONE}</tool_call>", "", [CALL]),
        (H, f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>", "Let me see.", [CALL]),
        (H, f"<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>", "", [CALL, CALL]),
        (H, f"a <tool_call>{ONE}</tool_call> b", "a  b", [CALL]),
        (H, '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', "",
            [ToolCall("f", {"x": "</tool_call>"})]),
        (H, '<tool_call>{"name": "f", "arguments": {"x": "\\"}</tool_call>"}}</tool_call>', "",
            [ToolCall("f", {"x": '"}</tool_call>'})]),
        (H, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [ToolCall("f", {"x": 1})]),
        (H, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [ToolCall("f", {})]),
        (H, THOUGHT, THOUGHT, []),
        (H, f"<think>x</think><tool_call>{ONE}</tool_call>", "<think>x</think>", [CALL]),
        (H, "</tool_call> alone", "</tool_call> alone", []),
        (H, "ends with <tool_ca", "ends with <tool_ca", []),
        (H, "a < b", "a < b", []),
        (L, LLAMA, "", [CALL]),
        (L, f" \n{LLAMA}\n", "", [CALL]),
        (L, f"<|python_tag|>{LLAMA}", "", [CALL]),
        (L, f"so <|python_tag|>{LLAMA}; {LLAMA}", "so", [CALL, CALL]),
        (L, '{"answer": 4}', '{"answer": 4}', []),
        (L, "an answer {x}", "an answer {x}", []),
        (L, "x <|python", "x <|python", []),
        (M, f"[TOOL_CALLS][{ONE}]", "", [CALL]),
        (M, f"ok [TOOL_CALLS] [{ONE}, {ONE}]", "ok", [CALL, CALL]),
        (M, f"[TOOL_CALLS]{ONE}", "", [CALL]),
        (M, ONE.replace("}}", '}, "id": "abcdefghi"}').join(["[TOOL_CALLS][", "]"]), "",
            [ToolCall("calc", {"expression": "1 + 2"}, "abcdefghi")]),
        (M, '[TOOL_CALLS]calc[ARGS]{"expression": "1 + 2"}[TOOL_CALLS]f[ARGS]{}', "", [CALL, ToolCall("f", {})]),
        (M, "a [TOOL", "a [TOOL", []),
        (G, "```tool_code\ncalc(expression='1 + 2')\n```", "", [CALL]),
        (G, 'Well:\n```tool_code\nprint(calc(expression="1 + 2"))\n```', "Well:", [CALL]),
        (G, "```tool_code\nf(x=[1, -2.5, None], y={'a': True})\nx = f()\n```", "",
            [ToolCall("f", {"x": [1, -2.5, None], "y": {"a": True}}), ToolCall("f", {})]),
        (G, f"```tool_code\n{LLAMA}\n```", "", [CALL]),
        (G, LLAMA, "", [CALL]),
        (G, f"[{LLAMA}, {LLAMA}]", "", [CALL, CALL]),
        (G, f"```json\n{LLAMA}\n```", "", [CALL]),
        (G, "```python\nprint(1)\n```", "```python\nprint(1)\n```", []),
        (G, "``", "``", []),
    ],
)  # fmt: skip
def test_what_is_said_and_what_is_called(parser, said, text, calls):
    assert parse_text(PARSERS[parser], said) == Action(text, tuple(calls))


@pytest.mark.parametrize(
    "parser, said, why",
    [
        (H, "<tool_call>{", "does not end with </tool_call>"),
        (H, '<tool_call>{"name": "f", "arguments": {"x": "a</tool_call>', "does not end with"),
        (H, "<tool_call>f(x)</tool_call>", "it is no JSON"),
        (H, '<tool_call>{"name": "f"}</tool_call>', 'it has no "arguments"'),
        (H, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "are no object"),
        (H, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "are no object"),
        (H, '<tool_call>{"name": "", "arguments": {}}</tool_call>', 'it has no "name"'),
        (H, '<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'it has no "name"'),
        (H, "<tool_call>3</tool_call>", "it is no object"),
        (H, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is no number"),
        (H, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "too large a number"),
        (H, '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>", "no JSON"),
        (H, '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 40 + "]" * 40 + "}}</tool_call>", "deeper than 32"),
        (H, '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 99_000 + "</tool_call>", "deeper than 32"),
        (H, f"<tool_call>{ONE}</tool_call><tool_call>x</tool_call>", "it is no JSON"),
        (L, '{"name": "calc", ', "it is no JSON"),
        (L, '{"name": "calc"}', 'it has no "parameters"'),
        (L, f"{LLAMA} and more", "it is no JSON"),
        (L, "<|python_tag|>print(1)", "it is no JSON"),
        (L, "<|python_tag|>", "nothing follows"),
        (M, "[TOOL_CALLS]", "neither a list nor [ARGS]"),
        (M, "[TOOL_CALLS][", "it is no JSON"),
        (M, "[TOOL_CALLS]f[ARGS]x", "it is no JSON"),
        (M, "[TOOL_CALLS][1]", "it is no object"),
        (G, "```tool_code\nf(x=1)", "does not end with ```"),
        (G, "```tool_code\n```", "it is empty"),
        (G, "```tool_code\nf(1)\n```", "given by name"),
        (G, "```tool_code\nf(**x)\n```", "given by name"),
        (G, "```tool_code\nf(x=y)\n```", "plain values"),
        (G, "```tool_code\nf(x=__import__('os'))\n```", "plain values"),
        (G, "```tool_code\nf(x={1: 2})\n```", "plain values"),
        (G, "```tool_code\nf(x=0x" + "f" * 9000 + ")\n```", "plain values"),
        (G, "```tool_code\nos.system(x='ls')\n```", "no call name(argument=value, ...)"),
        (G, "```tool_code\nimport os\n```", "no call name(argument=value, ...)"),
        (G, "```tool_code\nf(x=\n```", "no Python"),
        (G, "```tool_code\n" + "(" * 9000 + "\n```", "no Python"),
        (G, "```tool_code\n" + "f()\n" * 9000 + "\n```", "more than 10000"),
        (G, '{"name": "f", "parameters": ', "it is no JSON"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_told_and_never_made(parser, said, why):
    action = parse_text(PARSERS[parser], said)
    assert action.tool_calls == ()
    assert (
        action.parse_error.startswith("The tool call could not be read: ")
        and why in action.parse_error
    )
    assert len(action.parse_error) < MAX_ECHO + 400


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", ONE, LLAMA, "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]",
     "```tool_code\n", "```", "```json", '"', "{", "}", "[", "]", "\\", ";", "calc", "(x=1)", "\n", " ", "<", "a"]
)  # fmt: skip
SAID = st.lists(st.one_of(PIECES, st.text(max_size=4)), max_size=8).map("".join)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(PARSERS)), SAID, st.randoms(use_true_random=False))
def test_pieces_give_what_the_whole_gives_and_show_no_part_of_a_call(name, said, rng):
    parser = PARSERS[name]
    whole = parse_text(parser, said)
    stream, shown, at = parser.stream(), "", 0
    while at < len(said):
        end = at + rng.randint(1, 5)
        shown += stream.feed(said[at:end])
        at = end
        assert said.startswith(shown) or name in (H, G)  # text may follow a call there
        for marker in parser.markers:
            assert (
                "think" in said
                or marker not in shown
                or marker.startswith("</")
                or marker == "[ARGS]"
            )
    left = stream.end()
    text = shown + left.text
    assert (left.calls, left.error) == (whole.tool_calls, whole.parse_error)
    assert (text.strip() if left.calls else text) == whole.text


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.text(max_size=6), PIECES,
              st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip
CALLS = st.lists(
    st.builds(
        ToolCall,
        st.text("abc_", min_size=1, max_size=5),
        st.dictionaries(st.text("xyz", min_size=1, max_size=3), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(PARSERS)), CALLS, st.sampled_from(["", "ok"]))
def test_what_is_written_is_read_back(name, calls, content):
    text = PARSERS[name].write(calls, content)
    assert text.startswith(content)
    action = parse_text(PARSERS[name], text)
    assert action.parse_error is None and action.text == content
    assert [(c.name, dict(c.arguments)) for c in action.tool_calls] == [
        (c.name, json.loads(json.dumps(dict(c.arguments)))) for c in calls
    ]


@pytest.mark.parametrize(
    "call, why",
    [
        (CALL, None),
        (ToolCall("calc", {"expression": "1", "digits": 3}), None),
        (ToolCall("sum", {}), "there is no tool 'sum'; the tools are calc"),
        (ToolCall("calc", {}), "calc needs the argument 'expression'"),
        (ToolCall("calc", {"expression": 3}), "'expression' of calc must be of type string"),
        (ToolCall("calc", {"expression": "1", "digits": True}), "must be of type integer"),
        (ToolCall("calc", {"expression": "1", "x": 1}), "has no argument 'x'; it takes expression, digits"),
    ],
)  # fmt: skip
def test_calls_are_held_against_the_tools(call, why):
    found = check_call(call, [CALC])
    assert found == why if why is None else why in found
    action = read_action(PARSERS[H], PARSERS[H].write([call]), [CALC])
    assert action.tool_calls == ((call,) if why is None else ())
    assert why is None or action.parse_error == f"The tool call could not be made: {found}."


def test_without_tools_nothing_is_a_call():
    said = f"<tool_call>{ONE}</tool_call>"
    assert read_action(PARSERS[H], said, ()) == Action(said)


def test_tools_are_told_in_a_line_each():
    assert signatures([CALC]) == "calc(expression: string, digits: integer): Work it out."


@pytest.mark.parametrize(
    "tools, why",
    [
        (3, "no sequence"),
        ([{}], r"tools\[0\] must be"),
        ([{"type": "function", "function": {"name": ""}}], r"tools\[0\] must be"),
        ([{**CALC, "type": "x"}], r"tools\[0\] must be"),
        ([{"type": "function", "function": {"name": "f", "parameters": 3}}], "must be a JSON schema"),
        ([CALC, CALC], "two tools named calc"),
    ],
)  # fmt: skip
def test_bad_schemas_are_refused(tools, why):
    check_tools([CALC])
    with pytest.raises(ValueError, match=why):
        check_tools(tools)
