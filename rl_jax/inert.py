"""Text of a model, an environment or a config, made so that it acts on no terminal and no page.

Owns: which characters act (controls, formats such as marks of direction, halves of surrogate pairs, line ends of their
own) and what they are shown as. Line breaks and tabs stay. Must not: cut, or escape for HTML.
"""

import unicodedata

ACTS = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode
# Not assigned, and by the standard not to be seen: U+2065, and tags behind U+E0000.
UNSEEN = frozenset((0x2065, *range(0xE0000, 0xE0080)))


def inert(text: str) -> str:
    r"""With every character that acts as \xNN, \uNNNN or \UNNNNNNNN."""
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return character
    if code not in UNSEEN and unicodedata.category(character) not in ACTS:
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
