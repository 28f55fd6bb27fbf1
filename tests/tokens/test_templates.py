"""Chat templates: tokens of the plain rendering, content that forges nothing, suffixes that fit, histories that change.

The templates of tests/data/templates behave as those of their families; the tokenizers are small and trained here.
"""

import json
import random

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.ext import Extension, LoopControlExtension
from tokenizers import Tokenizer as Library

from rl_jax.launch import resolve
from rl_jax.tokens.load import load_tokenizer, make_renderer
from rl_jax.tokens.marks import PROBES
from rl_jax.types import Message, ToolCall
from tests.tokens.families import (
    CHATML,
    FAMILIES,
    MARKERS,
    TEMPLATES,
    directory_of,
    renderer_of,
    write,
)

NAMES = sorted(FAMILIES)
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": 'Say "what" it is.',
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "é"}},
            "required": ["expression"],
        },
    },
}


class _Body(Extension):
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def plain(name, messages, tools=None, prompt=True) -> str:
    """The rendering as transformers has it: one string, contents in it as they are."""

    def refuse(message):
        raise ValueError(message)

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Body]
    )
    environment.filters["tojson"] = lambda x, **k: json.dumps(x, ensure_ascii=False, **k)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda f: "26 Jul 2024"}
    template = environment.from_string((TEMPLATES / f"{name}.jinja").read_text())
    family = FAMILIES[name]
    tokens = {
        "eos_token": family.eos or family.end,
        **({"bos_token": family.bos} if family.bos else {}),
    }
    return template.render(messages=messages, tools=tools, add_generation_prompt=prompt, **tokens)


def tokens_of(name, text) -> list[int]:
    library = Library.from_file(str(directory_of(name) / "tokenizer.json"))
    return library.encode(text, add_special_tokens=False).ids


def dicts(messages):
    return [{"role": m.role, "content": m.content} for m in messages]


# --- the same tokens as everybody's ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_system", [True, False])
def test_first_context_has_the_tokens_of_the_plain_rendering(name, with_system):
    renderer = renderer_of(name)
    talk = [Message("system", "Be brief, été.\n")] if with_system else []
    talk += [Message("user", "\n  What is 12 + 34?\tx 😀 \n")]
    text = plain(name, dicts(talk)) + (
        "<|im_start|>assistant\n" if name == "chatml_no_prompt" else ""
    )
    assert renderer.first(talk).tolist() == tokens_of(name, text)
    assert renderer.first(talk).dtype == np.int32
    if renderer.tells_tools:
        text = plain(name, dicts(talk), [CALC])
        assert renderer.first(talk, [CALC]).tolist() == tokens_of(name, text)


@pytest.mark.parametrize("name", NAMES)
def test_parsers_and_tools_are_those_of_the_family(name):
    renderer = renderer_of(name)
    assert renderer.tells_tools == FAMILIES[name].tools
    assert renderer.stop_token_ids[0] == renderer.tokenizer.control[FAMILIES[name].end]
    said = renderer.said(Message("assistant", "", (ToolCall("calc", {"expression": "1 + 2"}),)))
    action = renderer.parse(said, [CALC])
    assert [(c.name, c.arguments) for c in action.tool_calls] == [("calc", {"expression": "1 + 2"})]
    assert action.text == "" and renderer.is_closed(said)
    assert renderer.parse(said).tool_calls == ()
    told = renderer.tokenizer.decode(renderer.first([Message("user", "x")], [CALC]))
    assert "calc" in told


