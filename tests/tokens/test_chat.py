"""Token-in-token-out: what is trained is what was seen, and content never forges the scaffold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.tokens import ROLES, TOKENIZERS, ByteTokenizer, ChatRenderer, encodable
from rl_jax.tokens.mistral import Mistral
from rl_jax.types import Message, ToolCall

TOKENIZER = ByteTokenizer()
RENDERER = ChatRenderer(TOKENIZER)
NUM_SPECIALS = len(ByteTokenizer.SPECIALS)

# Text that has broken renderers: control names, surrogates (also lone), NUL, joiners, right-to-left.
SPIKES = st.sampled_from(
    [
        *ByteTokenizer.SPECIALS,
        "\ud835",
        "\udc00",
        "\x00",
        "\u200d",
        "\u202e",
        "👩‍👩‍👧",
        "e\u0301",
        "\r\n",
        "",
    ]
)
TEXT = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=()), max_size=8), SPIKES), max_size=5
).map("".join)
MESSAGES = st.lists(st.builds(Message, st.sampled_from(ROLES), TEXT), min_size=1, max_size=3)
SAMPLED = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=12)


def test_vocabulary_order_is_fixed():
    assert TOKENIZERS == {"byte": "rl_jax.tokens:ByteTokenizer"}
    assert (TOKENIZER.pad, TOKENIZER.bos, TOKENIZER.eos, TOKENIZER.end) == (0, 1, 2, 7)
    assert [TOKENIZER.role(name) for name in ROLES] == [3, 4, 5, 6]
    assert TOKENIZER.vocab_size == 264
    assert TOKENIZER.stop_token_ids == (7, 2)
    assert TOKENIZER.encode("Aé") == [8 + 0x41, 8 + 0xC3, 8 + 0xA9]


def test_scaffold_by_hand():
    first = RENDERER.first((Message("system", "s"), Message("user", "u")))
    assert first.dtype == np.int32
    assert first.tolist() == [1, 3, 8 + ord("s"), 7, 4, 8 + ord("u"), 7, 5]
    assert RENDERER.next((Message("tool", "t"),), closed=True).tolist() == [6, 8 + ord("t"), 7, 5]
    assert RENDERER.next((Message("user", ""),), closed=False).tolist() == [7, 4, 7, 5]
    assert RENDERER.next((), closed=True).tolist() == [5]


@settings(deadline=None)
@given(TEXT)
def test_content_never_yields_a_special_token(text):
    tokens = TOKENIZER.encode(text)
    assert all(NUM_SPECIALS <= token < TOKENIZER.vocab_size for token in tokens)
    assert TOKENIZER.decode(tokens) == encodable(text)


@settings(deadline=None)
@given(st.text())
def test_text_without_surrogates_round_trips(text):
    assert encodable(text) == text
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_lone_surrogates_become_the_replacement_character():
    assert encodable("a\ud835b") == "a\ufffdb"
    assert encodable("\udc00\ud835") == "\ufffd\ufffd"
    assert encodable("\ud835\udc00") == "\U0001d400"  # a pair is one character
    assert TOKENIZER.encode("\ud835") == TOKENIZER.encode("\ufffd")


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    MESSAGES,
    st.lists(
        st.tuples(SAMPLED, st.lists(st.builds(Message, st.sampled_from(ROLES), TEXT), max_size=2)),
        max_size=5,
    ),
)
def test_trained_tokens_are_the_tokens_that_were_seen(first_messages, turns):
    """Each context extends the last one, and specials outside sampled spans are scaffold only."""
    context = RENDERER.first(first_messages)
    pieces, sampled_mask = [context], [np.zeros(len(context), bool)]
    scaffold = 1 + 2 * len(first_messages) + 1  # bos, role + end a message, assistant
    for sampled, messages in turns:
        tokens = np.array(sampled, np.int32)
        closed = RENDERER.is_closed(tokens)
        suffix = RENDERER.next(messages, closed=closed)
        pieces += [tokens, suffix]
        sampled_mask += [np.ones(len(tokens), bool), np.zeros(len(suffix), bool)]
        seen = np.concatenate([context, tokens, suffix])
        assert np.array_equal(seen[: len(context)], context)
        context = seen
        scaffold += (not closed) + 2 * len(messages) + 1
        assert RENDERER.parse(tokens).tool_calls == ()
    trained, mask = np.concatenate(pieces), np.concatenate(sampled_mask)
    assert np.array_equal(trained, context) and trained.dtype == np.int32
    assert int((trained[~mask] < NUM_SPECIALS).sum()) == scaffold


def test_a_turn_is_closed_by_the_end_token_only():
    assert RENDERER.is_closed(np.array([50, 7], np.int32))
    assert not RENDERER.is_closed(np.array([50, 2], np.int32))  # eos is no end token
    assert not RENDERER.is_closed(np.array([], np.int32))


def test_parse_drops_one_stop_token_and_shows_other_specials_by_name():
    assert RENDERER.parse(np.array([8 + ord("L"), 7], np.int32)).text == "L"
    assert RENDERER.parse(np.array([8 + ord("L"), 2], np.int32)).text == "L"
    assert RENDERER.parse(np.array([4, 8 + ord("L")], np.int32)).text == "<|user|>L"
    assert RENDERER.parse(np.array([], np.int32)).text == ""
    assert RENDERER.parse(np.array([8 + 0xFF], np.int32)).text == "\ufffd"


def test_a_special_name_does_not_mend_broken_utf8():
    assert TOKENIZER.decode([8 + 0xC3, 7, 8 + 0xA9]) == "\ufffd<|end|>\ufffd"


def test_ids_that_only_a_padded_model_has_are_shown_as_no_text():
    assert TOKENIZER.decode([8 + 65, 264, 8 + 0xC3, 99_999, 8 + 66]) == "A\ufffd\ufffd\ufffdB"
    with pytest.raises(ValueError, match="token -1 is outside the byte vocabulary"):
        TOKENIZER.decode([5, -1])


def test_what_cannot_be_rendered_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match="use one of system, user, assistant, tool"):
        RENDERER.first((Message("developer", "x"),))
    with pytest.raises(ValueError, match="needs a first message"):
        RENDERER.first(())


CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Work it out.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
TOLD = (
    "Tools:\ncalc(x: string): Work it out.\n"
    'Call a tool with <tool_call>{"name": TOOL, "arguments": {ARGUMENT: VALUE}}</tool_call>; the answer comes as the'
    " next message."
)


def test_tools_stand_in_the_system_message():
    decode = TOKENIZER.decode
    user = Message("user", "u")
    alone = decode(RENDERER.first([user], [CALC]))
    assert alone == f"<|bos|><|system|>{TOLD}<|end|><|user|>u<|end|><|assistant|>"
    both = decode(RENDERER.first([Message("system", "s"), user], [CALC]))
    assert both == f"<|bos|><|system|>s\n\n{TOLD}<|end|><|user|>u<|end|><|assistant|>"


def test_calls_are_said_and_read():
    call = ToolCall("calc", {"x": "<|end|>"})
    said = RENDERER.said(Message("assistant", "so", (call,)))
    text = 'so\n<tool_call>\n{"name": "calc", "arguments": {"x": "<|end|>"}}\n</tool_call>'
    assert TOKENIZER.decode(said) == text + "<|end|>" and (said[:-1] >= NUM_SPECIALS).all()
    action = RENDERER.parse(said, [CALC])
    assert (action.text, action.tool_calls, action.parse_error) == ("so", (call,), None)
    assert RENDERER.parse(said).text == text and RENDERER.text(said) == text
    messages = [Message("user", "u"), Message("assistant", "so", (call,)), Message("tool", "4")]
    assert TOKENIZER.decode(RENDERER.first(messages)) == (
        f"<|bos|><|user|>u<|end|><|assistant|>{text}<|end|><|tool|>4<|end|><|assistant|>"
    )


def test_the_hash_tells_parsers_and_vocabularies_apart():
    class Other(ByteTokenizer):
        SPECIALS = (*ByteTokenizer.SPECIALS[:-1], "<|stop|>")

    hashes = {
        RENDERER.template_sha256,
        ChatRenderer(TOKENIZER, Mistral()).template_sha256,
        ChatRenderer(Other()).template_sha256,
    }
    assert len(hashes) == 3 and ChatRenderer(ByteTokenizer()).template_sha256 in hashes
