"""A directory with a tokenizer.json as a Tokenizer: Hugging Face's `tokenizers`, its added tokens told apart.

Files: tokenizer.json (all of the conversion); tokenizer_config.json, generation_config.json and config.json, each where
it is there, for the ids that end a turn. They must agree: a special token that tokenizer.json lacks, or has under
another id, means that the files are of two models.

Control tokens are all added tokens that are special, or whose text looks like markup ("<tool_call>", "<|im_start|>",
"[INST]"), whether the file calls them special or not. encode() gives none of them: their texts are encoded like any
other. They come from control_pieces(), for text that is scaffold, or were sampled. Other added tokens (runs of white
space) are text.

A tokenizer that puts a blank before the first piece of a text only (Metaspace "first") puts none here: what is encoded
stands in a conversation, never at its start.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library

from rl_jax.tokens.tokenizer import encodable

FILE = "tokenizer.json"
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
MARKUP = re.compile(r"[<\[]\S.*[>\]]", re.S)  # of an added token that is not called special


class HfTokenizer:
    """Implements Tokenizer. Immutable, for any thread."""

    def __init__(self, directory: str | Path):
        """Raises ValueError, one line: a file that is missing, broken, or of another model than the others."""
        self.directory = Path(directory)
        path = self.directory / FILE
        if not path.is_file():
            raise ValueError(f"{self.directory} has no {FILE}; give the directory of a tokenizer")
        raw = path.read_bytes()
        self._sha256 = hashlib.sha256(raw).hexdigest()
        spec = _parse(path, raw)
        self._library = _load(path, spec)
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.config = _read(self.directory / "tokenizer_config.json")
        self.special_tokens = self._named()  # bos_token and so on -> its text, for templates
        self._check_added()
        # text -> id of every control token
        self.control: Mapping[str, int] = {
            **{t["content"]: t["id"] for t in (spec.get("added_tokens") or ()) if _is_control(t)},
            **{text: vocabulary[text] for text in self.special_tokens.values()},
        }
        self._strips = {
            t["content"]: (bool(t.get("lstrip")), bool(t.get("rstrip")))
            for t in (spec.get("added_tokens") or ())
        }
        unknown = self.special_tokens.get("unk_token")  # what text without a token becomes
        self._forbidden = frozenset(i for t, i in self.control.items() if t != unknown)
        self.stop_token_ids = self._stops()
        self.speakable = frozenset(
            t["content"] for t in (spec.get("added_tokens") or ()) if not t.get("special")
        ) & frozenset(self.control)
        self._pattern = _alternatives(self.control)

    def encode(self, text: str) -> list[int]:
        """See Tokenizer. Raises ValueError for a text that cannot be said without a control token."""
        text = encodable(text)
        if not text:
            return []
        ids = self._library.encode(text, add_special_tokens=False).ids
        return ids if self._forbidden.isdisjoint(ids) else self._encode_apart(text)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """See Tokenizer. An id above the vocabulary, which a padded model may sample, is U+FFFD; a negative one raises
        ValueError."""
        ids = np.asarray(tokens, np.int64)
        if len(ids) and ids.min() < 0:
            raise ValueError(f"token {ids.min()} is outside the vocabulary of {self.directory}")
        text = lambda part: self._library.decode(part.tolist(), skip_special_tokens=False)
        above = np.flatnonzero(ids >= self.vocab_size)
        if not len(above):
            return text(ids)
        parts = np.split(ids, above)  # all but the first begin with such an id
        return "\ufffd".join([text(parts[0]), *(text(part[1:]) for part in parts[1:])])

    def encode_said(self, text: str, markers: Sequence[str] = (), start: int = 0) -> list[int]:
        """Tokens of what a policy says: control tokens that are not special are meant where their names stand, and so,
        from character `start` on, are the markers."""
        allowed = {
            text: self.control[text] for text in (*self.speakable, *markers) if text in self.control
        }
        out, at = [], 0
        for match in _alternatives(allowed).finditer(text):
            if match.start() >= start or match[0] in self.speakable:
                out += [*self.encode(text[at : match.start()]), allowed[match[0]]]
                at = match.end()
        return [*out, *self.encode(text[at:])]

    def control_pieces(self, text: str) -> list[str | int]:
        """Scaffold text cut at its control tokens: their ids, and the texts between them, in order.

        White space that a control token takes to itself (lstrip, rstrip) is left out, as `tokenizers` does.
        """
        out: list[str | int] = []
        at, strip_next = 0, False
        for match in self._pattern.finditer(text):
            left, right = self._strips.get(match[0], (False, False))
            gap = text[at : match.start()]
            gap = gap.lstrip(" \t\n\r") if strip_next else gap
            gap = gap.rstrip(" \t\n\r") if left else gap
            out += [gap] if gap else []
            out.append(self.control[match[0]])
            at, strip_next = match.end(), right
        gap = text[at:].lstrip(" \t\n\r") if strip_next else text[at:]
        return [*out, gap] if gap else out

    def fingerprint(self) -> str:
        """See Tokenizer."""
        return f"{self._sha256} {sorted(self.control.items())} {self.stop_token_ids}"

    # --- what the files say ---------------------------------------------------------------------------------------

    def _named(self) -> dict[str, str]:
        """name -> text of the special tokens of tokenizer_config.json."""
        found = {}
        for name in NAMED:
            value = self.config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if not isinstance(text, str):
                continue
            if self._library.token_to_id(text) is None:
                raise ValueError(
                    f"{self.directory}/tokenizer_config.json has {name}={text!r}, which {FILE} beside it does not"
                    " know: they are of different models; copy both from one"
                )
            found[name] = text
        return found

    def _check_added(self) -> None:
        added = self.config.get("added_tokens_decoder")
        for number, entry in added.items() if isinstance(added, dict) else ():
            text = entry.get("content") if isinstance(entry, dict) else entry
            there = self._library.token_to_id(str(text))
            if str(there) != number:
                raise ValueError(
                    f"{self.directory}/tokenizer_config.json has {text!r} as token {number}, {FILE} beside it as"
                    f" {there}: they are of different models; copy both from one"
                )

    def _stops(self) -> tuple[int, ...]:
        """Every id that ends a turn, tokenizer_config's first."""
        found: list[int] = []
        if "eos_token" in self.special_tokens:
            found.append(self.control[self.special_tokens["eos_token"]])
        for name in ("generation_config.json", "config.json"):
            value = _read(self.directory / name).get("eos_token_id")
            for token in value if isinstance(value, list) else [value]:
                if token is None:
                    continue
                if type(token) is not int or not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"{self.directory}/{name} has eos_token_id={token}, outside the vocabulary"
                        f" 0..{self.vocab_size - 1} of {FILE}: they are of different models; copy both from one"
                    )
                found.append(token)
        if not found:
            raise ValueError(
                f"{self.directory} names no token that ends a turn; set eos_token in its tokenizer_config.json"
            )
        return tuple(dict.fromkeys(found))

    def _encode_apart(self, text: str) -> list[int]:
        """A text whose own pieces make a control token: cut inside each name, at last between all characters."""
        cuts = [0, *(match.start() + 1 for match in self._pattern.finditer(text)), len(text)]
        for pieces in ([text[a:b] for a, b in zip(cuts, cuts[1:])], list(text)):
            ids = [i for p in pieces for i in self._library.encode(p, add_special_tokens=False).ids]
            if self._forbidden.isdisjoint(ids):
                return ids
        raise ValueError(
            f"{text[:80]!r} cannot be encoded by {self.directory} without a control token"
        )


