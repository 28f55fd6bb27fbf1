"""Hand-computed values of named algorithms whose advantages differ by token or come in pairs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms.preference import Side, pair_loss
from rl_jax.algorithms.token_advantages import gae, whiten
from rl_jax.learner.batch import pack, with_advantages
from rl_jax.settings import LearnerSettings
from rl_jax.testing.trajectories import fake_group, fake_trajectory
from rl_jax.types import Outcome
from tests.algorithms.test_common import estimates, extras_of, make, some_groups, some_inputs


def acting(sample, rewards, states, group=0):
    """A trajectory of one turn a reward (two tokens each), whose episode reward is their sum."""
    length = 3 + 4 * len(rewards)
    base = fake_trajectory(group, sample, length, float(np.nansum(rewards)))
    assert len(base.state_keys) == len(rewards)
    return replace(base, turn_rewards=np.array(rewards, np.float32), state_keys=tuple(states))


def turn_values(values, member):
    """The one advantage of each turn."""
    out = []
    for turn in range(int(member.turn_ids.max()) + 1):
        own = values[(member.turn_ids == turn) & member.loss_mask]
        assert len(set(own.tolist())) == 1
        out.append(float(own[0]))
    return out


def group_of(members):
    return replace(fake_group(0, [0.0], [8]), trajectories=tuple(members))


def test_gigpo_by_hand():
    """Two episodes of two steps: a 0, 1 and b 0.2, 0; returns at gamma 0.9: 0.9, 1.0 and 0.2, 0."""
    a, b = acting(0, [0.0, 1.0], ["s", "u"]), acting(1, [0.2, 0.0], ["s", "u"])
    values = estimates(make("gigpo", gamma=0.9, omega=0.5, std_eps=1e-6), [group_of([a, b])])
    half = np.sqrt(0.5)  # of two members, GRPO's advantages are +-sqrt(1/2)
    assert turn_values(values[0], a) == pytest.approx([1.5 * half, 1.5 * half], abs=1e-5)
    assert turn_values(values[1], b) == pytest.approx([-1.5 * half, -1.5 * half], abs=1e-5)
    alone = replace(b, state_keys=("x", "y"))  # states met once: the episode's term only
    values = estimates(make("gigpo", gamma=0.9, omega=0.5), [group_of([a, alone])])
    assert turn_values(values[0], a) == pytest.approx([half, half], abs=1e-5)


def test_turn_reinforce_by_hand():
    """Returns 1 + 0.5 * 2 = 2, 2 and 0, 0; each turn is compared with the same turn of the other episode."""
    a, b = acting(0, [1.0, 2.0], ["s", "t"]), acting(1, [0.0, 0.0], ["s", "t"])
    c = acting(2, [0.0, 0.0, 5.0], ["s", "t", "u"])  # its third turn has nobody to compare with
    values = estimates(make("turn_reinforce", gamma=0.5), [group_of([a, b])])
    half = np.sqrt(0.5)
    assert turn_values(values[0], a) == pytest.approx([half, half], abs=1e-5)
    values = estimates(make("turn_reinforce", gamma=0.5), [group_of([a, b, c])])
    assert turn_values(values[2], c)[2] == 0.0


def test_a_scorers_reward_stands_on_the_last_turn():
    a = replace(acting(0, [np.nan, np.nan], ["s", "t"]), reward=fake_trajectory(reward=1.0).reward)
    b = acting(1, [np.nan, np.nan], ["s", "t"])
    values = estimates(make("turn_reinforce", gamma=1.0), [group_of([a, b])])
    assert turn_values(values[0], a) == pytest.approx([np.sqrt(0.5)] * 2, abs=1e-5)


def test_ppo_whitens_over_the_tokens_that_train():
    groups = some_groups()
    members = [t for group in groups for t in group.trajectories]
    algorithm = make("ppo", gamma=0.9, lam=0.8)
    values = estimates(algorithm, groups)
    width = max(len(t.tokens) for t in members)
    mask = np.array(
        [np.pad(t.loss_mask & algorithm.trains(t), (0, width - len(t.tokens))) for t in members]
    )
    critic = [np.pad(v, (0, width - len(v))) for v in extras_of(groups)["values"]]
    rewards = np.zeros(mask.shape)
    for i, t in enumerate(members):
        if mask[i].any():
            rewards[i, np.flatnonzero(mask[i])[-1]] = t.reward.value
    want = whiten(gae(rewards, np.array(critic), mask, gamma=0.9, lam=0.8)[0], mask)
    for row, value in zip(want, values):
        np.testing.assert_allclose(value, row[: len(value)], atol=1e-6)


@pytest.mark.parametrize("width", [0, 1, 50])
def test_credit_passes_over_observations_of_any_length(width):
    """L15: three turns of one token, by hand. PPO: A = 0.4, 0.14 + 0.72 * 0.4, 0.16 + 0.72 * 0.428."""
    length = 3 + 2 * width + 3
    turns = [3 + turn * (1 + width) for turn in range(3)]
    base = fake_trajectory(0, 0, length, 1.0)
    mask, turn_ids = np.zeros(length, bool), np.full(length, -1, np.int16)
    mask[turns], turn_ids[turns] = True, (0, 1, 2)
    member = replace(base, loss_mask=mask, turn_ids=turn_ids)
    critic = np.full(length, 7.0)  # what it says of observations is read nowhere
    critic[turns] = 0.2, 0.4, 0.6
    ppo, want = make("ppo", gamma=0.9, lam=0.8), np.array([0.46816, 0.428, 0.4])
    groups, extras = [group_of([member])], {"values": [critic]}
    (returns,), (advantages,) = (
        ppo.targets(groups, extras, None),
        ppo.advantages(groups, extras, None)[0],
    )
    np.testing.assert_allclose(returns[turns], want + [0.2, 0.4, 0.6], atol=1e-6)
    np.testing.assert_allclose(
        advantages[turns], (want - want.mean()) / want.std(ddof=1), atol=1e-4
    )
    (plain,), want = (
        make("reinforce_pp", gamma=0.9).advantages(groups, {}, None)[0],
        np.array([0.81, 0.9, 1.0]),
    )
    np.testing.assert_allclose(plain[turns], (want - want.mean()) / want.std(ddof=1), atol=1e-4)
    assert not returns[~mask].any() and not advantages[~mask].any() and not plain[~mask].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_has_the_gradient_of_its_pairs(kind):
    """Through packing and loss weights: sum(weights * -A log p) pulls each token as the mean pair loss does."""
    groups = [
        fake_group(0, [1.0, 0.0], [9, 13]),
        fake_group(1, [0.2, 0.9, 0.5], [8, 15, 11]),  # the middle one is in no pair
        fake_group(2, [0.5, 0.5], [8, 8]),  # no pair
    ]
    algorithm = make("dpo", preference=kind, beta=0.3, label_smoothing=0.1 * (kind == "sigmoid"))
    groups, dropped = algorithm.select(groups)
    assert dropped == [("r/0/2", "no_pair")]
    batch = pack(groups, LearnerSettings(row_tokens=32))
    extras = {n: batch.place(a, np.float32) for n, a in extras_of(groups).items()}
    batch, _ = with_advantages(batch, groups, extras, algorithm, None, algorithm.settings)
    members = [t for group in groups for t in group.trajectories]
    got = batch.gather(-batch.advantages * batch.loss_weights, len(members))

    chosen, rejected = [members[0], members[3]], [members[1], members[2]]
    of = dict(zip([t.uid for t in members], range(len(members))))

    def side(trajectories, name):
        return np.array(
            [
                np.pad(extras_of(groups)[name][of[t.uid]], (0, 16 - len(t.tokens)))
                for t in trajectories
            ]
        )

    masks = [
        np.array([np.pad(t.loss_mask, (0, 16 - len(t.tokens))) for t in ts])
        for ts in (chosen, rejected)
    ]

    def mean(up, down):
        sides = [
            Side(p, side(ts, "reference_logprobs"), m)
            for p, ts, m in zip((up, down), (chosen, rejected), masks)
        ]
        return pair_loss(
            *sides, beta=0.3, kind=kind, label_smoothing=algorithm.settings.label_smoothing
        ).loss.mean()

    grads = jax.grad(mean, argnums=(0, 1))(
        side(chosen, "old_logprobs"), side(rejected, "old_logprobs")
    )
    for trajectories, grad in zip((chosen, rejected), grads):
        for t, row in zip(trajectories, grad):
            np.testing.assert_allclose(got[of[t.uid]], row[: len(t.tokens)], atol=1e-6)
    assert not got[4].any()


def test_bootstrap_goes_on_from_the_last_value_where_a_limit_cut_the_episode():
    group = fake_group(0, [1.0, 1.0], [6, 6])
    cut = replace(group.trajectories[1], outcome=Outcome.TRUNCATED, truncated_by="length")
    groups = [replace(group, trajectories=(group.trajectories[0], cut))]
    extras = extras_of(groups)
    extras["values"] = [np.where(t.loss_mask, 0.5, 0.0) for t in groups[0].trajectories]
    num = cut.num_trained
    for bootstrap, after in ((False, 0.0), (True, 0.9 * 0.5)):
        ppo = make("ppo", gamma=0.9, lam=1.0, bootstrap=bootstrap)
        whole, ended = ppo.targets(groups, extras, None)
        discounts = 0.9 ** np.arange(num)[::-1]
        np.testing.assert_allclose(whole[cut.loss_mask], discounts, rtol=1e-6)
        np.testing.assert_allclose(ended[cut.loss_mask], discounts * (1.0 + after), rtol=1e-6)


def loss_gradient_sums(algorithm, x):
    """(loss of each token, its gradient, figures) in float32."""

    def total(logprobs):
        loss, sums = algorithm.token_loss(replace(x, logprobs=logprobs))
        return loss.sum(), (loss, sums)

    grad, (loss, sums) = jax.grad(total, has_aux=True)(jnp.asarray(x.logprobs))
    return np.asarray(loss), np.asarray(grad), {k: float(a / b) for k, (a, b) in sums.items()}


def plain(name, **given):
    return make(name, entropy_coef=0.0, **given)


def test_opd_mixed_is_grpos_advantage_and_the_teachers_in_numpy():
    """-min(p / b, cap) (w A + c (log teacher - log p)) log p, with the gradient of the last factor alone."""
    w, c, cap = 0.7, 0.3, 1.1
    algorithm = plain("opd_mixed", reward_coef=w, teacher_coef=c, ratio_max=cap)
    x = some_inputs()
    loss, gradient, figures = loss_gradient_sums(algorithm, x)
    weights = np.minimum(np.exp(x.logprobs - x.behaviour_logprobs), cap)
    k1 = x.logprobs - x.teacher_logprobs
    pull = np.where(x.mask, -weights * (x.advantages - c * k1), 0.0)  # x.advantages are w A
    np.testing.assert_allclose(gradient, pull, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, pull * x.logprobs, rtol=1e-5, atol=1e-6)
    assert figures["policy/reverse_kl"] == pytest.approx(k1[x.mask].mean(), rel=1e-5)
    group = fake_group(0, [1.0, 0.0, 0.5, None], [8, 9, 12, 10])
    values = estimates(algorithm, [group])
    for value, member, a in zip(values, group.trajectories, (1.0, -1.0, 0.0, 0.0), strict=True):
        # rewards of mean 0.5 and std 0.5; who was not scored is trained by the teacher alone
        np.testing.assert_allclose(value[member.loss_mask], w * a, atol=1e-5)
        assert algorithm.trains(member)


@pytest.mark.parametrize("options", [{}, {"std_scope": "none"}, {"std_scope": "batch"}])
def test_opd_mixed_without_its_teacher_is_grpos_advantage_exactly(options):
    alone = plain("opd_mixed", teacher_coef=0.0, **options)
    assert alone.needs == frozenset()
    groups = some_groups()
    got = alone.advantages(groups, {}, None)[0]
    for value, want in zip(got, estimates(plain("grpo", **options), groups), strict=True):
        np.testing.assert_array_equal(value, want)
    members = [t for group in groups for t in group.trajectories]
    assert [alone.trains(t) for t in members] == [plain("grpo").trains(t) for t in members]
    x = replace(some_inputs(), teacher_logprobs=None)
    got, want = (loss_gradient_sums(a, x) for a in (alone, plain("aipo")))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


def test_opd_mixed_without_the_reward_is_opd_exactly():
    groups, x = some_groups(), some_inputs()
    mixed, opd = plain("opd_mixed", reward_coef=0.0), plain("opd")
    assert not any(value.any() for value in estimates(mixed, groups))
    members = [t for group in groups for t in group.trajectories]
    assert [mixed.trains(t) for t in members] == [opd.trains(t) for t in members]
    got = loss_gradient_sums(mixed, replace(x, advantages=0 * x.advantages))
    want = loss_gradient_sums(opd, x)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    assert got[2] == want[2]


def line_of_three():
    """One group of one episode of three tokens in a row, reward 1, with critic values 0.2, 0.4 and 0.6."""
    mask = np.array([False, True, True, True])
    member = replace(fake_trajectory(0, 0, 4, 1.0), loss_mask=mask, turn_ids=np.zeros(4, np.int16))
    return [group_of([member])], {"values": [np.array([7.0, 0.2, 0.4, 0.6])]}


def whitened(values):
    return (values - np.mean(values)) / np.std(values, ddof=1)


def test_a_critics_own_lambda_moves_its_targets_alone():
    """gamma 0.9: deltas 0.16, 0.14, 0.4. lam 0 gives these; the critic's lam 1 the returns 0.81, 0.9, 1."""
    groups, extras = line_of_three()
    ppo = make("ppo", gamma=0.9, lam=0.0, critic_lam=1.0)
    (targets,) = ppo.targets(groups, extras, None)
    np.testing.assert_allclose(targets, [0.0, 0.81, 0.9, 1.0], atol=1e-6)
    ((values,), _) = ppo.advantages(groups, extras, None)
    np.testing.assert_allclose(values[1:], whitened([0.16, 0.14, 0.4]), atol=1e-4)
    (targets,) = make("ppo", gamma=0.9, lam=0.0).targets(groups, extras, None)
    np.testing.assert_allclose(targets[1:], [0.36, 0.54, 1.0], atol=1e-6)  # the same lam