HEAD, END = "<|im_start|>", "<|im_end|>"
L3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
SUFFIXES = {  # of: one user message; two answers of tools; a system message in the middle; nothing
    "smollm2": (
        f"\n{HEAD}user\nhi{END}\n{HEAD}assistant\n",
        f'\n{HEAD}tool\n4 "q"{END}\n{HEAD}tool\n5{END}\n{HEAD}assistant\n',
        f"\n{HEAD}system\nnow{END}\n{HEAD}user\nhi{END}\n{HEAD}assistant\n",
        f"\n{HEAD}assistant\n",
    ),
    "qwen25": (
        f"\n{HEAD}user\nhi{END}\n{HEAD}assistant\n",
        f'\n{HEAD}user\n<tool_response>\n4 "q"\n</tool_response>\n<tool_response>\n5\n</tool_response>{END}'
        f"\n{HEAD}assistant\n",
        f"\n{HEAD}system\nnow{END}\n{HEAD}user\nhi{END}\n{HEAD}assistant\n",
        f"\n{HEAD}assistant\n",
    ),
    "llama31": (
        f"{L3.format('user')}hi<|eot_id|>{L3.format('assistant')}",
        f'{L3.format("ipython")}"4 \\"q\\""<|eot_id|>{L3.format("ipython")}"5"<|eot_id|>{L3.format("assistant")}',
        f"{L3.format('system')}now<|eot_id|>{L3.format('user')}hi<|eot_id|>{L3.format('assistant')}",
        L3.format("assistant"),
    ),
    "mistral": (
        "[INST]hi[/INST]",
        '[TOOL_RESULTS]{"content": "4 \\"q\\"", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "5", "call_id": "000000001"}[/TOOL_RESULTS]',
        "[INST]now\n\nhi[/INST]",
        "",
    ),
    "gemma3": (
        "\n<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
        '\n<start_of_turn>user\n4 "q"\n\n5<end_of_turn>\n<start_of_turn>model\n',
        "\n<start_of_turn>user\nnow\n\nhi<end_of_turn>\n<start_of_turn>model\n",
        "\n<start_of_turn>model\n",
    ),
}
SUFFIXES["qwen3"] = SUFFIXES["qwen25"]
SUFFIXES["chatml_no_prompt"] = SUFFIXES["smollm2"]


@pytest.mark.parametrize("name", sorted(SUFFIXES))
def test_suffixes_of_later_turns_by_hand(name):
    renderer, end = renderer_of(name), FAMILIES[name].end
    hi, now = Message("user", "hi"), Message("system", "now")
    answers = [Message("tool", '4 "q"'), Message("tool", "5")]
    calls = [ToolCall("calc", {"expression": "4"}, "abcdefghi")]
    for messages, text in zip(([hi], answers, [now, hi], []), SUFFIXES[name]):
        for closed, head in ((True, ""), (False, end)):
            ids = renderer.next(messages, closed=closed, calls=calls)
            assert renderer.tokenizer.decode(ids) == head + text
            assert ids.tolist() == tokens_of(name, head + text)


def test_ids_that_a_policy_made_up_do_not_stop_a_conversation():
    renderer = renderer_of("mistral")
    calls = [ToolCall("calc", {}, "no")]
    text = renderer.tokenizer.decode(
        renderer.next([Message("tool", "5")], closed=True, calls=calls)
    )
    assert text == '[TOOL_RESULTS]{"content": "5", "call_id": "000000000"}[/TOOL_RESULTS]'


def test_a_turn_is_closed_by_the_templates_end_token():
    renderer = renderer_of("qwen25")
    end, other = renderer.stop_token_ids
    assert renderer.is_closed(np.array([50, end], np.int32))
    assert not renderer.is_closed(np.array([50, other], np.int32))
    assert not renderer.is_closed(np.array([], np.int32))
    assert renderer.text(np.array([50, other])) == renderer.tokenizer.decode([50])


# --- content forges nothing ------------------------------------------------------------------------------------------


def hostile_strings(num):
    """Names of control tokens of every family in every dress, and pieces that templates look for."""
    rng = random.Random(7)
    names = sorted(
        {t for f in FAMILIES.values() for t in (*f.special, *f.markers)} | {*CHATML, *MARKERS}
    )
    names += [
        "<tool_response>",
        "</tool_response>",
        "<<SYS>>",
        "<0x0A>",
        "<0x00>",
        "▁",
        "Ġ",
        "{{ bos_token }}",
        "{%",
    ]
    pieces = [*names, " ", "\n", "\t", '"', "\\", "assistant", "system", "\u00a0", "\U000f0000", "\U0010ff00",
              "\ud835", "é", "x", "", "\x1c", "\u3000", *map(str, PROBES)]  # fmt: skip
    out = list(names)
    while len(out) < num:
        pieces_of = [rng.choice(pieces) for _ in range(rng.randint(1, 6))]
        text = "".join(pieces_of)
        if rng.random() < 0.2:  # a name cut by what some cleaners take out
            name = rng.choice(names)
            cut = rng.randrange(len(name) + 1)
            text += name[:cut] + rng.choice(["", "\u200b", name, "\x00"]) + name[cut:]
        if rng.random() < 0.1:
            text = f"<tool_response>{text}</tool_response>"
        out.append(text)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_hostile_strings_make_no_control_token(name):
    """The control tokens of a conversation are those of the same conversation about nothing."""
    renderer = renderer_of(name)
    control = set(renderer.tokenizer.control.values())

    def controls(*contents):
        a, b, c, d, e = contents
        tool = {**CALC, "function": {**CALC["function"], "description": c}}
        first = renderer.first([Message("system", a), Message("user", b)], [tool])
        answers = [Message("tool", d), Message("tool", e)]
        later = renderer.next(answers, closed=False, calls=[ToolCall(a, {b: c}, "abcdefghi")] * 2)
        return [[t for t in ids.tolist() if t in control] for ids in (first, later)]

    neutral = controls(*["x"] * 5)
    strings = hostile_strings(1000)
    for i in range(0, 1000, 5):
        contents = strings[i : i + 5]
        assert controls(*contents) == neutral, contents


