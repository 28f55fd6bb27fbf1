"""Records cross a process unchanged, and what an environment returns is cut and checked before it does."""

import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.rewards.check import from_steps
from rl_jax.rollout import wire
from rl_jax.tokens import ROLES
from rl_jax.types import Action, EpisodeView, Message, Reward, StepResult, Task, ToolCall

TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
CALLS = st.lists(
    st.builds(ToolCall, TEXT, st.dictionaries(TEXT, TEXT, max_size=2), TEXT), max_size=2
).map(tuple)
MESSAGES = st.lists(st.builds(Message, st.sampled_from(ROLES), TEXT, CALLS), max_size=3).map(tuple)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def cross(value):
    line = wire.dumps(value)
    assert line.isascii() and line.index(b"\n") == len(line) - 1
    return wire.loads(line)


@pytest.mark.slow
@settings(deadline=None)
@given(
    MESSAGES,
    st.none() | NUMBERS,
    st.booleans(),
    st.none() | TEXT,
    st.dictionaries(TEXT, NUMBERS, max_size=3),
)
def test_step_results_cross_unchanged(messages, reward, done, key, info):
    result = StepResult(messages, reward, done, key, "other", info, new_context=not done)
    assert wire.step_from_wire(cross(wire.step_to_wire(result, 1 << 20))) == result


@settings(deadline=None)
@given(MESSAGES, TEXT, CALLS)
def test_tasks_actions_and_views_cross_unchanged(messages, text, calls):
    task = Task(text, "env", "tag", messages, {"x": [1, {"y": text}]}, "env", 3)
    assert wire.task_from_wire(cross(wire.task_to_wire(task))) == task
    action = Action(text, calls, None)
    assert wire.action_from_wire(cross(wire.action_to_wire(action))) == action
    view = EpisodeView(messages, (text,), {"a": 1.0}, (1.0, None))
    assert wire.view_from_wire(cross(wire.view_to_wire(view))) == view
    reward = Reward(1.0, {text: 2.0}, (None, 3.0), "scored", text, text)
    assert wire.reward_from_wire(cross(wire.reward_to_wire(reward))) == reward


def cut(max_bytes, *contents):
    result = StepResult(tuple(Message("user", content) for content in contents))
    out = wire.step_from_wire(cross(wire.step_to_wire(result, max_bytes)))
    return [message.content for message in out.messages], out.info


def test_text_is_cut_at_the_bytes_of_all_messages_together():
    assert cut(4, "abcd") == (["abcd"], {})
    assert cut(4, "abcdef") == (["abcd\n[cut: 2 of 6 bytes]"], {"truncated_bytes": 2.0})
    assert cut(4, "abc", "def") == (["abc", "d\n[cut: 2 of 3 bytes]"], {"truncated_bytes": 2.0})
    assert cut(4, "abcde", "f") == (
        ["abcd\n[cut: 1 of 5 bytes]", "\n[cut: 1 of 1 bytes]"],
        {"truncated_bytes": 2.0},
    )
    # A character is kept whole or not at all.
    assert cut(4, "aé€") == (["aé\n[cut: 2 of 6 bytes]"], {"truncated_bytes": 2.0})


@pytest.mark.parametrize(
    "reward, shown",
    [
        (math.nan, "nan (float)"),
        (math.inf, "inf (float)"),
        ("1.0", "'1.0' (str)"),
        (True, "True (bool)"),
        ([1.0], "a list"),
        pytest.param(10**5000, "a huge int", id="huge"),
    ],
)
def test_a_reward_that_is_no_number_arrives_as_nan_and_is_told_as_it_was_given(reward, shown):
    arrived = wire.step_from_wire(cross(wire.step_to_wire(StepResult((), reward), 10))).reward
    assert math.isnan(arrived)
    detail = from_steps([arrived]).detail
    assert detail.startswith(f"reward of step 0 is {shown}, no finite number; give StepResult a")


