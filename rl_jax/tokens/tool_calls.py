"""Tool calls in what a policy says: what a parser is, what all parsers share, and which calls can be made.

Invariants: a parser never raises, whatever the text; a call that cannot be read is a parse_error for the policy to
read, never a call with empty arguments; a parse_error repeats at most MAX_ECHO characters; fed piece by piece, a stream
shows the same text as at once, and never a part of a call or of its tag.
Must not: execute anything, or know an environment.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_jax import strict_json
from rl_jax.types import Action, ToolCall

MAX_ECHO = 800  # characters of what was said that an error repeats
MAX_DEPTH = 32  # of nested arguments
# ToolParser.how_to of formats in which a call is the whole turn
HOW_TO_CALL_ALONE = (
    'Call a tool by answering with {"name": TOOL, "parameters": {ARGUMENT: VALUE}} and nothing else; its answer'
    " comes as the next message."
)


class CallError(ValueError):
    """Why a call cannot be read or made, in words for the policy."""


@dataclass(frozen=True)
class Parsed:
    """What was left in a stream at its end."""

    text: str  # content not yet shown
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None


class ToolStream(Protocol):
    """One turn's text, piece by piece."""

    def feed(self, piece: str) -> str:
        """The content that is certain by now; "" while it may be a call."""
        ...

    def end(self) -> Parsed: ...


class ToolParser(Protocol):
    """One syntax of calls. Stateless."""

    name: str
    markers: tuple[str, ...]  # texts of its syntax that may be single tokens

    def stream(self) -> ToolStream: ...

    def write(self, calls: Sequence[ToolCall], content: str = "") -> str:
        """The text of a turn, as parse_text reads it: content, which it begins with, and then calls."""
        ...

    def how_to(self) -> str:
        """One sentence that tells a policy how a call is written, for formats that have no words of their own."""
        ...


def parse_text(parser: ToolParser, text: str) -> Action:
    """A whole turn at once."""
    stream = parser.stream()
    shown = stream.feed(text)
    left = stream.end()
    content = shown + left.text
    if left.error is not None:
        return Action(content, (), left.error)
    return Action(content.strip() if left.calls else content, left.calls)


def read_action(parser: ToolParser, text: str, tools: Sequence[Mapping[str, Any]]) -> Action:
    """The Action of a turn's text. Without tools nothing is a call: the text is all that was said."""
    if not tools:
        return Action(text)
    action = parse_text(parser, text)
    for call in action.tool_calls:
        if (why := check_call(call, tools)) is not None:
            return Action(action.text, (), f"The tool call could not be made: {why}.")
    return action


def held_back(text: str, tags: Iterable[str]) -> int:
    """Length of the longest end of the text that may become one of the tags."""
    longest = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:size]):
                longest = size
                break
    return longest


def split_at(text: str, tags: Sequence[str]) -> tuple[str, str, str]:
    """(what certainly stands before a tag, the first tag or "", the rest: behind it, or an end that may become one)."""
    found = {text.find(tag): tag for tag in tags if tag in text}
    if found:
        at = min(found)
        return text[:at], found[at], text[at + len(found[at]) :]
    keep = len(text) - held_back(text, tags)
    return text[:keep], "", text[keep:]


def unreadable(why: str, said: str) -> str:
    """A parse_error: why, and the start of what was said."""
    echo = said if len(said) <= MAX_ECHO else f"{said[:MAX_ECHO]} ... ({len(said)} characters)"
    return f"The tool call could not be read: {why}. It was: {echo}"


def read_calls(bodies: Sequence[str], arguments: str, whole: str = "") -> Parsed:
    """Each body a JSON object, or a list of them; `arguments`: the key of a call's arguments. whole: to echo."""
    calls: list[ToolCall] = []
    for body in bodies:
        try:
            value = load_json(body)
            for item in value if isinstance(value, list) else [value]:
                calls.append(to_call(item, arguments))
        except CallError as error:
            return Parsed("", (), unreadable(str(error), whole or body))
    return Parsed("", tuple(calls))


def load_json(text: str) -> Any:
    """Raises CallError: no JSON, numbers that JSON cannot hold, or nested too deep."""
    try:
        value = json.loads(
            text, parse_constant=strict_json.no_number, parse_float=strict_json.finite
        )
    except RecursionError:
        raise CallError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise CallError(f"it is no JSON ({error})") from None
    if strict_json.is_deeper(value, MAX_DEPTH):
        raise CallError(f"it is nested deeper than {MAX_DEPTH} levels")
    return value


def to_call(value: Any, arguments: str) -> ToolCall:
    """The ToolCall of {"name": ..., arguments: {...}}. Raises CallError."""
    if not isinstance(value, dict):
        raise CallError('it is no object {"name": ..., "' + arguments + '": {...}}')
    name, given = value.get("name"), value.get(arguments)
    if not isinstance(name, str) or not name:
        raise CallError('it has no "name"')
    if arguments not in value:
        raise CallError(f'it has no "{arguments}"')
    if isinstance(given, str):  # as some APIs nest them
        given = load_json(given)
    if not isinstance(given, dict):
        raise CallError(f'its "{arguments}" are no object')
    call_id = value.get("id")
    return ToolCall(name, given, call_id if isinstance(call_id, str) else "")


def dump_json(value: Any, markers: Sequence[str]) -> str:
    """JSON in which no marker stands: inside strings they are written as escapes."""
    text = json.dumps(value, ensure_ascii=False)
    for marker in markers:
        text = text.replace(marker, f"\\u{ord(marker[0]):04x}{marker[1:]}")
    return text


# --- tools that are offered --------------------------------------------------------------------------------------

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def check_tools(tools: Any) -> None:
    """Raises ValueError unless each is {"type": "function", "function": {"name", "parameters": a JSON schema}}."""
    if not isinstance(tools, Sequence):
        raise ValueError(f"tools is {type(tools).__name__}, no sequence of function schemas")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or tool.get("type") != "function":
            raise ValueError(
                f'tools[{i}] must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}'
            )
        if not isinstance(function.get("parameters", {}), Mapping):
            raise ValueError(f"tools[{i}] ({name}): parameters must be a JSON schema")
        if name in names:
            raise ValueError(f"tools[{i}]: there are two tools named {name}")
        names.add(name)


def check_call(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a call cannot be made of the tools, in words for the policy; None if it can.

    Names, required arguments and the types of plain ones are checked; what else a schema says is the environment's.
    """
    by_name = {tool["function"]["name"]: tool["function"] for tool in tools}
    if call.name not in by_name:
        return f"there is no tool {call.name[:80]!r}; the tools are {', '.join(by_name)}"
    schema = by_name[call.name].get("parameters") or {}
    properties = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in call.arguments:
            return f"{call.name} needs the argument {name!r}"
    for name, value in call.arguments.items():
        if properties and name not in properties:
            return f"{call.name} has no argument {name[:80]!r}; it takes {', '.join(properties)}"
        kind = (properties.get(name) or {}).get("type")
        if isinstance(kind, str) and kind in _TYPES and not _is_of(value, kind):
            return f"the argument {name!r} of {call.name} must be of type {kind}"
    return None


def signatures(tools: Sequence[Mapping[str, Any]]) -> str:
    """The tools in few words, one a line: name(argument: type, ...): what it does."""
    lines = []
    for tool in tools:
        function = tool["function"]
        properties = (function.get("parameters") or {}).get("properties") or {}
        told = ", ".join(f"{name}: {p.get('type', 'any')}" for name, p in properties.items())
        about = function.get("description", "")
        lines.append(f"{function['name']}({told})" + (f": {about}" if about else ""))
    return "\n".join(lines)


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])