@pytest.mark.parametrize("name", NAMES)
def test_hostile_content_is_said_as_it_is(name):
    renderer = renderer_of(name)
    for said in hostile_strings(120):
        if FAMILIES[name].kind == "pieces":
            said = said.replace("▁", "_")  # their own letter for a blank
        text = renderer.tokenizer.decode(renderer.first([Message("user", f"a{said}z")]))
        assert f"a{said}z".encode("utf-16", "surrogatepass").decode("utf-16", "replace") in text


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dress", ["{}", "{}\n", " {}", "{0}{0}", "a{}"])
def test_probe_characters_in_content_are_content(name, dress):
    """Whoever says them: what stands round them, and round any other text, is the same."""
    renderer = renderer_of(name)
    control = set(renderer.tokenizer.control.values())
    frame = lambda ids: [t for t in ids.tolist() if t in control]

    def said(text):
        call = ToolCall("calc", {"x": text}, "abcdefghi")
        talk = [Message("system", text), Message("user", text), Message("assistant", text)]
        yield renderer.first(talk[:2], [CALC])
        yield renderer.first([*talk[1:], Message("user", text)])
        yield renderer.next([Message("user", text)], closed=True)
        yield renderer.next([Message("user", text)], closed=False)
        yield renderer.next([Message("tool", text)] * 2, closed=True, calls=[call, call])
        yield renderer.next([Message("tool", text)], closed=False)
        seen = np.concatenate([renderer.first(talk[1:2]), renderer.said(talk[2])])
        again = renderer.rewritten(talk[1:], [renderer.said(talk[2])], seen)
        yield seen if again is None else again

    plain_frames = [frame(ids) for ids in said(dress.format("Q"))]
    for probe in map(str, PROBES if dress == "{}" else PROBES[:4]):
        found = list(said(dress.format(probe)))
        assert [frame(ids) for ids in found] == plain_frames, probe
        for ids in found:
            assert probe in renderer.tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_words_of_the_assistant_make_no_special_token(name):
    renderer = renderer_of(name)
    special = set(renderer.tokenizer.control.values()) - {
        renderer.tokenizer.control[t] for t in renderer.tokenizer.speakable
    }
    talk = lambda said: [Message("user", "x"), Message("assistant", said), Message("user", "y")]
    count = lambda said: [t for t in renderer.first(talk(said)).tolist() if t in special]
    for said in hostile_strings(150):
        assert count(said) == count("x"), said
        own = renderer.said(Message("assistant", said)).tolist()
        assert [t for t in own if t in special] == [renderer.stop_token_ids[0]] * (
            renderer.stop_token_ids[0] in special
        )


# --- histories -------------------------------------------------------------------------------------------------------


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=8)
TALK = st.lists(
    st.tuples(WORDS, st.one_of(WORDS.map(lambda w: [("user", w)]), st.lists(WORDS, min_size=1, max_size=3).map(
        lambda ws: [("tool", w) for w in ws]))),
    min_size=1, max_size=4,
)  # fmt: skip


def conversation(renderer, first, turns, tools=()):
    """(all messages, sampled turns, the context as an episode makes it)"""
    messages, sampled = list(first), []
    seen = [renderer.first(messages, tools)]
    for said, answers in turns:
        tokens = said if isinstance(said, np.ndarray) else renderer.said(Message("assistant", said))
        new = [Message(role, words) for role, words in answers]
        seen += [tokens, renderer.next(new, closed=renderer.is_closed(tokens))]
        messages += [Message("assistant", renderer.text(tokens)), *new]
        sampled.append(tokens)
    return messages, sampled, np.concatenate(seen)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.sampled_from([n for n in NAMES if FAMILIES[n].keeps and n != "gemma3"]), WORDS, TALK)
