"""What one line of a data file means, and every way in which it can be wrong.

Forms of a row: {"messages": [...]} and {"prompt": ..., "completion": ...} for kind "chat"; {"prompt": ...,
"chosen": ..., "rejected": ...}, where "messages" may stand for "prompt", for kind "pairs". A prompt is a text (one user
message) or messages; a completion, chosen or rejected is a text (one assistant message) or messages that end with the
assistant's. "tools" are the functions that the conversation may call, as of a Task; an assistant's message may have
"tool_calls", in OpenAI's form ({"function": {"name", "arguments": JSON as text or object}}) or as {"name",
"arguments"}, and messages of the role "tool" answer them, each call once before anybody else speaks: by tool_call_id
where both have an id, else by place. They are put into the order of the calls, as a rendered answer may show no id (a
Message has none). Other keys of a row are its own and are named
once, but one that is nearly a known one is refused, as is any other key of a message, which may change what it says,
and an answer without a word to learn.
Must not: tokenize, or read a file.
"""

import difflib
import glob
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_jax.tokens import ROLES
from rl_jax.tokens.tool_calls import check_call, check_tools
from rl_jax.types import Message, ToolCall


class DataError(ValueError):
    """Rows that cannot be trained on; `errors` has one line each. Exit code 3."""

    def __init__(self, *errors: str):
        super().__init__("\n".join(errors))
        self.errors = errors


class RowError(ValueError):
    """What is wrong with one row, and the remedy; who knows file and line puts them before it."""


@dataclass(frozen=True)
class Row:
    """A conversation, or two that begin alike: (all messages,), or (those up to chosen's end, up to rejected's)."""

    conversations: tuple[tuple[Message, ...], ...]
    num_prompt: int  # messages that are not an answer: only assistant messages behind them train
    tools: tuple[Mapping[str, Any], ...] = ()  # as of a Task
    unread: tuple[str, ...] = ()  # keys that nothing reads


def find_files(key: str, pattern: str) -> list[Path]:
    """The files of a path or a pattern with *, by name. Raises DataError if there is none. key: of the setting."""
    paths = [Path(p) for p in sorted(glob.glob(pattern))] if "*" in pattern else [Path(pattern)]
    files = [path for path in paths if path.is_file()]
    if not files:
        raise DataError(
            f"{key}={pattern} names no file; give a file of JSON lines, or a pattern such as 'data/*.jsonl'"
        )
    return files


def parse_row(raw: bytes, kind: str) -> Row:
    """kind: chat | pairs. Raises RowError."""
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise RowError(f"is no JSON ({error}); write one object a line") from None
    if not isinstance(value, dict):
        raise RowError(f"is {_named(value)}, no object; write {_FORMS[kind]}")
    _check_keys(value, kind)
    tools = _tools(value)
    conversations, num_prompt = _pair(value) if kind == "pairs" else _chat(value)
    for conversation in conversations:
        _check_calls(conversation, tools)
    unread = tuple(key for key in value if key not in KEYS)
    return Row(conversations, num_prompt, tools, unread)


_FORMS = {
    "chat": '{"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}',
    "pairs": '{"prompt": ..., "chosen": ..., "rejected": ...}',
}


# A file may serve both kinds: a key of the other form is known, and not read.
KEYS = ("messages", "prompt", "completion", "chosen", "rejected", "tools")
TOOL_KEYS = (
    "tool_call_id",
    "name",
)  # of a tool's message: once it is in its place, that says the same


def _check_keys(value: Mapping[str, Any], kind: str) -> None:
    """Raises RowError for a key that was meant to be a known one, or two that say the same."""
    for key in value:
        if key not in KEYS and (near := difflib.get_close_matches(key, KEYS, n=1, cutoff=0.75)):
            raise RowError(
                f"has the key {key[:40]!r}, which nothing reads; write {near[0]}, or give it a name less like it"
            )
    twice = ("prompt", "completion") if kind == "chat" else ("prompt",)
    if "messages" in value and (also := [key for key in twice if key in value]):
        raise RowError(f"has messages and {' and '.join(also)}; keep one of the two forms")


Conversations = tuple[tuple[Message, ...], ...]


@dataclass(frozen=True)
class _Said:
    """A message with what only its row knows of it."""

    message: Message
    call_id: str  # of a tool's message: that of the call it answers, "" where the row has none
    where: str  # as in messages[2]


def _chat(value: Mapping[str, Any]) -> tuple[Conversations, int]:
    if "messages" in value:
        messages = _messages(value, "messages", "user")
        return (_answered(_ending_with_assistant(messages, "messages")),), 0
    prompt, answer = _messages(value, "prompt", "user"), _answer(value, "completion")
    return (_answered([*prompt, *answer]),), len(prompt)


def _pair(value: Mapping[str, Any]) -> tuple[Conversations, int]:
    key = "messages" if "messages" in value else "prompt"
    prompt = _messages(value, key, "user", "pairs")
    sides = [_answer(value, name, "pairs") for name in ("chosen", "rejected")]
    return tuple(_answered([*prompt, *side]) for side in sides), len(prompt)


