"""Each thing that can be said instead of a reward takes its own documented path (and zero is a reward)."""

import math

import numpy as np
import pytest

from rl_jax.rewards.check import checked, failed, finite, from_steps
from rl_jax.types import Reward


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1, -3.5, np.float32(0.5), np.float64(2.0), np.int64(7)]
)
def test_finite_numbers_are_rewards(value):
    assert finite(value) == value and type(finite(value)) is float
    assert math.copysign(1, finite(value)) == math.copysign(1, value)


@pytest.mark.parametrize(
    "value", [None, math.nan, math.inf, -math.inf, 10**400, "1.0", True, np.bool_(1), [1.0], b"1"]
)
def test_everything_else_is_none(value):
    assert finite(value) is None


def scored(value, parts=None, turn_values=()):
    return Reward(value, parts or {}, turn_values, "scored", "v1")


def test_checked_rewards_are_plain_floats():
    reward = checked(scored(np.float32(1), {"a": 1}, (None, np.float64(2))))
    assert reward == Reward(1.0, {"a": 1.0}, (None, 2.0), "scored", "v1")


@pytest.mark.parametrize(
    "reward, detail",
    [
        (None, "the scorer gave None, no Reward"),
        (1.0, "the scorer gave 1.0 (float), no Reward"),
        (scored(None), "value is None, no finite number"),
        (scored("1.0"), "value is '1.0' (str), no finite number"),
        (scored(1.0, {"a": math.nan}), "part 'a' is nan (float), no finite number"),
        (scored(1.0, turn_values=(0.0, math.inf)), "turn 1 is inf (float), no finite number"),
        (Reward(1.0, {}, (), "error", "v1"), "status 'error' with value 1.0 (float)"),
        (Reward(None, {}, (), "fine", "v1"), "status 'fine' with value None"),
    ],
)
def test_what_is_no_reward_has_a_status_and_no_value(reward, detail):
    result = checked(reward)
    assert (result.status, result.value, result.detail) == ("schema", None, detail)


def test_a_failure_passes_unchanged():
    assert checked(failed("timeout", "late", "v1")) == failed("timeout", "late", "v1")


def test_environment_reward_is_the_sum_of_its_steps():
    assert from_steps([0.0, 0.0, 1.0]) == Reward(
        1.0, {"env": 1.0}, (0.0, 0.0, 1.0), "scored", "env"
    )
    assert from_steps([0.0]).value == 0.0 and from_steps([-0.0]).status == "scored"


@pytest.mark.parametrize(
    "bad, shown",
    [
        (None, "None"),
        (math.inf, "inf (float)"),
        (True, "True (bool)"),
        ([1.0], "a list"),
        pytest.param(10**5000, "a huge int", id="huge"),
    ],
)
def test_one_step_without_a_number_makes_the_episode_unscored(bad, shown):
    reward = from_steps([1.0, bad, 1.0])
    assert (reward.status, reward.value, reward.parts) == ("schema", None, {})
    assert reward.detail.startswith(f"reward of step 1 is {shown}, no finite number; give StepRes")
    assert from_steps([]).status == "schema"
