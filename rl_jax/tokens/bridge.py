"""Whether turns put behind each other are what the format shows of the whole conversation: the bridge.

An episode's context grows by suffixes (Renderer.next). A chat template may show another history once there is more to
say; what is trained on is then another context than the template would give. `is_rewritten` asks, turn by turn, as
rollout.history=template does; `talk_of` makes a conversation of a task's own kind to ask it of.
Must not: keep anything, or know an environment.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_jax.tokens.renderer import Renderer, Tools
from rl_jax.types import Message, ToolCall

THOUGHT = "<think>\nLet me see.\n</think>\n"
WORDS = "Let me try this."
NUM_TURNS = 3  # what only earlier turns lose is lost by then
EXAMPLES: Mapping[str, Any] = {
    "string": "1", "integer": 1, "number": 1, "boolean": True, "array": [], "object": {}
}  # fmt: skip


def is_rewritten(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Tools = (),
    turns: Sequence[np.ndarray] = (),
) -> bool:
    """Whether the format shows, before some turn of a conversation, another context than was seen till then.

    messages: at least one before the first of the assistant's; a turn at their end has nothing behind it.
    turns: tokens of the assistant's messages; () = as a policy would have sampled their words.
    Raises: ValueError as Renderer.first.
    """
    said = [i for i, message in enumerate(messages) if message.role == "assistant"]
    told = list(messages[: said[0]]) if said else list(messages)
    seen, sampled = [renderer.first(told, tools)], []
    for i, after in zip(said, [*said[1:], len(messages)]):
        if i + 1 == len(messages):
            break
        tokens = turns[len(sampled)] if turns else renderer.said(messages[i])
        calls, answers = renderer.parse(tokens, tools).tool_calls, messages[i + 1 : after]
        seen += [tokens, renderer.next(answers, closed=renderer.is_closed(tokens), calls=calls)]
        sampled.append(tokens)
        told += [Message("assistant", renderer.text(tokens)), *answers]
        if renderer.rewritten(told, sampled, np.concatenate(seen), tools) is not None:
            return True
    return False


def talk_of(first: Sequence[Message], tools: Tools = (), thought: str = "") -> list[Message]:
    """A conversation that begins with a task's first messages: turns that call its first tool and get its answers, or,
    without tools, words that a user answers. thought: what stands before the words of each turn."""
    calls = (_call(tools[0]),) if tools else ()
    answer = Message("tool", "1") if tools else Message("user", "Go on.")
    words = "" if tools else f"\n{WORDS}" if thought else WORDS
    turn = Message("assistant", thought + words, calls)
    return [*first, *[turn, answer] * NUM_TURNS]


def _call(tool: Mapping[str, Any]) -> ToolCall:
    """One that its schema takes."""
    function = tool.get("function", tool)
    parameters = function.get("parameters") or {}
    of = parameters.get("properties") or {}
    return ToolCall(
        function["name"],
        {name: _example(of.get(name) or {}) for name in parameters.get("required") or ()},
    )


def _example(of: Mapping[str, Any]) -> Any:
    values, kind = of.get("enum"), of.get("type")
    return values[0] if values else EXAMPLES.get(kind if isinstance(kind, str) else "string", "1")
