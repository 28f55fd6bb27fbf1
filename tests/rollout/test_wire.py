"""Records cross a process unchanged, and what an environment returns is cut and checked before it does."""

import json
import math

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


@settings(deadline=None)
@given(
    MESSAGES,
    st.none() | NUMBERS,
    st.booleans(),
    st.none() | TEXT,
    st.dictionaries(TEXT, NUMBERS, max_size=3),
)
def test_step_results_cross_unchanged(messages, reward, done, key, info):
    result = StepResult(messages, reward, done, key, "other", info)
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
    assert from_steps([arrived]).detail == f"reward of step 0 is {shown}, no finite number"


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
        (StepResult((), state_key="x" * 257), "state_key must be a str of at most 256 characters"),
        (StepResult((), to_agent=3), "to_agent must be a str"),
        (StepResult((), info=[1]), "info must be a mapping"),
        (StepResult((), info={"x": "y"}), r"info\['x'\] is 'y' \(str\), no finite number"),
        (StepResult((), info={1: 1.0}), "a key of info must be a str"),
    ],
)
def test_what_is_no_step_result_is_named(result, message):
    with pytest.raises(wire.BadObservation, match=message):
        wire.step_to_wire(result, 100)


def test_json_never_holds_nan():
    with pytest.raises(ValueError):
        wire.dumps({"x": math.nan})
    assert json.loads(wire.dumps("\ud835")) == "\ud835"