def test_turns_put_behind_each_other_are_the_whole_rendering(name, question, turns):
    """The bridge: where a template keeps its history, first() and next() give the tokens of all of it."""
    if name == "llama31":  # it shows an answer where there was a call only; here there was none
        turns = [(said, [("user", w) for _, w in answers][:1]) for said, answers in turns]
    renderer = renderer_of(name)
    messages, sampled, seen = conversation(renderer, [Message("user", question)], turns, [CALC])
    assert renderer.rewritten(messages, sampled, seen, [CALC]) is None


@settings(deadline=None, max_examples=30)
@given(
    WORDS, st.lists(st.tuples(WORDS, WORDS.map(lambda w: [("user", w)])), min_size=1, max_size=3)
)
def test_gemmas_turns_are_the_whole_rendering_too(question, turns):
    renderer = renderer_of("gemma3")
    first = [Message("system", "Be brief."), Message("user", question)]
    messages, sampled, seen = conversation(renderer, first, turns)
    assert renderer.rewritten(messages, sampled, seen) is None


# Llama 3's header ends with two line feeds, which this small tokenizer parts from what follows in another way.
@pytest.mark.parametrize(
    "name", sorted({n for n in NAMES if FAMILIES[n].kind == "bytes"} - {"llama31"})
)
def test_the_whole_rendering_is_everybodys(name):
    """Token for token, of turns whose words tokenize alike on both sides of the template's."""
    renderer = renderer_of(name)
    turns = [("Paris", [("user", "Sure?")]), ("Yes", [("user", "the dog")])]
    messages, _, seen = conversation(renderer, [Message("user", "hello")], turns)
    tail = "<|im_start|>assistant\n" if name == "chatml_no_prompt" else ""
    assert seen.tolist() == tokens_of(name, plain(name, dicts(messages)) + tail)


def test_thoughts_that_a_template_drops_make_another_history():
    renderer = renderer_of("qwen3")
    thought = renderer.said(Message("assistant", "<think>\nIt is 4.\n</think>\n\nFour."))
    turns = [(thought, [("user", "Sure?")]), ("Yes.", [("user", "Why?")])]
    messages, sampled, seen = conversation(renderer, [Message("user", "2+2?")], turns)
    ids = renderer.rewritten(messages, sampled, seen)
    decode = renderer.tokenizer.decode
    assert decode(ids) == plain("qwen3", dicts(messages))
    assert "It is 4." in decode(seen) and "It is 4." not in decode(ids)
    words = renderer.said(Message("assistant", "Four."))[:-1].tolist()
    assert (
        words == thought.tolist()[-1 - len(words) : -1]
    )  # what is left of a turn keeps its tokens
    assert any(ids.tolist()[i : i + len(words)] == words for i in range(len(ids)))


def test_thoughts_stay_while_tools_answer():
    renderer = renderer_of("qwen3")
    thought = renderer.said(Message("assistant", "<think>\nx\n</think>\n\n<tool_call>"))
    messages, sampled, seen = conversation(
        renderer, [Message("user", "2+2?")], [(thought, [("tool", "4"), ("tool", "5")])]
    )
    assert renderer.rewritten(messages, sampled, seen) is None


def test_tokens_that_no_text_gives_back_keep_their_place():
    """A turn whose text would be tokenized in another way, with bytes that are no UTF-8 in it."""
    renderer = renderer_of("qwen25")
    tokenizer = renderer.tokenizer
    odd = [i for letter in "hello" for i in tokenizer.encode(letter)]
    odd += [tokenizer.encode("é")[0], tokenizer.control["<tool_call>"], renderer.stop_token_ids[0]]
    assert tokenizer.encode("hello") != odd[:5]
    first, turns = [Message("user", "hi")], [(np.array(odd, np.int32), [("user", "and?")])]
    messages, sampled, seen = conversation(renderer, first, turns)
    assert renderer.rewritten(messages, sampled, seen) is None
    _, _, cut = conversation(renderer, first, [(np.array(odd[:-1], np.int32), [("user", "and?")])])
    assert np.array_equal(seen, cut)  # the end that the policy did not say is added


