"""TextStream: text of tokens as they come, and stop strings found across the borders of tokens.

Invariants: the pieces of text in a row are decode(all tokens) up to the stop string, whatever the tokens' borders are;
a piece is never taken back, so text that may still become a stop string, or a character, waits; which token completes a
stop string is known exactly.
"""

from collections.abc import Sequence

from rl_jax.tokens.tokenizer import Tokenizer
from rl_jax.tokens.tool_calls import held_back

BROKEN = "\ufffd"  # of bytes that are no whole character, yet or at all
FEW = 32  # tokens that wait for a character; with more, one look in so many


class Detokenizer:
    """Text of one token after the other. `hidden`: tokens that are not shown (control tokens, a turn's end)."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()):
        self._tokenizer, self._hidden = tokenizer, hidden
        self._known: list[int] = []  # tokens whose text was given; context for what follows
        self._open: list[int] = []  # tokens whose text is not certain

    def feed(self, token: int) -> str:
        """Text that is certain now; "" while characters are incomplete."""
        if token in self._hidden:
            return self.end()
        self._open.append(token)
        if len(self._open) > FEW and len(self._open) % FEW:
            return ""
        text = self._text()
        return "" if text.endswith(BROKEN) else self._give(text)

    def end(self) -> str:
        """The rest: no more tokens come, or one that is not shown."""
        if not self._open:
            return ""
        text = self._give(self._text())
        if text.endswith(BROKEN):  # what follows must not complete it: that is another character
            self._known = []
        return text

    def _text(self) -> str:
        # Some decoders drop a blank at the start of what they decode: decoded behind its neighbours it is there.
        before = self._tokenizer.decode(self._known) if self._known else ""
        return self._tokenizer.decode([*self._known, *self._open])[len(before) :]

    def _give(self, text: str) -> str:
        self._known, self._open = self._open, []
        return text


class TextStream:
    """A choice's text, until a stop string."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        *,
        shows_stop: bool,
        num_free: int = 0,
    ):
        """num_free: first tokens, in whose text no stop string is looked for."""
        self._detokenizer, self._stops, self._shows_stop = detokenizer, tuple(stops), shows_stop
        self._num_free = num_free
        self._held = ""  # may be the begin of a stop string
        self.stopped_by: str | None = None

    def feed(self, token: int) -> str:
        """Text that may be shown now. After `stopped_by` is set nothing more comes."""
        text = self._detokenizer.feed(token)
        if self._num_free:
            self._num_free -= 1
            return text
        return self._show(text)

    def end(self) -> str:
        """What is left at the end of the tokens."""
        shown = self._show(self._detokenizer.end())
        held, self._held = self._held, ""
        return shown + held

    def _show(self, new: str) -> str:
        if not self._stops or self.stopped_by is not None:
            return "" if self.stopped_by is not None else new
        text = self._held + new
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that was complete first; of two at once, the one that begins first.
            at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
            self.stopped_by, self._held = stop, ""
            return text[: at + (len(stop) if self._shows_stop else 0)]
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
