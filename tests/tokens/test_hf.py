"""A directory's tokenizer: the library's ids, bytes kept, and no control token from text."""

import json
import os
import random
import time

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from rl_jax.launch import resolve
from rl_jax.tokens.hf import HfTokenizer
from rl_jax.tokens.load import load_tokenizer, make_renderer
from tests.tokens.families import FAMILIES, directory_of, write

TEXT = "Digits 0123456789\tand\ttabs,  naïve café — 你好\n\n😀👩‍👩‍👧 e\u0301 {x: 'y'}\r\n\x00 \u202e end"
NAMES = sorted(FAMILIES)


def library(name: str) -> Library:
    return Library.from_file(str(directory_of(name) / "tokenizer.json"))


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_the_librarys_and_bytes_come_back(name):
    tokenizer = HfTokenizer(directory_of(name))
    ids = tokenizer.encode(TEXT)
    assert ids == library(name).encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.vocab_size == library(name).get_vocab_size()
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    assert tokenizer.encode("a\ud835") == tokenizer.encode("a\ufffd")


@pytest.mark.parametrize("name", NAMES)
def test_names_of_control_tokens_stay_text(name):
    tokenizer, family = HfTokenizer(directory_of(name)), FAMILIES[name]
    names = {t for t in (*family.special, *family.markers) if t.strip()}
    assert set(tokenizer.control) == names
    for text in names:
        for said in (text, f"a{text}b", f" {text} ", text * 3):
            ids = tokenizer.encode(said)
            assert not set(ids) & set(tokenizer.control.values()), text
            assert tokenizer.decode(ids) == said
        assert library(name).encode(text, add_special_tokens=False).ids == [tokenizer.control[text]]


def test_other_added_tokens_are_text():
    tokenizer = HfTokenizer(directory_of("gemma3"))
    (token,) = tokenizer.encode("\n\n")
    assert token == library("gemma3").token_to_id("\n\n") and "\n\n" not in tokenizer.control


def test_broken_bytes_and_control_tokens_are_shown():
    tokenizer = HfTokenizer(directory_of("qwen25"))
    euro = tokenizer.encode("€")
    end = tokenizer.control["<|im_end|>"]
    assert tokenizer.decode([*euro[:-1], end]) == "\ufffd<|im_end|>"
    assert tokenizer.decode(np.array([*euro, end], np.int32)) == "€<|im_end|>"
    assert tokenizer.decode([*euro, 403, end, 99_999]) == "€\ufffd<|im_end|>\ufffd"
    with pytest.raises(ValueError, match="token -1 is outside the vocabulary of "):
        tokenizer.decode([-1])


def test_every_token_that_ends_a_turn_is_a_stop():
    stops = {name: HfTokenizer(directory_of(name)).stop_token_ids for name in NAMES}
    for name, family in FAMILIES.items():
        ids = [library(name).token_to_id(t) for t in (family.eos or family.end, *family.more_stops)]
        assert stops[name] == tuple(ids)


def test_a_policy_may_say_markers_and_no_special_token():
    tokenizer = HfTokenizer(directory_of("qwen25"))
    ids = tokenizer.encode_said("<think>x</think><|im_end|>")
    controls = [i for i in ids if i in tokenizer.control.values()]
    assert controls == [tokenizer.control["<think>"], tokenizer.control["</think>"]]
    mistral = HfTokenizer(directory_of("mistral"))
    ids = mistral.encode_said("[TOOL_CALLS] x [TOOL_CALLS]", ["[TOOL_CALLS]"], 3)
    assert [i for i in ids if i in mistral.control.values()] == [mistral.control["[TOOL_CALLS]"]]
    assert mistral.decode(ids) == "[TOOL_CALLS] x [TOOL_CALLS]"


def test_a_vocabulary_that_spells_a_control_token_is_cut_apart(tmp_path):
    """Pieces that merge to the name of a control token: the same id would come out of plain text."""
    directory = write(tmp_path / "x", "smollm2")
    spec = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = spec["model"]["vocab"]
    merges = [["<", "|"], ["<|", "i"], ["<|i", "m"], ["<|im", "_"], ["<|im_", "e"], ["<|im_e", "n"],
              ["<|im_en", "d"], ["<|im_end", "|"], ["<|im_end|", ">"]]  # fmt: skip
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    spec["model"]["merges"] = merges + spec["model"]["merges"]
    spec["added_tokens"] = [
        {**token, "id": vocabulary.get(token["content"], token["id"] + len(merges))}
        for token in spec["added_tokens"]
    ]
    spec["pre_tokenizer"] = {**spec["pre_tokenizer"]["pretokenizers"][1], "use_regex": False}
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    (directory / "generation_config.json").unlink()
    bare = Library.from_str(json.dumps({**spec, "added_tokens": []}))
    assert bare.encode("a<|im_end|>b").ids.count(vocabulary["<|im_end|>"]) == 1
    tokenizer = HfTokenizer(directory)
    assert tokenizer.control["<|im_end|>"] == vocabulary["<|im_end|>"]
    ids = tokenizer.encode("a<|im_end|>b")
    assert not set(ids) & set(tokenizer.control.values())
    assert tokenizer.decode(ids) == "a<|im_end|>b"


