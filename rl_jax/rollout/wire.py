"""Records <-> JSON lines between the driver's process and its environment and scorer workers.

Owns: the encoding (stdlib json, ASCII only, no NaN), and the checks on what an environment returns: they run in the
worker, where a 50 MB observation is cut before it is sent.

Invariants: a line is ASCII and ends with its only newline, whatever text it carries; lone surrogates pass as escapes
and arrive unchanged. A step reward that is no finite number arrives as a NaN that tells what
the environment gave (rewards.check.NoReward, which that module then calls "schema").

Must not: touch a process or a pipe.
"""

import inspect
import json
import numbers
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rl_jax.rewards.check import NoReward, finite, show
from rl_jax.tokens import ROLES
from rl_jax.tokens.tool_calls import check_tools
from rl_jax.types import Action, EpisodeView, Message, Reward, StepResult, Task, ToolCall

MAX_MESSAGES = 256  # of one step result
MAX_INFO = 64  # numbers in one step result's info
MAX_KEY = 256  # characters of a state key, an agent's or an info's name


class BadTask(ValueError):
    """What an environment's tasks() gave is no Task that can be played."""


class BadObservation(ValueError):
    """What an environment returned is no StepResult, or no message, that can be passed on."""


def dumps(value: Any) -> bytes:
    """One line. Raises TypeError or ValueError for what JSON cannot hold (NaN included)."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def loads(line: bytes) -> Any:
    return json.loads(line)


# --- from and to the worker ---------------------------------------------------------------------------------------


def task_to_wire(task: Task) -> dict[str, Any]:
    out = {field.name: getattr(task, field.name) for field in fields(Task)}
    return out | {
        "messages": [message_to_wire(m) for m in task.messages],
        "payload": dict(task.payload),
    }


def checked_task(task: Any) -> dict[str, Any]:
    """As task_to_wire, of what tasks() gave; env, tag and reward are not looked at, as the worker fills them in.

    Raises: BadTask naming the field, the value and what may stand there.
    """
    if not isinstance(task, Task):
        raise BadTask(f"is {show(task)}, no rl_jax.types.Task")
    if not isinstance(task.id, str) or not 0 < len(task.id) <= MAX_KEY:
        raise BadTask(f"id is {show(task.id)}; use a str of 1 to {MAX_KEY} characters")
    turns = task.max_turns
    if isinstance(turns, bool) or not isinstance(turns, numbers.Integral) or turns < 1:
        raise BadTask(f"max_turns is {show(turns)}; use an int of at least 1")
    if not isinstance(task.payload, Mapping):
        raise BadTask(f"payload is {show(task.payload)}; use a mapping")
    try:
        messages = _checked_messages(task.messages)
        check_tools(task.tools)
    except ValueError as error:
        raise BadTask(str(error)) from None
    out = {field.name: getattr(task, field.name) for field in fields(Task)}
    out |= {"messages": messages, "payload": dict(task.payload), "max_turns": int(turns)}
    for name in ("payload", "tools"):
        try:
            dumps(out[name])
        except (TypeError, ValueError) as error:
            raise BadTask(f"{name} cannot be JSON: {error}; use plain values") from None
    return out


def task_from_wire(wire: Mapping[str, Any]) -> Task:
    fields_of = dict(wire)
    fields_of["messages"] = tuple(message_from_wire(m) for m in wire["messages"])
    fields_of["tools"] = tuple(wire["tools"])
    return Task(**fields_of)


def message_to_wire(message: Message) -> list[Any]:
    if not message.tool_calls:
        return [message.role, message.content]
    return [message.role, message.content, _calls_to_wire(message.tool_calls)]


def message_from_wire(wire: list[Any]) -> Message:
    return Message(wire[0], wire[1], _calls_from_wire(wire[2]) if len(wire) > 2 else ())


def action_to_wire(action: Action) -> list[Any]:
    return [action.text, _calls_to_wire(action.tool_calls), action.parse_error]


def action_from_wire(wire: list[Any]) -> Action:
    return Action(wire[0], _calls_from_wire(wire[1]), wire[2])


def view_to_wire(view: EpisodeView) -> dict[str, Any]:
    # A step without a finite reward is None to a scorer, whether the environment said None or NaN.
    rewards = [None if step is None else finite(step) for step in view.step_rewards]
    return {
        "messages": [message_to_wire(m) for m in view.messages],
        "turn_texts": list(view.turn_texts),
        "info": dict(view.info),
        "step_rewards": rewards,
    }


def view_from_wire(wire: Mapping[str, Any]) -> EpisodeView:
    messages = tuple(message_from_wire(m) for m in wire["messages"])
    return EpisodeView(
        messages, tuple(wire["turn_texts"]), wire["info"], tuple(wire["step_rewards"])
    )


def reward_to_wire(reward: Reward) -> list[Any]:
    """Of a reward that went through rewards.check.checked."""
    return [
        reward.value,
        dict(reward.parts),
        list(reward.turn_values),
        reward.status,
        reward.scorer_version,
        reward.detail,
    ]


def reward_from_wire(wire: list[Any]) -> Reward:
    value, parts, turn_values, status, version, detail = wire
    return Reward(value, parts, tuple(turn_values), status, version, detail)


def step_to_wire(result: Any, max_obs_bytes: int) -> dict[str, Any]:
    """What reset() or step() returned, checked and cut; defaults are left out.

    Text beyond max_obs_bytes (UTF-8, all messages together) is cut, a marker says how much, and
    info["truncated_bytes"] counts it.
    Raises: BadObservation naming the field.
    """
    if inspect.iscoroutine(result):
        result.close()
        raise BadObservation(
            "is async; write def: an environment may block, its worker is a process"
        )
    if not isinstance(result, StepResult):
        raise BadObservation(f"returned {type(result).__name__}, no StepResult")
    messages, cut_bytes = _cut(_checked_messages(result.messages), max_obs_bytes)
    wire: dict[str, Any] = {"m": messages}
    if result.reward is not None:
        reward = finite(result.reward)
        wire["r"] = show(result.reward) if reward is None else reward
    if result.done not in (True, False):
        raise BadObservation(f"done is {show(result.done)}, no bool")
    if result.done:
        wire["d"] = 1
    if result.state_key is not None:
        wire["k"] = _name(result.state_key, "state_key")
    if result.to_agent != "policy":
        wire["a"] = _name(result.to_agent, "to_agent")
    if result.new_context not in (True, False):
        raise BadObservation(f"new_context is {show(result.new_context)}, no bool")
    if result.new_context:
        wire["n"] = 1
    info = _info_to_wire(result.info)
    if cut_bytes:
        info["truncated_bytes"] = float(cut_bytes)
    if info:
        wire["i"] = info
    return wire


def step_from_wire(wire: Mapping[str, Any]) -> StepResult:
    reward = wire.get("r")
    return StepResult(
        messages=tuple([message_from_wire(m) for m in wire["m"]]),
        reward=NoReward(reward) if isinstance(reward, str) else reward,
        done=bool(wire.get("d")),
        state_key=wire.get("k"),
        to_agent=wire.get("a", "policy"),
        new_context=bool(wire.get("n")),
        info=wire.get("i", {}),
    )


# --- checks ---------------------------------------------------------------------------------------------------------


def checked_message(message: Any) -> list[Any]:
    """As message_to_wire, of what an environment said. Raises BadObservation."""
    if not isinstance(message, Message) or not isinstance(message.content, str):
        what = type(message.content if isinstance(message, Message) else message).__name__
        raise BadObservation(f"a message or its content is {what}; content must be str")
    if message.role not in ROLES:
        raise BadObservation(
            f"a message's role is {message.role!r:.80}; use one of {', '.join(ROLES)}"
        )
    if isinstance(message.tool_calls, tuple | list) and not message.tool_calls:
        return [message.role, message.content]
    return [message.role, message.content, _checked_calls(message.tool_calls)]


def _checked_messages(messages: Any) -> list[list[Any]]:
    if not isinstance(messages, tuple | list) or len(messages) > MAX_MESSAGES:
        raise BadObservation(f"messages must be a tuple of at most {MAX_MESSAGES} Message")
    return [checked_message(message) for message in messages]


def _checked_calls(calls: Any) -> list[list[Any]]:
    is_plain = isinstance(calls, tuple | list) and all(
        isinstance(call, ToolCall)
        and isinstance(call.name, str)
        and isinstance(call.arguments, Mapping)
        and isinstance(call.id, str)
        for call in calls
    )
    if not is_plain:
        raise BadObservation(
            "a message's tool_calls must be a tuple of ToolCall(name: str, arguments: mapping, id: str)"
        )
    wire = _calls_to_wire(tuple(calls))
    try:
        dumps(wire)
    except (TypeError, ValueError) as error:
        raise BadObservation(
            f"a tool call's arguments cannot be JSON: {error}; use plain values"
        ) from None
    return wire


def _cut(messages: list[list[Any]], max_obs_bytes: int) -> tuple[list[list[Any]], int]:
    """(messages, bytes cut off)."""
    out, room, cut_bytes = [], max_obs_bytes, 0
    for role, content, *calls in messages:
        raw = None if content.isascii() else content.encode("utf-8", "surrogatepass")
        size = len(content) if raw is None else len(raw)
        if size > room:
            kept = content[:room] if raw is None else raw[:room].decode("utf-8", "ignore")
            content = f"{kept}\n[cut: {size - room} of {size} bytes]"
            cut_bytes += size - room
        room = max(room - size, 0)
        out.append([role, content, *calls])
    return out, cut_bytes


def _info_to_wire(info: Any) -> dict[str, float]:
    if not isinstance(info, Mapping) or len(info) > MAX_INFO:
        raise BadObservation(f"info must be a mapping of at most {MAX_INFO} numbers")
    out = {}
    for name, value in info.items():
        number = float(value) if isinstance(value, bool) else finite(value)
        if number is None:
            raise BadObservation(f"info[{name!r:.80}] is {show(value)}, no finite number")
        out[_name(name, "a key of info")] = number
    return out


def _name(value: Any, what: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_KEY:
        raise BadObservation(
            f"{what} must be a str of at most {MAX_KEY} characters, is {value!r:.80}"
        )
    return value


def _calls_to_wire(calls: tuple[ToolCall, ...]) -> list[list[Any]]:
    return [[call.name, dict(call.arguments), call.id] for call in calls]


def _calls_from_wire(wire: list[list[Any]]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(name, arguments, call_id) for name, arguments, call_id in wire)
