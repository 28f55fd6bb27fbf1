"""Characters that act are shown by number; every other text stays as it is."""

import sys
import unicodedata

from rl_jax.inert import UNSEEN, inert


def test_text_that_acts_on_nothing_stays():
    text = 'a "b" <c> é 猫 🙂 e\u0301 \u00a0\n\tend'
    assert inert(text) == text


def test_what_acts_is_shown_by_number():
    assert inert("\x1b[31m\r\x9b") == "\\x1b[31m\\x0d\\x9b"
    assert inert("\u202eab\u200b \ud83d \U000e0041") == "\\u202eab\\u200b \\ud83d \\U000e0041"


def test_nothing_that_comes_out_acts():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    out = set(inert(everything)) - {"\n", "\t"}
    assert not {c for c in out if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert not out & set(map(chr, UNSEEN))
