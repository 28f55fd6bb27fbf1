"""A private alphabet for content, so that it stays apart from a template's own text through whatever the template does.

Every character of a content becomes a character of the private planes 15 and 16, one for each (content's owner,
character) of one rendering; joined, sliced, trimmed, put into JSON, it keeps both. What a rendering holds outside those
planes is the template's own. White space at a content's ends becomes other white space, which strip() takes away as
well, or stays what it is (then it counts as the template's: white space is no control token).

Invariant: plain(mark(text)) == text. Must not: know templates, tokens or messages.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence

from rl_jax.tokens.tokenizer import encodable

PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FF00))
PRIVATE_CLASS = "\U000f0000-\U0010fffd"


class Probe(str):
    """What a renderer itself puts into a conversation by which it finds out a template; it stays as it is.

    Known by its type: a content may well have the same character, and that becomes another one.
    """


# One character each: no template can take a part of it, none has it, and no content becomes it.
PROBES = tuple(Probe(chr(code)) for code in range(0x10FF00, 0x10FF40))

# White space that strip() takes away and no template writes.
_SPACES = tuple(
    chr(c) for c in range(0x3001) if chr(c).isspace() and chr(c) not in " \t\n\r\x0b\x0c"
)


class Marks:
    """Of one rendering."""

    def __init__(self, template: str = "", mark_ends: bool = True):
        """template: its text, whose white space is left to it.  mark_ends: also the white space at a content's ends."""
        self._codes = (code for codes in PRIVATE for code in codes)
        self._spaces = [s for s in _SPACES if s not in template] if mark_ends else []
        self._plain: dict[int, str] = {}
        self._owners: dict[int, int] = {}
        self._letters: dict[tuple[int, str], str] = {}

    def mark(self, text: str, owner: int = 0, keep: re.Pattern[str] | None = None) -> str:
        """The text in the private alphabet.

        keep: what stays as it is, with the white space round it, for the template to find.
        """
        text = encodable(text)
        if keep is None:
            return self._part(text, owner, self._ends)
        parts = re.split(f"({keep.pattern})", text)
        return "".join(
            part if i % 2 else self._part(part, owner, str) for i, part in enumerate(parts)
        )

    def plain(self, text: str) -> str:
        """With every private character as what it stands for."""
        return text.translate(self._plain)

    def owns(self, text: str, owner: int) -> Sequence[tuple[int, int]]:
        """(start, end) of every run of the owner's characters in a rendering."""
        runs: list[tuple[int, int]] = []
        for i, letter in enumerate(text):
            if self._owners.get(ord(letter)) != owner:
                continue
            if runs and runs[-1][1] == i:
                runs[-1] = (runs[-1][0], i + 1)
            else:
                runs.append((i, i + 1))
        return runs

    def escapes(self, ensure_ascii: bool = False) -> Mapping[int, str]:
        """What becomes of each private character inside a JSON string: str.translate's table."""
        table = {}
        for code, letter in list(self._plain.items()):
            if not ensure_ascii and letter >= " " and letter not in '"\\':
                continue  # which is nearly all of them
            told = json.dumps(letter, ensure_ascii=ensure_ascii)[1:-1]
            if told != letter:
                table[code] = self._body(told, self._owners.get(code, 0))
        return table

    def _part(self, text: str, owner: int, ends: Callable[[str], str]) -> str:
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if start == len(text):
            return ends(text)
        return ends(text[:start]) + self._body(text[start:end], owner) + ends(text[end:])

    def _body(self, text: str, owner: int) -> str:
        for letter in set(text) - {c for o, c in self._letters if o == owner}:
            code = next(self._codes, None)
            if code is None:
                raise ValueError("a conversation has more than 131,000 different characters")
            self._letters[owner, letter] = chr(code)
            self._plain[code], self._owners[code] = letter, owner
        return text.translate({ord(c): m for (o, c), m in self._letters.items() if o == owner})

    def _ends(self, text: str) -> str:
        """White space as other white space, as long as there is some."""
        out = []
        for letter in text:
            known = self._letters.get((-1, letter))
            if known is None and self._spaces:
                known = self._letters[-1, letter] = self._spaces.pop()
                self._plain[ord(known)] = letter
            out.append(known or letter)
        return "".join(out)