def test_a_system_message_that_moves_is_another_history():
    renderer = renderer_of("mistral")
    first = [Message("system", "Be brief."), Message("user", "hi")]
    messages, sampled, seen = conversation(renderer, first, [("yes", [("user", "and?")])])
    ids = renderer.rewritten(messages, sampled, seen)
    text = renderer.tokenizer.decode(ids)
    assert text == "<s>[INST]hi[/INST]yes</s>[INST]Be brief.\n\nand?[/INST]"


WITH_IDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}"
    "{% if m.tool_call_id is defined %} {{ m.name }} {{ m.tool_call_id }}{% endif %}"
    "{% for c in m.tool_calls or [] %} asks {{ c.function.name }} {{ c.id }}{% endfor %}"
    "{{ '\n' + m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def calling(*ids):
    return Message(
        "assistant", "", tuple(ToolCall("calc", {"expression": "1"}, one) for one in ids)
    )


def test_answers_of_tools_name_the_calls_of_their_turn_in_every_rendering(tmp_path):
    """The ids that a policy gave, in the suffix and in the whole; ids of ours start again in each turn."""
    renderer = of_text(tmp_path, WITH_IDS, parser="mistral")
    messages, sampled, turns = [Message("user", "2+2?")], [], (("abcdefghi", ""), ("",), ("zyx",))
    seen = [renderer.first(messages, [CALC])]
    for ids in turns:
        tokens = renderer.said(calling(*ids))
        calls = renderer.parse(tokens, [CALC]).tool_calls
        assert [one.id for one in calls] == [*ids]
        new = [Message("tool", str(i)) for i in range(len(ids))]
        seen += [tokens, renderer.next(new, closed=True, calls=calls)]
        messages += [Message("assistant", renderer.text(tokens)), *new]
        sampled.append(tokens)
        assert renderer.rewritten(messages, sampled, np.concatenate(seen), [CALC]) is None
    said = renderer.tokenizer.decode(np.concatenate(seen))
    told = ["abcdefghi", "000000001", "000000000", "zyx"]
    assert [line.split()[-1] for line in said.splitlines() if "tool calc" in line] == told


def test_answers_in_the_messages_of_a_task_name_the_calls_before_them(tmp_path):
    renderer = of_text(tmp_path, WITH_IDS)
    shown = []
    for ids in (("abc", ""), ("",)):
        shown.append(calling(*ids))
        shown += [Message("tool", "4") for _ in ids]
    talk = [Message("user", "2+2?"), *shown, Message("user", "3+3?")]
    lines = renderer.tokenizer.decode(renderer.first(talk)).splitlines()
    asked = [line.split(" asks")[1:] for line in lines if "asks" in line]
    assert asked == [[" calc abc", " calc 000000001"], [" calc 000000000"]]
    answers = [line.removeprefix("<|im_start|>tool ") for line in lines if "tool calc" in line]
    assert answers == ["calc abc", "calc 000000001", "calc 000000000"]


def test_ids_that_a_template_refuses_in_the_whole_are_ours_there_too():
    renderer = renderer_of("mistral")
    talk = [
        Message("user", "a"),
        calling("no"),
        Message("tool", "5"),
    ]
    text = renderer.tokenizer.decode(renderer.first(talk))
    assert '"id": "000000000"' in text and '"call_id": "000000000"' in text
    named = [talk[0], calling("abcdefghi"), talk[2]]
    text = renderer.tokenizer.decode(renderer.first(named))
    assert '"id": "abcdefghi"' in text and '"call_id": "abcdefghi"' in text


# --- templates themselves --------------------------------------------------------------------------------------------


