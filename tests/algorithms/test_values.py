"""Hand-computed values and identities of the shipped algorithms."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms.advantages import is_scored
from rl_jax.algorithms.aggregate import AGGREGATIONS, sequence_weights, token_weights
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.cispo import Cispo
from rl_jax.algorithms.dr_grpo import DrGrpo
from rl_jax.algorithms.group_advantages import (
    best_of_group,
    group_normalised,
    leave_one_out,
    length_weighted,
    max_likelihood,
    multi_reward,
)
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.rloo import Rloo
from rl_jax.algorithms.sft import Sft
from rl_jax.algorithms.token_advantages import whiten
from rl_jax.algorithms.token_losses import ppo_clip
from rl_jax.settings import AlgorithmSettings
from rl_jax.testing.trajectories import fake_group, fake_trajectory
from rl_jax.types import Outcome, Reward

SETTINGS = AlgorithmSettings()


def sequence_values(algorithm, rewards):
    group = fake_group(0, rewards, [8] * len(rewards))
    values, _ = algorithm.advantages([group], {}, None)
    return [float(v[member.loss_mask][0]) for v, member in zip(values, group.trajectories)]


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (Grpo, [1.0, -1.0, 0.0]),  # std with ddof 1 of 1, 0, 0.5 is 0.5
        (DrGrpo, [0.5, -0.5, 0.0]),
        (Rloo, [0.75, -0.75, 0.0]),
        (Sft, [1.0, 1.0, 1.0]),
    ],
)
def test_advantages_by_hand(make, want):
    assert sequence_values(make(SETTINGS), [1.0, 0.0, 0.5]) == pytest.approx(want, abs=3e-6)


def test_two_tokens_two_sequences_by_hand():
    """The worked example: ratios 1.34986 (clipped at 1.28), 1, 0.60653 (clipped at 0.8), 1.22140."""
    logprobs = jnp.float32([[-1.0, -0.5], [-2.0, -0.7]])
    old = jnp.float32([[-1.3, -0.5], [-1.5, -0.9]])
    advantages = jnp.float32([[1.0, 1.0], [-1.0, -1.0]])
    mask = jnp.ones((2, 2), bool)

    def mean_loss(logprobs):
        loss, _, _ = ppo_clip(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.28)
        return loss.mean()

    loss, gradient = jax.value_and_grad(mean_loss)(logprobs)
    assert loss == pytest.approx(-0.06465, abs=1e-5)
    np.testing.assert_allclose(gradient, [[0.0, -0.25], [0.0, 0.30535]], atol=1e-5)


def test_rloo_is_dr_grpo_times_n_over_n_minus_one():
    rng = np.random.default_rng(0)
    groups = np.repeat([5, -2, 9], [2, 5, 3])
    rewards = rng.normal(size=10)
    centred = group_normalised(rewards, groups, std_scope="none")
    sizes = np.array([2] * 2 + [5] * 5 + [3] * 3)
    np.testing.assert_allclose(leave_one_out(rewards, groups), centred * sizes / (sizes - 1))
    for group in np.unique(groups):
        assert abs(centred[groups == group].sum()) < 1e-12
        assert abs(group_normalised(rewards, groups)[groups == group].sum()) < 1e-12


def test_grpo_does_not_see_scale_and_offset_of_rewards():
    rewards, groups = np.random.default_rng(1).normal(size=8), np.repeat([0, 1], 4)
    plain = group_normalised(rewards, groups, eps=0.0)
    np.testing.assert_allclose(group_normalised(7 * rewards - 3, groups, eps=0.0), plain)


@pytest.mark.parametrize("value", [0.1, 12.3, 103.7, 0.7, 714285.7142857143])
def test_equal_rewards_have_advantage_exactly_zero(value):
    """L16: decided by max == min; a float mean of equal numbers need not equal them, as it does in groups of 2^n."""
    sizes = (3, 6, 7, 8, 11, 13)
    rewards, groups = np.full(sum(sizes), value), np.repeat(np.arange(len(sizes)), sizes)
    assert any(np.full(n, value).mean() != value for n in sizes), "nothing here would tell"
    others = (
        lambda r, g: length_weighted(r, g, np.arange(len(r)) % 5 + 1),
        lambda r, g: multi_reward(r[:, None], g),
    )
    for estimate in (group_normalised, leave_one_out, max_likelihood, best_of_group, *others):
        assert not estimate(rewards, groups).any()
    for scope in ("batch", "none"):
        assert not group_normalised(rewards, groups, std_scope=scope).any()
    tokens = rewards[:, None] * np.ones(2)
    assert not whiten(tokens, np.ones(tokens.shape, bool)).any()


def test_group_of_one_has_advantage_zero():
    for estimate in (group_normalised, leave_one_out):
        assert estimate([0.7], [9]) == [0.0]


def test_on_policy_gradient_is_plain_reinforce():
    x = LossInputs(
        logprobs=jnp.float32([[-1.0, -2.0]]),
        entropy=jnp.zeros((1, 2), jnp.float32),
        behaviour_logprobs=jnp.float32([[-1.0, -2.0]]),
        advantages=jnp.float32([[0.7, -1.3]]),
        mask=jnp.ones((1, 2), bool),
        segment_ids=jnp.ones((1, 2), jnp.int32),
        turn_ids=jnp.zeros((1, 2), jnp.int32),
    )

    def total(logprobs):
        return Grpo(SETTINGS).token_loss(replace(x, logprobs=logprobs))[0].sum()

    np.testing.assert_array_equal(jax.grad(total)(x.logprobs), -x.advantages)


@pytest.mark.parametrize(
    ("made", "low", "high"),
    [
        (Grpo(AlgorithmSettings(clip_low=0.2, clip_high=0.2)), 2, 2),
        (Cispo(AlgorithmSettings(name="cispo", ratio_min=0.5, ratio_max=2.0)), 3, 4),
    ],
)
def test_clipped_tokens_are_counted_by_the_bound_that_holds_them(made, low, high):
    ratios = [0.1, 0.1, 0.1, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0]  # of the last, nothing is trained
    x = LossInputs(
        logprobs=jnp.log(jnp.float32([ratios])) - 2.0,
        entropy=jnp.zeros((1, 9), jnp.float32),
        behaviour_logprobs=jnp.full((1, 9), -2.0, jnp.float32),
        # PPO holds a ratio below only where the advantage is negative, and one above where it is positive
        advantages=jnp.float32([[-1.0, -2.0, 1.0, 1.0, 1.0, 2.0, -1.0, -1.0, 1.0]]),
        mask=jnp.array([[True] * 8 + [False]]),
        segment_ids=jnp.ones((1, 9), jnp.int32),
        turn_ids=jnp.zeros((1, 9), jnp.int32),
    )
    sums = made.token_loss(x)[1]
    found = [tuple(map(float, sums[f"policy/clip_frac{side}"])) for side in ("_low", "_high", "")]
    assert found == [(low, 8), (high, 8), (low + high, 8)]


def test_the_entropy_bonus_has_its_coefficient():
    x = LossInputs(
        logprobs=jnp.zeros((1, 2), jnp.float32),
        entropy=jnp.float32([[2.0, 9.0]]),
        behaviour_logprobs=jnp.zeros((1, 2), jnp.float32),
        advantages=jnp.zeros((1, 2), jnp.float32),
        mask=jnp.array([[True, False]]),
        segment_ids=jnp.array([[1, 0]]),
        turn_ids=jnp.zeros((1, 2), jnp.int32),
    )
    loss, _ = Grpo(AlgorithmSettings(entropy_coef=0.01)).token_loss(x)
    np.testing.assert_allclose(loss, [[-0.02, 0.0]], rtol=1e-6)


def test_recomputed_logprobs_take_the_place_of_the_behaviour_policy():
    ones = jnp.ones((1, 1))
    x = LossInputs(
        logprobs=ones * -1, entropy=ones, behaviour_logprobs=ones * -3, advantages=ones,
        mask=ones > 0, segment_ids=jnp.ones((1, 1), int), turn_ids=jnp.zeros((1, 1), int),
        old_logprobs=ones * -1,
    )  # fmt: skip
    recomputed = AlgorithmSettings(old_policy="recompute")
    assert Grpo(recomputed).token_loss(x)[0][0, 0] == -1.0
    assert Grpo(SETTINGS).token_loss(x)[0][0, 0] == pytest.approx(-1.28)
    with pytest.raises(ValueError, match="needs old_logprobs"):
        Grpo(recomputed).token_loss(replace(x, old_logprobs=None))


def test_zero_is_a_reward_and_a_missing_one_is_not():
    """L17: 0.0, -0.0, missing and not-a-number each have their own path."""
    assert is_scored(fake_trajectory(reward=0.0)) and is_scored(fake_trajectory(reward=-0.0))
    assert not is_scored(fake_trajectory(reward=None))
    for value in (None, float("nan"), float("inf")):
        liar = replace(fake_trajectory(), reward=Reward(value, {}, (), "scored", "x"))
        with pytest.raises(ValueError, match=r"r/0/0/0: reward\.status is scored"):
            is_scored(liar)
    assert sequence_values(Grpo(SETTINGS), [0.0, 1.0, None])[2] == 0.0


def test_overlong_filter_drops_the_tokens_and_keeps_the_reward():
    cut = fake_trajectory(reward=0.0, outcome=Outcome.TRUNCATED)
    for make in (Grpo, DrGrpo, Rloo):
        assert make(SETTINGS).trains(cut)
        assert not make(replace(SETTINGS, overlong_filter=True)).trains(cut)
        assert is_scored(cut)


def test_nothing_trained_weighs_nothing():
    for aggregation in AGGREGATIONS:
        assert not token_weights(np.zeros((3, 4)), aggregation, norm_length=8).any()


def test_unknown_names_and_missing_constants_are_refused():
    with pytest.raises(ValueError, match="aggregation='mean' is unknown"):
        sequence_weights(np.array([1]), np.array([0]), "mean")
    with pytest.raises(ValueError, match="max_response_tokens > 0"):
        sequence_weights(np.array([1]), np.array([0]), "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="std_scope"):
        group_normalised([1.0], [0], std_scope="global")
    with pytest.raises(ValueError, match="differ in length"):
        group_normalised([1.0, 2.0], [0])