@pytest.mark.parametrize(
    "result, message",
    [
        (None, "returned NoneType, no StepResult"),
        (StepResult("text"), "messages must be a tuple"),
        (StepResult((Message("user", "x"),) * 257), "at most 256 Message"),
        (StepResult(("x",)), "a message or its content is str"),
        (StepResult((Message("user", None),)), "its content is NoneType"),
        (StepResult((Message("robot", "x"),)), "role is 'robot'; use one of"),
        (StepResult((), done="yes"), r"done is 'yes' \(str\), no bool"),
        (StepResult((), new_context=2), r"new_context is 2 \(int\), no bool"),
        (StepResult((), state_key="x" * 257), "state_key must be a str of at most 256 characters"),
        (StepResult((), to_agent=3), "to_agent must be a str"),
        (StepResult((), info=[1]), "info must be a mapping"),
        (StepResult((), info={"x": "y"}), r"info\['x'\] is 'y' \(str\), no finite number"),
        (StepResult((), info={1: 1.0}), "a key of info must be a str"),
        (StepResult((Message("user", "x", None),)), "tool_calls must be a tuple of ToolCall"),
        (StepResult((Message("user", "x", ("f",)),)), "tool_calls must be a tuple of ToolCall"),
        (StepResult((Message("user", "x", (ToolCall("f", [1]),)),)), "tool_calls must be a tuple"),
        (
            StepResult((Message("assistant", "x", (ToolCall("f", {"x": {1}}),)),)),
            "arguments cannot be JSON: Object of type set",
        ),
    ],
)
def test_what_is_no_step_result_is_named(result, message):
    with pytest.raises(wire.BadObservation, match=message):
        wire.step_to_wire(result, 100)


TASK = Task("train/0", "", "", (Message("user", "x"),), {"x": 1}, "env", 3)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"id": ""}, r"id is '' \(str\); use a str of 1 to 256 characters"),
        ({"id": 3}, r"id is 3 \(int\)"),
        ({"id": "x" * 257}, "use a str of 1 to 256 characters"),
        ({"max_turns": 0}, r"max_turns is 0 \(int\); use an int of at least 1"),
        ({"max_turns": -1}, r"max_turns is -1 \(int\); use an int of at least 1"),
        ({"max_turns": 2.0}, r"max_turns is 2.0 \(float\)"),
        ({"max_turns": True}, r"max_turns is True \(bool\)"),
        ({"max_turns": "3"}, r"max_turns is '3' \(str\)"),
        ({"max_turns": None}, "max_turns is None"),
        ({"payload": None}, "payload is None; use a mapping"),
        ({"payload": {"x": {1}}}, "payload cannot be JSON: Object of type set"),
        ({"payload": {"x": math.nan}}, "payload cannot be JSON: Out of range float"),
        ({"messages": None}, "messages must be a tuple of at most 256 Message"),
        ({"messages": "say x"}, "messages must be a tuple of at most 256 Message"),
        ({"messages": ("x",)}, "a message or its content is str"),
        ({"messages": (Message("robot", "x"),)}, "role is 'robot'; use one of"),
        ({"tools": None}, "tools is NoneType, no sequence"),
        ({"tools": ({"type": "function"},)}, r"tools\[0\] must be"),
    ],
)
def test_what_is_no_task_is_named(changes, message):
    with pytest.raises(wire.BadTask, match=message):
        wire.checked_task(replace(TASK, **changes))


def test_a_good_task_is_what_it_was_and_its_numbers_are_plain():
    assert wire.checked_task(TASK) == wire.task_to_wire(TASK)
    assert type(wire.checked_task(replace(TASK, max_turns=np.int64(3)))["max_turns"]) is int
    with pytest.raises(wire.BadTask, match="is None, no rl_jax.types.Task"):
        wire.checked_task(None)


def test_every_field_of_a_task_and_of_a_step_result_is_checked():
    """A new field needs a line above, or a reason here."""
    assert {f.name for f in fields(Task)} == {
        *("id", "max_turns", "payload", "messages", "tools"),
        *("env", "tag", "reward"),  # filled in by the worker
    }
    assert {f.name for f in fields(StepResult)} == {
        *("messages", "done", "state_key", "to_agent", "info", "new_context"),
        "reward",  # arrives as a NaN that tells what was given
    }


def test_json_never_holds_nan():
    with pytest.raises(ValueError):
        wire.dumps({"x": math.nan})
    assert json.loads(wire.dumps("\ud835")) == "\ud835"