def test_a_blank_before_the_first_piece_only_is_none_in_a_conversation(tmp_path):
    directory = write(tmp_path / "x", "llama2")
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["normalizer"] = None
    spec["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = HfTokenizer(directory)
    for text in ("x", " x", "  x y", TEXT):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# --- files that cannot be used ---------------------------------------------------------------------------------------


def problem(directory) -> str:
    with pytest.raises(ValueError) as caught:
        make_renderer(load_tokenizer(str(directory), resolve), "auto", resolve)
    line = str(caught.value)
    assert "\n" not in line and str(directory) in line
    return line


def test_files_of_different_models_are_one_line(tmp_path):
    name, file = "qwen25", "tokenizer_config.json"
    changes = [
        ({file: {"eos_token": "<|eot_id|>"}}, "eos_token='<|eot_id|>', which tokenizer.json beside it does not know"),
        ({file: {"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}},
            "has '<|im_end|>' as token 7, tokenizer.json beside it as 398"),
        ({"generation_config.json": {"eos_token_id": [398, 999]}}, "eos_token_id=999, outside the vocabulary 0..402"),
        ({"config.json": {"eos_token_id": True}}, "eos_token_id=True, outside the vocabulary"),
        ({"config.json": {"eos_token_id": "x"}}, "eos_token_id=x, outside the vocabulary"),
        ({file: {}, "generation_config.json": {}}, "names no token that ends a turn; set eos_token"),
        ({file: []}, "is no JSON object"),
    ]  # fmt: skip
    for i, (change, line) in enumerate(changes):
        assert line in problem(write(tmp_path / str(i), name, **change))


def test_missing_and_broken_files_are_one_line(tmp_path):
    directory = write(tmp_path / "a", "smollm2")
    os.remove(directory / "chat_template.jinja")
    assert "has no chat template (no chat_template.jinja" in problem(directory)
    (directory / "chat_template.jinja").write_text("{% for x in %}")
    assert "is no chat template (TemplateSyntaxError" in problem(directory)
    (directory / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json is no JSON" in problem(directory)
    raw = (directory / "tokenizer.json").read_text()
    for text in (raw[: len(raw) // 2], "[]", '{"model": 3}', '{"added_tokens": [{}]}'):
        (directory / "tokenizer.json").write_text(text)
        assert "tokenizer.json is no tokenizer (" in problem(directory)
    os.remove(directory / "tokenizer.json")
    assert "has no tokenizer.json" in problem(directory)


@pytest.mark.parametrize(
    "place", ["chat_template.json", "tokenizer_config.json", "tokenizer_config.json, several"]
)
def test_a_template_may_stand_in_other_files(tmp_path, place):
    directory = write(tmp_path / "a", "smollm2")
    text = (directory / "chat_template.jinja").read_text()
    os.remove(directory / "chat_template.jinja")
    file = place.partition(",")[0]
    known = {"eos_token": "<|im_end|>"} if file == "tokenizer_config.json" else {}
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": text}]
    value = several if "several" in place else text
    (directory / file).write_text(json.dumps({**known, "chat_template": value}))
    moved = make_renderer(load_tokenizer(str(directory), resolve), "auto", resolve)
    kept = make_renderer(load_tokenizer(str(directory_of("smollm2")), resolve), "auto", resolve)
    assert moved.template_sha256 == kept.template_sha256


def test_random_text_comes_back():
    rng = random.Random(0)
    for name in NAMES:
        tokenizer = HfTokenizer(directory_of(name))
        for _ in range(100):
            size = rng.randint(0, 12)
            text = "".join(
                chr(rng.choice([rng.randrange(128), rng.randrange(0xD800)])) for _ in range(size)
            )
            assert tokenizer.decode(tokenizer.encode(text)) == text, (name, text)


def test_thousands_of_control_tokens_are_found_at_once(tmp_path):
    directory = write(tmp_path / "x", "qwen25")
    spec = json.loads((directory / "tokenizer.json").read_text())
    like = spec["added_tokens"][-1]
    spec["added_tokens"] += [
        {**like, "content": f"<unused{i}>", "id": 403 + i, "special": i % 2 == 0}
        for i in range(6000)
    ]
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = HfTokenizer(directory)
    text = "a<unused12><unused123>" + "<unused" * 5000 + "<think>"
    start = time.perf_counter()
    pieces = tokenizer.control_pieces(text)
    seconds = time.perf_counter() - start
    assert pieces == ["a", 415, 526, "<unused" * 5000, tokenizer.control["<think>"]]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_said("<unused1>") == [404]  # not called special; its neighbour is
    assert len(tokenizer.encode_said("<unused2>")) > 1
    assert seconds < 1.0, "about 0.01 s; 6,000 alternatives tried one by one take 1"
