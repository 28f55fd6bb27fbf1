"""Hand-computed advantages of rewards by turn and by role, and what a role's running baseline remembers."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.algorithms.algorithm import RewardPartError
from rl_jax.testing.trajectories import fake_group
from rl_jax.types import Reward
from tests.algorithms.test_common import estimates, extras_of, make
from tests.algorithms.test_named import acting, group_of, turn_values


def playing(sample, rewards, roles, group=0, **parts):
    """An episode of one turn a reward, each of a role; its reward is the sum, of these parts."""
    member = acting(sample, rewards, ["s"] * len(rewards), group)
    reward = Reward(float(np.nansum(rewards)), parts, (), "scored", "fake")
    return replace(member, roles=tuple(roles), reward=reward)


def scored_as(member, value):
    return replace(member, reward=replace(member.reward, value=value))


def test_process_grpo_by_hand():
    """Turn rewards 1, 0 and 0, 0.5, -: mean 0.375, std 0.4787; a turn without a reward is no step."""
    a, b = acting(0, [1.0, 0.0], "st"), acting(1, [0.0, 0.5, np.nan], "stu")
    values = estimates(make("process_grpo"), [group_of([a, b])])
    z = (np.array([1.0, 0.0, 0.0, 0.5]) - 0.375) / (np.std([1.0, 0.0, 0.0, 0.5], ddof=1) + 1e-6)
    assert turn_values(values[0], a) == pytest.approx([z[0] + z[1], z[1]], abs=1e-6)
    assert turn_values(values[1], b) == pytest.approx([z[2] + z[3], z[3], 0.0], abs=1e-6)


def test_what_a_scorer_adds_is_a_step_on_the_last_turn():
    a = scored_as(acting(0, [1.0, np.nan], "st"), 3.0)
    b = scored_as(acting(1, [np.nan, np.nan], "st"), 0.0)
    values = estimates(make("process_grpo"), [group_of([a, b])])
    z = np.array([0.0, 1.0, -1.0])  # of 1, 2 and 0
    assert turn_values(values[0], a) == pytest.approx([z[0] + z[1], z[1]], abs=1e-5)
    assert turn_values(values[1], b) == pytest.approx([z[2], z[2]], abs=1e-5)


def test_a_failed_episodes_turns_are_in_nobodys_mean():
    a, b = acting(0, [1.0, 0.0], "st"), acting(1, [9.0, 9.0], "st")
    unscored = replace(b, reward=replace(b.reward, value=None, status="error"))
    algorithm = make("process_grpo")
    with_it, without = (estimates(algorithm, [group_of(m)]) for m in ([a, unscored], [a]))
    np.testing.assert_array_equal(with_it[0], without[0])
    assert without[0].any() and not with_it[1].any()


def test_roles_are_compared_with_their_like():
    """Proposers 0.2 and 0.6 over the group; solvers 1, 0, 0 and 0, 0 within their episode."""
    a = playing(0, [0.2, 1.0, 0.0, 0.0], ["ask", "solve", "solve", "solve"])
    b = playing(1, [0.6, 0.0, 0.0], ["ask", "solve", "solve"])
    values = estimates(make("role_groups", episode_roles=("solve",)), [group_of([a, b])])
    third = 1 / 3
    assert turn_values(values[0], a) == pytest.approx([-0.2, 2 * third, -third, -third], abs=1e-6)
    assert turn_values(values[1], b) == pytest.approx([0.2, 0.0, 0.0], abs=1e-6)
    values = estimates(make("role_groups"), [group_of([a, b])])  # the solver's sum of each episode
    assert turn_values(values[0], a) == pytest.approx([-0.2, 0.5, 0.5, 0.5], abs=1e-6)
    assert turn_values(values[1], b) == pytest.approx([0.2, -0.5, -0.5], abs=1e-6)


def test_episodes_without_roles_are_of_one():
    groups = [fake_group(0, [0.0, 1.0, 0.4], [8, 12, 9]), fake_group(1, [0.5], [9])]
    for got, want in zip(
        estimates(make("role_groups"), groups), estimates(make("dr_grpo"), groups)
    ):
        np.testing.assert_allclose(got, want, atol=1e-7)


def test_a_part_of_a_roles_name_is_its_reward():
    """A zero-sum game: the loser's -1 is for the scorer to give, its last turn came before the end."""
    a = playing(0, [0.0, 1.0], ["x", "o"], x=-1.0, o=1.0)
    b = playing(1, [0.0, 0.0], ["x", "o"], x=1.0, o=-1.0)
    values = estimates(make("role_groups"), [group_of([a, b])])
    assert turn_values(values[0], a) == pytest.approx([-1.0, 1.0])
    assert turn_values(values[1], b) == pytest.approx([1.0, -1.0])
    half = playing(1, [0.0, 0.0], ["x", "o"], x=1.0)
    with pytest.raises(RewardPartError, match="part of role x and none of o"):
        estimates(make("role_groups"), [group_of([a, half])])


def test_role_ema_by_hand_and_over_a_restart():
    """decay 0.5: x earns 1, then -1, o the opposite; a second batch goes on from what JSON kept of the first."""
    one = playing(0, [0.0, 0.0], ["x", "o"], x=1.0, o=-1.0)
    two = playing(1, [0.0, 0.0], ["x", "o"], x=-1.0, o=1.0)
    algorithm, group = make("role_ema", decay=0.5), group_of([two, one])  # out of order
    extras = extras_of([group])
    values, state = algorithm.advantages([group], extras, {"kl_coef": 0.1})
    assert turn_values(values[1], one) == pytest.approx([1.0, -1.0])  # b is 0 before the first
    assert turn_values(values[0], two) == pytest.approx([-1.5, 1.5])
    assert state == {"kl_coef": 0.1, "role_baselines": {"fake/x": -0.25, "fake/o": 0.25}}
    kept = json.loads(json.dumps(state))
    values, _ = make("role_ema", decay=0.5).advantages([group_of([one])], extras_of([group]), kept)
    assert turn_values(values[0], one) == pytest.approx([1.25, -1.25])


def test_bounds_and_weights_of_advantages_by_hand():
    group = fake_group(0, [3.0, 0.0, 0.0], [8, 8, 8])  # 2, -1, -1
    for given, want in (
        ({"advantage_clip": 1.5}, [1.5, -1.0, -1.0]),
        ({"positive_weight": 0.5}, [1.0, -1.0, -1.0]),
        ({"negative_weight": 0.0}, [2.0, 0.0, 0.0]),
        (
            {"advantage_clip": 0.5, "positive_weight": 3.0, "negative_weight": 2.0},
            [1.5, -1.0, -1.0],
        ),
    ):
        values = estimates(make("dr_grpo", **given), [group])
        got = [v[m.loss_mask].mean() for v, m in zip(values, group.trajectories)]
        assert got == pytest.approx(want), given
