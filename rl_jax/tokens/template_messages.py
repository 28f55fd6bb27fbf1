"""Messages and tools as a chat template gets them, content marked; and other ways of saying what a template refuses.

Must not: render, or know tokens.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
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
    marks: Marks | None,
    keep: re.Pattern[str] | None,
) -> dict[str, Any]:
    """A message as templates know it; a tool's is an Answer."""
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
                "id": mark(one.id or _nth_id(i)),
                "type": "function",
                "function": {"name": mark(one.name), "arguments": _tree(one.arguments, mark)},
            }
            for i, one in enumerate(message.tool_calls)
        ]
    if isinstance(message, Answer) and message.role == "tool":
        out["tool_call_id"] = mark(message.call.id)
        if message.call.name:
            out["name"] = mark(message.call.name)
    return out


@dataclass(frozen=True)
class Answer(Message):
    """A message that may be of a tool, with the call that it answers: its name, if it is known, and an id."""

    call: ToolCall = ToolCall("", {})


def answering(
    messages: Sequence[Message],
    calls: Sequence[ToolCall] = (),
    said: Mapping[int, Sequence[ToolCall]] = MappingProxyType({}),
) -> list[Message]:
    """The messages, each tool's with the call that it answers: those of the turn before it, in their order.

    calls: of the turn before all of them.  said: by the ordinal of an assistant's message, where its calls are in its
    words and not in its tool_calls.
    """
    out: list[Message] = []
    num_said, at = 0, 0
    for message in messages:
        if message.role == "assistant":
            calls, at = said.get(num_said, message.tool_calls), 0
            num_said += 1
        elif message.role == "tool":
            call = calls[at] if at < len(calls) else ToolCall("", {})
            asked = ToolCall(call.name, {}, call.id or _nth_id(at))
            message, at = Answer("tool", message.content, message.tool_calls, asked), at + 1
        out.append(message)
    return out


def own_ids(messages: Sequence[Message]) -> list[Message]:
    """With calls, and their answers, under ids of ours in place of those that somebody made up."""
    out, at = [], 0
    for message in messages:
        if isinstance(message, Answer):
            message, at = replace(message, call=replace(message.call, id=_nth_id(at))), at + 1
        elif message.role == "assistant":
            calls, at = tuple(replace(call, id="") for call in message.tool_calls), 0
            message = replace(message, tool_calls=calls)
        out.append(message)
    return out


def _nth_id(i: int) -> str:
    """Of a call that has none; some templates want nine characters."""
    return f"{i:09d}"


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
    for message in answering(messages, calls):
        if not isinstance(message, Answer):
            return
        yield ToolCall(SAID, {}, message.call.id)


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
