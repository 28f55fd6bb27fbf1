"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, in text.

What stands in <think>...</think> is thought, not said: no call is looked for there.
"""

import re
from collections.abc import Sequence

from rl_jax.tokens.tool_calls import (
    Parsed,
    ToolStream,
    dump_json,
    read_calls,
    split_at,
    unreadable,
)
from rl_jax.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.S)


class Hermes:
    name: str = "hermes"
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def stream(self) -> ToolStream:
        return _Stream()

    def write(self, calls: Sequence[ToolCall], content: str = "") -> str:
        bodies = (
            dump_json({"name": c.name, "arguments": dict(c.arguments)}, self.markers) for c in calls
        )
        blocks = [f"{OPEN}\n{body}\n{CLOSE}" for body in bodies]
        return "\n".join([content, *blocks] if content else blocks)

    def how_to(self) -> str:
        return (
            f'Call a tool with {OPEN}{{"name": TOOL, "arguments": {{ARGUMENT: VALUE}}}}{CLOSE}; the answer comes as the'
            " next message."
        )


class _Stream:
    """`_left` begins where `_mode` does; in a call, `_at` is how far its JSON was followed."""

    def __init__(self):
        self._left, self._mode, self._at = "", "text", 0
        self._bodies: list[str] = []

    def feed(self, piece: str) -> str:
        self._left += piece
        shown: list[str] = []
        step = {"text": self._text, "think": self._think, "call": self._call}
        while step[self._mode](shown):
            pass
        return "".join(shown)

    def end(self) -> Parsed:
        if self._mode == "call":
            return Parsed("", (), unreadable(f"it does not end with {CLOSE}", self._left))
        parsed = read_calls(self._bodies, "arguments")
        return Parsed(self._left, parsed.calls, parsed.error)

    def _text(self, shown: list[str]) -> bool:
        """Show what is text; whether another mode begins."""
        text, tag, self._left = split_at(self._left, (OPEN, THINK))
        shown.append(text + (tag if tag == THINK else ""))
        if tag:
            self._mode, self._at = ("think" if tag == THINK else "call"), 0
        return bool(tag)

    def _think(self, shown: list[str]) -> bool:
        text, tag, self._left = split_at(self._left, (THOUGHT,))
        shown.append(text + tag)
        self._mode = "text" if tag else "think"
        return bool(tag)

    def _call(self, shown: list[str]) -> bool:
        """Follow the JSON to a closing tag that is in no string of it."""
        while True:
            close, quote = self._left.find(CLOSE, self._at), self._left.find('"', self._at)
            if quote >= 0 and (close < 0 or quote < close):
                string = _STRING.match(self._left, quote)
                if string is None:  # it may go on in the next piece
                    self._at = quote
                    return False
                self._at = string.end()
            elif close >= 0:
                self._bodies.append(self._left[:close])
                self._left, self._mode = self._left[close + len(CLOSE) :], "text"
                return True
            else:
                self._at = max(self._at, len(self._left) - len(CLOSE) + 1)
                return False