def _is_control(token: Mapping[str, Any]) -> bool:
    return bool(token.get("special")) or MARKUP.fullmatch(token["content"]) is not None


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        spec = json.loads(raw)
        for token in spec.get("added_tokens") or ():
            token["content"], token["id"]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no tokenizer ({type(error).__name__}: {error})") from None
    return spec


def _load(path: Path, spec: Mapping[str, Any]) -> Library:
    """The library's tokenizer for plain text: see the module."""
    changed = _never_first(dict(spec))
    changed["added_tokens"] = [
        {**token, "special": _is_control(token)} for token in spec.get("added_tokens") or ()
    ]
    changed["truncation"] = changed["padding"] = None
    try:
        library = Library.from_str(json.dumps(changed))
    except Exception as error:  # the boundary to the library, which raises nothing narrower
        raise ValueError(f"{path} is no tokenizer ({error})") from None
    library.encode_special_tokens = True
    return library


def _never_first(spec: dict[str, Any]) -> dict[str, Any]:
    """Without the blank before a text's first piece, and then without its removal; else unchanged."""
    pre = json.dumps(spec.get("pre_tokenizer"))
    if '"prepend_scheme": "first"' not in pre:
        return spec
    spec["pre_tokenizer"] = json.loads(pre.replace('"first"', '"never"'))
    decoder = json.loads(json.dumps(spec.get("decoder")).replace('"first"', '"never"'))
    steps = decoder.get("decoders") if isinstance(decoder, dict) else None
    if steps:
        decoder["decoders"] = [step for step in steps if step.get("type") != "Strip"]
    spec["decoder"] = decoder
    return spec


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Any of the texts, the longest first; of none, what never matches."""
    return re.compile(_shared(sorted(texts)) if texts else r"(?!)")


def _shared(texts: Sequence[str]) -> str:
    """The pattern of sorted texts, beginnings that they share written once: some vocabularies have 6,000 of them."""
    longer = [text for text in texts if text]
    branches = [
        re.escape(first) + _shared([text[1:] for text in rest])
        for first, rest in itertools.groupby(longer, key=lambda text: text[0])
    ]
    if len(branches) == 1 and len(longer) == len(texts):
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' * (len(longer) < len(texts))}" if branches else ""


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no file. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object")
    return value
