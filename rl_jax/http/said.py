"""Said: the text of an assistant's turn as content and tool calls, the same whether it comes at once or in pieces.

Invariants: content that was shown is never taken back; what may be a part of a call waits, and so does content behind
a call, until it is known what the call is; before calls content has no white space at its end, and white space alone is
none; a call that cannot be read, or made of the tools that are offered, is content with an error beside it, never a
call: then content is all that was said.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_jax.tokens.tool_calls import ToolParser, check_call
from rl_jax.types import ToolCall


class Said:
    def __init__(self, parser: ToolParser, tools: Sequence[Mapping[str, Any]], forced: str = ""):
        """tools: none = all is content. forced: what stands before the first piece (asks.py)."""
        self._tools = tools
        self._stream = parser.stream() if tools else None
        self._raw = ""  # all of it
        self._given = ""  # what the parser called content before any call: what _raw begins with
        self._behind = ""  # what it called content behind one
        self._blank = ""  # white space whose neighbours are not known to be content
        self.calls: tuple[ToolCall, ...] = ()
        self.error: str | None = None
        if self._stream is not None and forced:
            self.feed(forced)

    def feed(self, piece: str) -> str:
        """Content to show."""
        if self._stream is None:
            return piece
        self._raw += piece
        return self._show(self._stream.feed(piece))

    def end(self) -> str:
        """The rest of the content; `calls` and `error` are known from here on."""
        if self._stream is None:
            return ""
        left = self._stream.end()
        shown = self._show(left.text)
        self.error = left.error
        for call in left.calls:
            if self.error is None and (why := check_call(call, self._tools)) is not None:
                self.error = f"The tool call could not be made: {why}."
        if self.error is None:
            self.calls = left.calls
        blank, self._blank = self._blank, ""
        if self.calls:
            return shown + (blank + self._behind).rstrip()
        return shown + blank + self._raw[len(self._given) :]

    def _show(self, content: str) -> str:
        """Content without the white space at its end, which waits."""
        if self._behind or not self._raw.startswith(self._given + content):
            self._behind += content
            return ""
        self._given += content
        text = self._blank + content
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        return kept
