"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, in text.

What stands in <think>...</think> is thought, not said: no call is looked for there.
"""

import re
from collections.abc import Sequence

from rl_jax.tokens.tool_calls import (
    Parsed,
    ToolStream,
    dump_json,
    held_back,
    read_calls,
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
        starts = {self._left.find(tag): tag for tag in (OPEN, THINK) if tag in self._left}
        if not starts:
            return self._show(shown, (OPEN, THINK))
        at = min(starts)
        tag = starts[at]
        shown.append(self._left[:at] + (tag if tag == THINK else ""))
        self._left = self._left[at + len(tag) :]
        self._mode, self._at = ("think", 0) if tag == THINK else ("call", 0)
        return True

    def _think(self, shown: list[str]) -> bool:
        at = self._left.find(THOUGHT)
        if at < 0:
            return self._show(shown, (THOUGHT,))
        at += len(THOUGHT)
        shown.append(self._left[:at])
        self._left, self._mode = self._left[at:], "text"
        return True

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

    def _show(self, shown: list[str], tags: tuple[str, ...]) -> bool:
        keep = len(self._left) - held_back(self._left, tags)
        shown.append(self._left[:keep])
        self._left = self._left[keep:]
        return False
