"""A small trained tokenizer for each family of chat templates in tests/data/templates, as a directory on disk."""

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from rl_jax.launch import resolve
from rl_jax.tokens.load import load_tokenizer, make_renderer

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "templates"
CORPUS = (
    "the quick brown fox says hello to the lazy dog and the calculator answers 12 and 34 and 567\n\n",
    '{"name": "calculator", "arguments": {"expression": "1 + 2 * 3"}} user assistant system tool\n',
    "What is the capital of France? The capital of France is Paris. Answer: 42. été, naïve, 你好, 😀\t\n",
) * 8  # fmt: skip
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@dataclass(frozen=True)
class Family:
    special: tuple[str, ...]
    end: str
    markers: tuple[str, ...] = ()  # added tokens that the file does not call special
    bos: str = ""
    eos: str = ""  # "" = end
    more_stops: tuple[str, ...] = ()
    kind: str = "bytes"  # bytes | pieces
    parser: str = "hermes"
    tools: bool = False  # the template says tools, calls and answers itself
    keeps: bool = True  # it shows every history as it was


LLAMA3 = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>",
)  # fmt: skip
MISTRAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
FAMILIES = {
    "smollm2": Family(CHATML, "<|im_end|>"),
    "chatml_no_prompt": Family(CHATML, "<|im_end|>"),
    "qwen25": Family(CHATML, "<|im_end|>", MARKERS, more_stops=("<|endoftext|>",), tools=True),
    "qwen3": Family(CHATML, "<|im_end|>", MARKERS, tools=True, keeps=False),
    "llama31": Family(LLAMA3, "<|eot_id|>", bos="<|begin_of_text|>", eos="<|eot_id|>",
        more_stops=("<|end_of_text|>", "<|eom_id|>"), parser="llama3_json", tools=True),
    "mistral": Family(MISTRAL, "</s>", bos="<s>", parser="mistral", tools=True, keeps=False),
    "gemma3": Family(("<pad>", "<eos>", "<bos>"), "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>", "\n\n"),
        bos="<bos>", eos="<eos>", more_stops=("<end_of_turn>",), kind="pieces", parser="gemma"),
    "llama2": Family(("<unk>", "<s>", "</s>"), "</s>", bos="<s>", kind="pieces", parser="mistral", keeps=False),
}  # fmt: skip


def trained(family: Family) -> Tokenizer:
    """Byte-level BPE, or BPE over pieces with U+2581 for a blank and bytes for what has none."""
    added = [AddedToken(t, special=True, normalized=False) for t in family.special]
    added += [AddedToken(t, special=False, normalized=False) for t in family.markers]
    if family.kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )  # fmt: skip
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence(
            [*([normalizers.Prepend("▁")] if "<s>" in family.special else []), normalizers.Replace(" ", "▁")]
        )  # fmt: skip
        ends = [decoders.Strip(" ", 1, 0)] if "<s>" in family.special else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
        )
        names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=names, show_progress=False)
        tokenizer.train_from_iterator(CORPUS, trainer)
        spec = json.loads(tokenizer.to_str())
        spec["added_tokens"] = []
        tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_tokens(added)
    return tokenizer


def write(directory: Path, name: str, **changes) -> Path:
    """A directory as a family's models have it. changes: of the files' contents, by file."""
    family, tokenizer = FAMILIES[name], trained(FAMILIES[name])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": family.eos or family.end}
    if family.bos:
        config["bos_token"] = {"content": family.bos, "lstrip": False}
    if "<unk>" in family.special:
        config["unk_token"] = "<unk>"
    stops = [tokenizer.token_to_id(t) for t in (family.eos or family.end, *family.more_stops)]
    files = {
        "tokenizer_config.json": config,
        "generation_config.json": {"eos_token_id": stops if len(stops) > 1 else stops[0]},
    }
    for file, value in {**files, **changes}.items():
        (directory / file).write_text(json.dumps(value))
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="templates-")  # removed when the tests' process ends


@functools.cache
def directory_of(name: str) -> Path:
    return write(Path(_root().name) / name, name)


@functools.cache
def renderer_of(name: str, parser: str = "auto"):
    return make_renderer(load_tokenizer(str(directory_of(name)), resolve), parser, resolve)