def of_text(tmp_path, text, parser="auto", **changes):
    directory = write(tmp_path, "smollm2", **changes)
    (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
    return make_renderer(load_tokenizer(str(directory), resolve), parser, resolve)


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def test_the_hash_says_all_that_decides_the_tokens(tmp_path):
    base = of_text(tmp_path / "a", CHAT).template_sha256
    assert of_text(tmp_path / "b", CHAT).template_sha256 == base
    eos = {"tokenizer_config.json": {"eos_token": "<|endoftext|>"}}
    others = [
        of_text(tmp_path / "c", CHAT + " ").template_sha256,
        of_text(tmp_path / "d", CHAT, parser="mistral").template_sha256,
        of_text(tmp_path / "e", CHAT, **eos).template_sha256,
    ]
    assert len({base, *others}) == 4


@pytest.mark.parametrize(
    "text, why",
    [
        ("{{ ''.__class__.__mro__ }}" + CHAT, "refuses the messages: access to attribute '__class__'"),
        ("{% set x = messages.append(1) %}" + CHAT, "refuses the messages: "),
        ("{% for i in range(10**9) %}{% endfor %}" + CHAT, "refuses the messages: Range too big"),
        ("{{ raise_exception('never') }}" + CHAT, "refuses the messages: never"),
        ("{{ messages[0].content + 1 }}", "refuses the messages: "),
        (CHAT.replace("m.content", "m.content | upper"), "changes what is said"),
        (CHAT.replace("m.content", "m.content.replace('What', 'Why')"), "changes what is said"),
        (CHAT.replace("m.content", "m.content[::-1]"), "leaves out what"),
        ("{{ messages[0].role }}", "does not say what a user and an assistant say"),
        (CHAT + "\U000f0000", "private planes"),
        ("x" * 1_000_001, "more than 1000000"),
    ],
)  # fmt: skip
def test_templates_that_cannot_be_used_are_one_line(tmp_path, text, why):
    with pytest.raises(ValueError) as caught:
        of_text(tmp_path, text)
    assert why in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("theirs", sorted({*NAMES} - {"mistral", "llama2"}))
@pytest.mark.parametrize("ours", NAMES)
def test_template_of_another_model_is_refused(tmp_path, ours, theirs):
    """Unless the tokenizer has what ends its turns. (Mistral's and Llama 2's end with any tokenizer's eos_token.)"""
    directory = write(tmp_path, ours)
    (directory / "chat_template.jinja").write_text((TEMPLATES / f"{theirs}.jinja").read_text())
    tokenizer, end = load_tokenizer(str(directory), resolve), FAMILIES[theirs].end
    if end in tokenizer.control:
        make_renderer(tokenizer, "auto", resolve)
        return
    with pytest.raises(ValueError) as caught:
        make_renderer(tokenizer, "auto", resolve)
    assert end in str(caught.value) and "\n" not in str(caught.value)
    assert "has as no token: they are of different models; copy both from one" in str(caught.value)


def test_headers_that_are_text_are_taken(tmp_path):
    text = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}<|assistant|>\n"
    renderer = of_text(tmp_path, text)
    said = renderer.tokenizer.decode(renderer.first([Message("user", "hi")]))
    assert said == "<|user|>\nhi<|im_end|>\n<|assistant|>"
    with pytest.raises(ValueError, match=r"writes <\|user\|>, <\|end\|>, <\|assistant\|>, which"):
        of_text(tmp_path, text.replace("{{ eos_token }}", "<|end|>"))


def test_content_does_not_steer_a_template(tmp_path):
    text = (
        "{% if '/brief' in messages[-1].content %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
        + CHAT
    )
    renderer = of_text(tmp_path, text)
    decode = renderer.tokenizer.decode
    assert not decode(renderer.first([Message("user", "hi")])).startswith("<|im_start|>system")
    assert not decode(renderer.first([Message("user", "hi /brief")])).startswith(
        "<|im_start|>system"
    )


def test_what_a_template_cannot_say_is_refused_in_one_line(tmp_path):
    renderer = of_text(
        tmp_path,
        "{% if messages | length > 3 %}{{ raise_exception('three\nat most') }}{% endif %}" + CHAT,
    )
    with pytest.raises(
        ValueError, match=r"the chat template of .* refuses the messages: three at most"
    ):
        renderer.first([Message("user", "a"), Message("assistant", "b")] * 2)
    with pytest.raises(ValueError, match="needs a first message"):
        renderer.first([])


def test_the_day_is_always_the_same():
    text = renderer_of("llama31").tokenizer.decode(
        renderer_of("llama31").first([Message("user", "x")])
    )
    assert "Today Date: 26 Jul 2024" in text


def test_the_parser_of_a_family_may_be_replaced():
    assert (
        renderer_of("smollm2", "mistral").template_sha256 != renderer_of("smollm2").template_sha256
    )
    said = renderer_of("smollm2", "mistral").said(Message("assistant", "", (ToolCall("f", {}),)))
    assert renderer_of("smollm2", "mistral").text(said).startswith("[TOOL_CALLS]")
