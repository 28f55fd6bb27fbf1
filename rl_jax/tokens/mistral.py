"""Calls as Mistral writes them: text, then [TOOL_CALLS] and a list [{"name": ..., "arguments": {...}, "id": ...}, ...].

The newer form [TOOL_CALLS]name[ARGS]{...}, once for each call, is read too.
"""

from collections.abc import Sequence
from typing import Any

from rl_jax.tokens.tool_calls import (
    CallError,
    Parsed,
    ToolStream,
    dump_json,
    load_json,
    read_calls,
    split_at,
    to_call,
    unreadable,
)
from rl_jax.types import ToolCall

TAG, ARGS = "[TOOL_CALLS]", "[ARGS]"


class Mistral:
    name: str = "mistral"
    markers: tuple[str, ...] = (TAG, ARGS)

    def stream(self) -> ToolStream:
        return _Stream()

    def write(self, calls: Sequence[ToolCall], content: str = "") -> str:
        if not calls:
            return content
        told: list[dict[str, Any]] = []
        for call in calls:
            told.append({"name": call.name, "arguments": dict(call.arguments)})
            if call.id:
                told[-1]["id"] = call.id
        return content + TAG + dump_json(told, self.markers)

    def how_to(self) -> str:
        return (
            f'Call a tool with {TAG}[{{"name": TOOL, "arguments": {{ARGUMENT: VALUE}}}}]; the answer comes as the next'
            " message."
        )


class _Stream:
    def __init__(self):
        self._left, self._is_call = "", False

    def feed(self, piece: str) -> str:
        self._left += piece
        if self._is_call:
            return ""
        shown, tag, rest = split_at(self._left, (TAG,))
        self._left, self._is_call = tag + rest, bool(tag)
        return shown

    def end(self) -> Parsed:
        if not self._is_call:
            return Parsed(self._left)
        body = self._left[len(TAG) :].strip()
        if body[:1] in ("[", "{"):
            return read_calls([body], "arguments", self._left)
        try:
            return Parsed("", tuple(map(_named, self._left.split(TAG)[1:])))
        except CallError as error:
            return Parsed("", (), unreadable(str(error), self._left))


def _named(text: str) -> ToolCall:
    """name[ARGS]{...}"""
    name, marker, arguments = text.partition(ARGS)
    if not marker:
        raise CallError(f"neither a list nor {ARGS} follows {TAG}")
    return to_call({"name": name.strip(), "arguments": load_json(arguments)}, "arguments")
