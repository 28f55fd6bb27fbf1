"""Calls as Llama 3 writes them: the whole turn is {"name": ..., "parameters": {...}}, perhaps behind <|python_tag|>.

Several objects stand one behind the other, parted by ";" or white space. Text before the tag is content. A turn that
begins with "{" and holds no "name" is an answer in JSON, not a call.
"""

import json
from collections.abc import Sequence

from rl_jax.tokens.tool_calls import (
    HOW_TO_CALL_ALONE,
    Parsed,
    ToolStream,
    dump_json,
    read_calls,
    split_at,
    unreadable,
)
from rl_jax.types import ToolCall

TAG = "<|python_tag|>"


class LlamaJson:
    name: str = "llama3_json"
    markers: tuple[str, ...] = (TAG,)

    def stream(self) -> ToolStream:
        return _Stream()

    def write(self, calls: Sequence[ToolCall], content: str = "") -> str:
        told = "; ".join(
            dump_json({"name": c.name, "parameters": dict(c.arguments)}, self.markers)
            for c in calls
        )
        return content + TAG + told if content and told else content or told

    def how_to(self) -> str:
        return HOW_TO_CALL_ALONE


class _Stream:
    """`_left`: what is not shown. Its mode is open until the first character that is no white space."""

    def __init__(self):
        self._left, self._mode = "", "start"

    def feed(self, piece: str) -> str:
        self._left += piece
        if self._mode == "start" and (begin := self._left.lstrip()):
            self._mode = "json" if begin[0] == "{" else "text"
        if self._mode != "text":
            return ""
        shown, tag, self._left = split_at(self._left, (TAG,))
        self._mode = "tag" if tag else "text"
        return shown

    def end(self) -> Parsed:
        body = self._left.strip()
        if self._mode not in ("json", "tag") or (self._mode == "json" and '"name"' not in body):
            return Parsed(self._left)
        if not body:
            return Parsed("", (), unreadable(f"nothing follows {TAG}", TAG))
        return read_calls(_objects(body), "parameters", self._left)


def _objects(body: str) -> list[str]:
    """The texts of JSON values one behind the other; what is none stays as it is, for the error."""
    found, at, decoder = [], 0, json.JSONDecoder()
    while at < len(body):
        try:
            _, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return [*found, body[at:]]
        found.append(body[at:end])
        at = end
        while at < len(body) and (body[at].isspace() or body[at] == ";"):
            at += 1
    return found
