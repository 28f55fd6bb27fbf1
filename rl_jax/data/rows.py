"""What one line of a data file means, and every way in which it can be wrong.

Forms of a row: {"messages": [...]} and {"prompt": ..., "completion": ...} for kind "chat"; {"prompt": ...,
"chosen": ..., "rejected": ...}, where "messages" may stand for "prompt", for kind "pairs". A prompt is a text (one user
message) or messages; a completion, chosen or rejected is a text (one assistant message) or messages that end with the
assistant's. What else a row's writer wants to keep of it stands under "info", which is not read; any other key of a row
or a message may change what it says, so it is refused, as is an answer without a word to learn.
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
from rl_jax.types import Message


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
    if kind == "pairs":
        return _pair(value)
    if "messages" in value:
        messages = _messages(value, "messages", "user")
        return Row((_ending_with_assistant(messages, "messages"),), 0)
    prompt, answer = _messages(value, "prompt", "user"), _answer(value, "completion")
    return Row(((*prompt, *answer),), len(prompt))


_FORMS = {
    "chat": '{"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}',
    "pairs": '{"prompt": ..., "chosen": ..., "rejected": ...}',
}


INFO = "info"
# A file may serve both kinds: a key of the other form is known, and not read.
KEYS = ("messages", "prompt", "completion", "chosen", "rejected", INFO)


def _check_keys(value: Mapping[str, Any], kind: str) -> None:
    """Raises RowError for a key that nothing reads, or two that say the same."""
    for key in value:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            meant = f"write {near[0]}, or move" if near else "move"
            raise RowError(
                f'has the key {key[:40]!r}, which nothing reads; {meant} it under "{INFO}"'
            )
    twice = ("prompt", "completion") if kind == "chat" else ("prompt",)
    if "messages" in value and (also := [key for key in twice if key in value]):
        raise RowError(f"has messages and {' and '.join(also)}; keep one of the two forms")


def _pair(value: Mapping[str, Any]) -> Row:
    key = "messages" if "messages" in value else "prompt"
    prompt = _messages(value, key, "user", "pairs")
    sides = [_answer(value, name, "pairs") for name in ("chosen", "rejected")]
    return Row(tuple((*prompt, *side) for side in sides), len(prompt))


def _answer(value: Mapping[str, Any], key: str, kind: str = "chat") -> tuple[Message, ...]:
    return _ending_with_assistant(_messages(value, key, "assistant", kind), key)


def _ending_with_assistant(messages: Sequence[Message], key: str) -> tuple[Message, ...]:
    if messages[-1].role != "assistant":
        raise RowError(
            f"{key} ends with a message of the {messages[-1].role}, which nothing answers; end it with one of the"
            " assistant"
        )
    for i, message in enumerate(messages):
        if message.role == "assistant" and key != "rejected" and not message.content.strip():
            where = key if len(messages) == 1 else f"{key}[{i}].content"
            raise RowError(f"{where} has no word to learn; write the answer, or take the row out")
    return tuple(messages)


def _messages(
    value: Mapping[str, Any], key: str, role: str, kind: str = "chat"
) -> tuple[Message, ...]:
    """Of a text (one message of `role`) or of a list."""
    if key not in value:
        raise RowError(f"has {_keys(value)} but no {key}; write {_FORMS[kind]}")
    content = value[key]
    if isinstance(content, str) and key != "messages":
        return (Message(role, content),)
    if not isinstance(content, list) or not content:
        text = "" if key == "messages" else "a text or "
        raise RowError(f"{key} is {_named(content)}; it must be {text}a list of messages")
    return tuple(_message(item, f"{key}[{i}]") for i, item in enumerate(content))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(f'{where} is {_named(value)}; it must be {{"role": ..., "content": ...}}')
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise RowError(f"{where}.role is {role!r}; use one of {', '.join(ROLES)}")
    odd = [k for k, v in value.items() if k not in ("role", "content") and v not in (None, [], {})]
    if odd:
        raise RowError(
            f"{where} has {', '.join(odd)}, which the chat format cannot render; write it into the content, or take it"
            " out"
        )
    if not isinstance(content, str):
        raise RowError(f"{where}.content is {_named(content)}; it must be a text")
    return Message(role, content)


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