def _tools(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = value.get("tools") or []
    try:
        if not isinstance(tools, list):
            raise ValueError(f"tools is {_named(tools)}, no list of function schemas")
        check_tools(tools)
    except ValueError as error:
        raise RowError(f"has tools that cannot be offered: {error}") from None
    return tuple(tools)


def _check_calls(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises RowError for a call that the tools do not take."""
    for i, message in enumerate(messages if tools else ()):
        for call in message.tool_calls:
            if (why := check_call(call, tools)) is not None:
                raise RowError(f"calls what it does not offer in message {i}: {why}")


def _answered(conversation: Sequence[_Said]) -> tuple[Message, ...]:
    """The messages, the tools' in the order of the calls that they answer. Raises RowError where they do not fit."""
    out: list[Message] = []
    at = 0
    while at < len(conversation):
        said = conversation[at]
        end = at + 1
        while end < len(conversation) and conversation[end].message.role == "tool":
            end += 1
        if said.message.role == "tool":
            raise _unasked(at)
        out.append(said.message)
        answers = _by_call(said.message.tool_calls, conversation[at + 1 : end], at + 1)
        missing = [call for call, one in zip(said.message.tool_calls, answers) if one is None]
        if missing and end < len(conversation):
            raise RowError(
                f"{said.where} calls {_call_name(missing[0])}, which no tool's message answers before"
                f" {conversation[end].where}; add the answer, or take the call out"
            )
        out += [one.message for one in answers if one is not None]
        at = end
    return tuple(out)


def _by_call(calls: Sequence[ToolCall], answers: Sequence[_Said], first: int) -> list[_Said | None]:
    """The answer of each call. first: the index of the first answer in its conversation."""
    found: list[_Said | None] = [None] * len(calls)
    for place, answer in enumerate(answers):
        known = [i for i, call in enumerate(calls) if answer.call_id and call.id == answer.call_id]
        by_place = place < len(calls) and not (answer.call_id and calls[place].id)
        # Some rows give several calls one id: their answers come in the calls' order.
        free = [i for i in known if found[i] is None]
        slot = free[0] if free else known[0] if known else place if by_place else None
        if slot is None and answer.call_id and calls:
            ids = ", ".join(call.id for call in calls if call.id) or "none"
            raise RowError(
                f"{answer.where} answers the call {answer.call_id[:40]!r}, which the assistant's message before it does"
                f" not have (its ids: {ids[:200]}); correct the id"
            )
        if slot is None:
            raise _unasked(first + place)
        if (other := found[slot]) is not None:
            raise RowError(
                f"{answer.where} answers {_call_name(calls[slot])}, as {other.where} does; keep one of them, or give"
                " each the tool_call_id of its own call"
            )
        found[slot] = answer
    return found


def _call_name(call: ToolCall) -> str:
    return f"{call.name} ({call.id[:40]!r})" if call.id else call.name


def _unasked(index: int) -> RowError:
    return RowError(
        f"message {index} is of the tool, but no call of the assistant before it is open; give the assistant's message"
        " its tool_calls"
    )


def _answer(value: Mapping[str, Any], key: str, kind: str = "chat") -> tuple[_Said, ...]:
    return _ending_with_assistant(_messages(value, key, "assistant", kind), key)


def _ending_with_assistant(conversation: Sequence[_Said], key: str) -> tuple[_Said, ...]:
    messages = [said.message for said in conversation]
    if messages[-1].role != "assistant":
        raise RowError(
            f"{key} ends with a message of the {messages[-1].role}, which nothing answers; end it with one of the"
            " assistant"
        )
    for i, message in enumerate(messages):
        says = message.content.strip() or message.tool_calls
        if message.role == "assistant" and key != "rejected" and not says:
            where = key if len(messages) == 1 else f"{key}[{i}].content"
            raise RowError(f"{where} has no word to learn; write the answer, or take the row out")
    return tuple(conversation)


def _messages(
    value: Mapping[str, Any], key: str, role: str, kind: str = "chat"
) -> tuple[_Said, ...]:
    """Of a text (one message of `role`) or of a list."""
    if key not in value:
        raise RowError(f"has {_keys(value)} but no {key}; write {_FORMS[kind]}")
    content = value[key]
    if isinstance(content, str) and key != "messages":
        return (_Said(Message(role, content), "", key),)
    if not isinstance(content, list) or not content:
        text = "" if key == "messages" else "a text or "
        raise RowError(f"{key} is {_named(content)}; it must be {text}a list of messages")
    return tuple(_message(item, f"{key}[{i}]") for i, item in enumerate(content))


def _message(value: Any, where: str) -> _Said:
    if not isinstance(value, dict):
        raise RowError(f'{where} is {_named(value)}; it must be {{"role": ..., "content": ...}}')
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise RowError(f"{where}.role is {role!r}; use one of {', '.join(ROLES)}")
    calls = value.get("tool_calls") or []
    known = (
        "role",
        "content",
        *TOOL_KEYS * (role == "tool"),
        *("tool_calls",) * (role == "assistant"),
    )
    odd = [k for k, v in value.items() if k not in known and v not in (None, [], {}, "")]
    if odd:
        raise RowError(
            f"{where} has {', '.join(odd)}, which the chat format cannot render; write it into the content, or take it"
            " out"
        )
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise RowError(f"{where}.content is {_named(content)}; it must be a text")
    if not isinstance(calls, list):
        raise RowError(f"{where}.tool_calls is {_named(calls)}; it must be a list")
    called = tuple(_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls))
    return _Said(Message(role, content, called), str(value.get("tool_call_id") or ""), where)


def _call(value: Any, where: str) -> ToolCall:
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RowError(f'{where} must be {{"function": {{"name": ..., "arguments": ...}}}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RowError(f"{where}: the arguments of {name} are no JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise RowError(f"{where}: the arguments of {name} are {_named(arguments)}; give an object")
    return ToolCall(name, arguments, str(value.get("id") or ""))


def _keys(value: Mapping[str, Any]) -> str:
    names = [str(name)[:40] for name in value]
    return (
        f"the keys {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}" if names else "no key"
    )


def _named(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    if value is None:
        return "null"
    if value in ([], ""):
        return "empty"
    return names.get(type(value), "a number")
