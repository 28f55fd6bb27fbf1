"""Messages and tools as a chat template gets them, content marked; and other ways of saying what a template refuses.

Must not: render, or know tokens.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_jax.tokens.marks import PROBES, Marks, Probe
from rl_jax.tokens.tokenizer import encodable
from rl_jax.types import Message, ToolCall

FIRST_SAID = -2  # owner of the assistant's first message; -3 of the second
USER, SAID, TOOL = PROBES[:3]

# Words of a tool's schema that a template may look for; every other text in it is content.
SCHEMA_WORDS = frozenset(
    (
        "type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "string",
        "integer", "number", "boolean", "object", "array", "null", "default", "additionalProperties", "return",
        "returns", "strict", "anyOf", "oneOf", "allOf", "const", "format",
    )
)  # fmt: skip


def owners(messages: Sequence[Message]) -> Iterator[int]:
    """Whose marks a message's content has: the assistant's messages by their ordinal, however others are joined."""
    num_said = 0
    for i, message in enumerate(messages, 1):
        is_said = message.role == "assistant"
        yield FIRST_SAID - num_said if is_said else i
        num_said += is_said


def as_dict(
    message: Message,
    owner: int,
    call: ToolCall | None,
    marks: Marks | None,
    keep: re.Pattern[str] | None,
) -> dict[str, Any]:
    """A message as templates know it. call: the one that a tool message answers."""
    is_own = message.role == "assistant"

    def mark(text: str) -> str:
        if isinstance(text, Probe):
            return str(text)
        if marks is None:
            return encodable(text)
        looked_for = keep if is_own and keep is not None and keep.search(text) else None
        return marks.mark(text, owner, looked_for)

    out: dict[str, Any] = {"role": message.role, "content": mark(message.content)}
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": mark(one.id or f"{i:09d}"),
                "type": "function",
                "function": {"name": mark(one.name), "arguments": _tree(one.arguments, mark)},
            }
            for i, one in enumerate(message.tool_calls)
        ]
    if call is not None:
        out["tool_call_id"] = mark(call.id)
        if call.name:
            out["name"] = mark(call.name)
    return out


def answered(calls: Sequence[ToolCall]) -> Iterator[ToolCall]:
    """What each tool message answers: its name, if it is known, and an id."""
    for i in itertools.count():
        call = calls[i] if i < len(calls) else ToolCall("", {})
        yield ToolCall(call.name, {}, call.id or f"{i:09d}")


def _tree(value: Any, mark: Any) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {mark(str(k)): _tree(v, mark) for k, v in value.items()}
    return [_tree(v, mark) for v in value] if isinstance(value, (list, tuple)) else value


def schema(tool: Mapping[str, Any], marks: Marks | None) -> Any:
    def mark(text: str) -> str:
        if text in SCHEMA_WORDS or isinstance(text, Probe):
            return str(text)
        return encodable(text) if marks is None else marks.mark(text)

    return _tree(tool, mark)


def check_complete(text: str, marks: Marks, messages: Sequence[Message], where: str) -> None:
    """Raises ValueError if the template left out what somebody said, the assistant aside."""
    escapes = marks.escapes()
    for message, owner in zip(messages, owners(messages)):
        said = [call.name for call in message.tool_calls]
        if message.role != "assistant":
            is_probe = isinstance(message.content, Probe)  # strip() would make a plain text of it
            said.append(message.content if is_probe else message.content.strip())
        for words in said:
            marked = str(words) if isinstance(words, Probe) else marks.mark(words, owner)
            if marked not in text and marked.translate(escapes) not in text:
                raise ValueError(
                    f"{where} leaves out what a message of the role {message.role} says: {words[:80]!r}"
                )


def calls_for(messages: Sequence[Message], calls: Sequence[ToolCall]) -> Iterator[ToolCall]:
    """A call for each tool message at the start, under the id that the message will name."""
    for message, call in zip(messages, answered(calls)):
        if message.role != "tool":
            return
        yield ToolCall(SAID, {}, call.id)


def tools_as_users(messages: list[Message]) -> list[Message]:
    return [replace(m, role="user") if m.role == "tool" else m for m in messages]


def systems_as_users(messages: list[Message]) -> list[Message]:
    return [replace(m, role="user") if m.role == "system" else m for m in messages]


def joined(messages: list[Message]) -> list[Message]:
    """Neighbours of one role as one message."""
    out: list[Message] = []
    for message in messages:
        if out and out[-1].role == message.role:
            last = out.pop()
            content = "\n\n".join(filter(None, (last.content, message.content)))
            message = Message(message.role, content, last.tool_calls + message.tool_calls)
        out.append(message)
    return out