@pytest.mark.parametrize(("alpha", "lam"), [(1.0, 2 / 3), (0.5, 1 / 3), (0.05, 0.0)])
def test_lambda_by_length(alpha, lam):
    """n = 3: lambda = 1 - 1 / (3 alpha), and not below 0."""
    groups, extras = line_of_three()
    (got,), _ = make("ppo", gamma=0.9, lam_alpha=alpha).advantages(groups, extras, None)
    (want,), _ = make("ppo", gamma=0.9, lam=lam).advantages(groups, extras, None)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.ptp(got[1:]) > 0.1


def test_nll_of_successes_is_added_on_their_tokens():
    groups = [fake_group(0, [1.0, 0.0, 0.5], [8, 9, 10])]
    algorithm, members = make("ppo", nll_coef=0.3, entropy_coef=0.0), groups[0].trajectories
    told = algorithm.token_inputs(groups, estimates(algorithm, groups), extras_of(groups), None)
    for own, member, is_success in zip(told["selected"], members, (1, 0, 0), strict=True):
        np.testing.assert_array_equal(own, member.loss_mask * is_success)
    x = some_inputs()
    with_it, without = (
        make("ppo", nll_coef=coef, entropy_coef=0.0).token_loss(x)[0] for coef in (0.3, 0.0)
    )
    want = np.where(x.mask & (x.selected > 0), -0.3 * x.logprobs, 0.0)
    np.testing.assert_allclose(with_it - without, want, atol=1e-6)
    assert want.any()
