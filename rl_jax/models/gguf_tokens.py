"""The tokenizer of a GGUF file, as the files of a Hugging Face directory: rebuilt from its metadata.

Owns: PRE, what the names of pre-tokenizers mean. Two kinds of model: "gpt2", byte-level BPE with its own merges, which
cuts text first as `tokenizer.ggml.pre` says; and "llama", sentencepiece BPE, whose merges follow from the scores of the
pieces. Invariants: every token keeps its id; control tokens become special added tokens and no merge makes one, so
text becomes a control token only where it is spelled as one; a pre-tokenizer that is not in PRE is refused, since
another cut would give other ids without a sign of it.
Must not: read tensors, or render a template.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from rl_jax.models.hf_files import WeightsError, write_json

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPACE = "\u2581"  # of sentencepiece

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True)
class Pre:
    """How text is cut before merges apply, and what goes with it."""

    cuts: tuple[str, ...] = ()  # patterns; () = GPT-2's own, and `digits`
    digits: bool = False  # each digit by itself first
    ignore_merges: bool = False  # a piece that is a token as a whole is that token
    nfc: bool = False
    add_bos: bool = False  # where the file does not say

    def build(self) -> pre_tokenizers.PreTokenizer:
        own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.cuts)
        first: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in self.cuts]
        if self.digits:
            first = [pre_tokenizers.Digits(individual_digits=True)]
        return pre_tokenizers.Sequence([*first, own])


# tokenizer.ggml.pre -> Pre. "default" is what llama.cpp does where it knows no better.
PRE = {
    "default": Pre(_DEFAULT),
    "gpt-2": Pre(),
    "gpt2": Pre(),
    "smollm": Pre(digits=True),
    "llama-bpe": Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama-v3": Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "qwen2": Pre((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": Pre((_QWEN2,)),
    "tekken": Pre((_TEKKEN,), ignore_merges=True, add_bos=True),
}


def write_tokenizer(directory: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """tokenizer.json, tokenizer_config.json and generation_config.json. metadata: by keys without "tokenizer.".

    Raises: WeightsError, one line, for what is unknown or missing.
    """
    tokenizer = build_tokenizer(metadata)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", _config(metadata))
    write_json(directory / "generation_config.json", _generation(metadata))
    return tokenizer


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises: WeightsError."""
    kind = metadata.get("ggml.model")
    if kind not in KINDS:
        raise _error(f"ggml.model={kind}", f"it is not one of {', '.join(KINDS)}")
    tokens = _tokens(metadata)
    types = list(metadata.get("ggml.token_type") or [NORMAL] * len(tokens))
    tokenizer = KINDS[kind](metadata, tokens, types)
    for token, of_type in zip(tokens, types, strict=False):
        if of_type in (CONTROL, UNKNOWN, USER):
            added = AddedToken(token, normalized=False, special=of_type != USER)
            (tokenizer.add_tokens if of_type == USER else tokenizer.add_special_tokens)([added])
    first, last = _ends(metadata)
    if first or last:
        ids = {t: tokenizer.token_to_id(t) for t in (*first, *last)}
        tokenizer.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{t}:1" for t in first), "$B:1", *(f"{t}:1" for t in last)],
            special_tokens=list(ids.items()),
        )  # fmt: skip
    return tokenizer


def _bytelevel(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    pre = _pre(metadata)
    merges = metadata.get("ggml.merges")
    if not merges:
        raise _error("ggml.merges", "it is missing; take a newer conversion of the model")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    odd = [pair for pair in pairs if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys()]
    if odd:
        raise _error("ggml.merges", f"{len(odd)} of {len(pairs)} are not of two tokens, first {odd[0]}")  # fmt: skip
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    scores = metadata.get("ggml.scores")
    if not scores or len(scores) < len(tokens):
        raise _error("ggml.scores", "they are missing; take a newer conversion of the model")
    unknown = metadata.get("ggml.unknown_token_id", 0)
    has_bytes = BYTE in types
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        _merges(tokens, types, scores),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    tokenizer = Tokenizer(model)
    is_prefixed = metadata.get("ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    prefix = [normalizers.Prepend(SPACE)] if is_prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if is_prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


KINDS: dict[str, Callable[..., Tokenizer]] = {"gpt2": _bytelevel, "llama": _sentencepiece}


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs in the order in which sentencepiece would join them: by the score of what they make, the best first."""
    plain = {t: i for i, t in enumerate(tokens) if types[i] == NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in plain.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in plain and right in plain:
                found.append((-scores[i], plain[left], plain[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    """The vocabulary, without the rows that only pad the embedding."""
    tokens = list(metadata.get("ggml.tokens") or ())
    if not tokens:
        raise _error("ggml.tokens", "there are none; take another conversion of the model")
    types = metadata.get("ggml.token_type") or [NORMAL] * len(tokens)
    while tokens[-1].startswith("[PAD") and types[len(tokens) - 1] == UNUSED:
        tokens.pop()
    if len(set(tokens)) != len(tokens):
        raise _error("ggml.tokens", "two tokens are equal; take another conversion of the model")
    return tokens


def _pre(metadata: Mapping[str, Any]) -> Pre:
    name = metadata.get("ggml.pre")
    if name not in PRE:
        why = "is missing" if name is None else f"{name} is not known"
        raise _error(
            "ggml.pre",
            f"the pre-tokenizer {why}; known are {', '.join(PRE)}; take the model's Hugging Face directory instead",
        )
    return PRE[name]


def _ends(metadata: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What goes before and behind a text."""
    is_bpe = metadata.get("ggml.model") == "gpt2"
    add_bos = metadata.get("ggml.add_bos_token", _pre(metadata).add_bos if is_bpe else True)
    add_eos = metadata.get("ggml.add_eos_token", False)
    bos, eos = _special(metadata, "bos"), _special(metadata, "eos")
    return [bos] if add_bos and bos else [], [eos] if add_eos and eos else []


def _special(metadata: Mapping[str, Any], name: str) -> str | None:
    number = metadata.get(f"ggml.{name}_token_id")
    tokens = metadata["ggml.tokens"]
    return tokens[number] if number is not None and number < len(tokens) else None


def _config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    first, last = _ends(metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(first),
        "add_eos_token": bool(last),
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for key, name in names.items():
        if (token := _special(metadata, name)) is not None:
            config[f"{key}_token"] = token
    named = {
        key.removeprefix("chat_template."): text
        for key, text in metadata.items()
        if key.startswith("chat_template.")
    }
    default = metadata.get("chat_template")
    if named:
        every = ({"default": default} if default is not None else {}) | named
        config["chat_template"] = [{"name": n, "template": t} for n, t in every.items()]
    elif default is not None:
        config["chat_template"] = default
    return config


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Which ids begin, end and pad; several end a turn where the file has them."""
    ids = {name: metadata.get(f"ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}  # fmt: skip
    ends = list(dict.fromkeys(ids[n] for n in ("eos", "eom", "eot") if ids[n] is not None))
    config = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }
    return {key: value for key, value in config.items() if value is not None}


def _error(key: str, text: str) -> WeightsError:
    return WeightsError(f"tokenizer.{key}: {text}")
