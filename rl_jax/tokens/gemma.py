"""Calls as Gemma writes them: a fenced block "tool_code" of Python calls, or a JSON object {"name", "parameters"}.

The JSON form is the whole turn, bare or in a fence "json". Python calls have literal keyword arguments, are parsed and
never run; print(...) round one is ignored. What a policy must not say in a call's place is an error, not content.
"""

import ast
import math
import re
from collections.abc import Sequence
from typing import Any

from rl_jax.tokens.tool_calls import (
    HOW_TO_CALL_ALONE,
    MAX_DEPTH,
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

FENCE, TAG, JSON = "```", "```tool_code", "```json"
MAX_CODE = 10_000  # characters that are given to Python's parser
MAX_BITS = 10_000  # of an integer; Python writes none above 14,000 in decimal

_JSON_BLOCK = re.compile(r"\s*```json\s*(\{.*\})\s*(?:```)?\s*", re.S)


class Gemma:
    name: str = "gemma"
    markers: tuple[str, ...] = ()

    def stream(self) -> ToolStream:
        return _Stream()

    def write(self, calls: Sequence[ToolCall], content: str = "") -> str:
        bodies = [
            dump_json({"name": c.name, "parameters": dict(c.arguments)}, (FENCE,)) for c in calls
        ]
        told = bodies[0] if len(bodies) == 1 else "[" + ", ".join(bodies) + "]" if bodies else ""
        return f"{content}\n{TAG}\n{told}\n{FENCE}" if content and told else content or told

    def how_to(self) -> str:
        return HOW_TO_CALL_ALONE


class _Stream:
    """`_left`: what is not shown; `_code`: what stands in the fence, once there is one."""

    def __init__(self):
        self._left, self._mode = "", "start"

    def feed(self, piece: str) -> str:
        self._left += piece
        if self._mode == "start":
            begin = self._left.lstrip()
            if begin and not JSON.startswith(begin[: len(JSON)]):
                self._mode = "json" if begin[0] in "{[" else "text"
            elif begin.startswith(JSON):
                self._mode = "json"
        if self._mode != "text":
            return ""
        shown, tag, self._left = split_at(self._left, (TAG,))
        self._mode = "code" if tag else "text"
        return shown

    def end(self) -> Parsed:
        if self._mode == "code":
            code, fence, rest = self._left.partition(FENCE)
            if not fence:
                return Parsed("", (), unreadable(f"it does not end with {FENCE}", self._left))
            try:
                return Parsed(rest, read_code(code))
            except CallError as error:
                return Parsed(rest, (), unreadable(str(error), code))
        if self._mode == "json" and '"name"' in self._left:
            block = _JSON_BLOCK.fullmatch(self._left)
            return read_calls([block[1] if block else self._left], "parameters", self._left)
        return Parsed(self._left)


def read_code(code: str) -> tuple[ToolCall, ...]:
    """The calls of a block. Raises CallError."""
    code = code.strip()
    if code[:1] in ("{", "["):
        value = load_json(code)
        return tuple(
            to_call(v, "parameters") for v in (value if isinstance(value, list) else [value])
        )
    if len(code) > MAX_CODE:
        raise CallError(f"it has {len(code)} characters, more than {MAX_CODE}")
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CallError(f"it is no Python ({type(error).__name__})") from None
    if not statements:
        raise CallError("it is empty")
    return tuple(_call(statement) for statement in statements)


def _call(statement: ast.stmt) -> ToolCall:
    node = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        node = node.args[0] if len(node.args) == 1 else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise CallError("it is no call name(argument=value, ...)")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise CallError("its arguments must be given by name")
    arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    return ToolCall(node.func.id, arguments)


def _literal(node: ast.expr) -> Any:
    """A value that JSON can hold."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise CallError("its arguments must be plain values") from None
    return _plain(value, MAX_DEPTH)


def _plain(value: Any, depth: int) -> Any:
    if depth == 0:
        raise CallError(f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth - 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, depth - 1) for key, item in value.items()}
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise CallError("its arguments must be plain values")
