"""An algorithm's own settings, what is refused, and what each option does to every policy algorithm."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import ALGORITHMS, options
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.rules import rules
from rl_jax.settings import (
    AlgorithmSettings,
    CorrectionSettings,
    FilterSettings,
    KlSettings,
    OverlongSettings,
)
from rl_jax.testing.trajectories import fake_group
from tests.algorithms.test_common import estimates, extras_of, make, some_groups, some_inputs


def errors(group_size=4, **given):
    return list(rules(AlgorithmSettings(**given), group_size))


def test_a_given_value_wins_over_the_algorithms_own():
    own = options.resolved(AlgorithmSettings(name="gspo"))
    assert (own.clip_low, own.clip_high, own.aggregation) == (3e-4, 4e-4, "seq-mean-token-mean")
    given = options.resolved(AlgorithmSettings(name="gspo", clip_low=0.1, aggregation="token-mean"))
    assert (given.clip_low, given.clip_high, given.aggregation) == (0.1, 4e-4, "token-mean")
    assert options.resolved(own) == own


def test_what_an_algorithm_does_not_read_stays_none():
    own = options.resolved(AlgorithmSettings(name="cispo"))
    assert own.clip_low is None and own.tau is None and own.ratio_max == 5.0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_accepts_its_own_settings(name):
    assert errors(name=name) == []
    assert errors(**vars(options.resolved(AlgorithmSettings(name=name)))) == []
    alone = errors(name=name, group_size=1)
    assert bool(alone) == ALGORITHMS[name].compares


def test_needs_follow_the_options():
    assert options.needs(AlgorithmSettings()) == frozenset()
    assert options.needs(AlgorithmSettings(old_policy="recompute")) == {"old_logprobs"}
    assert options.needs(AlgorithmSettings(name="decoupled_ppo")) == {"old_logprobs"}
    spared = AlgorithmSettings(name="decoupled_ppo", old_policy="one_update")
    assert options.needs(spared) == frozenset()
    kl = AlgorithmSettings(name="ppo", kl=KlSettings(coef=0.1))
    assert options.needs(kl) == {"values", "reference_logprobs"}
    mixed = AlgorithmSettings(name="opd_mixed")
    assert options.needs(mixed) == {"teacher_logprobs"}
    assert options.needed_by(mixed, "teacher_logprobs")[0] == "algorithm.teacher_coef=1.0"
    assert options.needs(replace(mixed, teacher_coef=0.0)) == frozenset()
    assert options.needed_by(kl, "values")[0] == "algorithm.name=ppo"
    assert options.needed_by(kl, "reference_logprobs")[0] == "algorithm.kl.coef=0.1"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"name": "cispo", "clip_low": 0.2}, "clip_low=0.2 is not read by cispo"),
        ({"ratio_min": 1.0, "ratio_max": 1.0, "name": "cispo"}, "must be below ratio_max"),
        ({"name": "sft", "kl": KlSettings(coef=0.1)}, "kl.coef=0.1 is not read by sft"),
        ({"name": "opd", "kl": KlSettings(0.1, "reward", "k1")}, "opd reads no reward"),
        ({"name": "opd", "reward_model_coef": 0.1}, "opd reads no reward"),
        ({"name": "dpo", "reward_model_coef": 0.1}, "reward_model_coef=0.1 is not read by dpo"),
        ({"reward_model_at": "turns"}, "has no effect while reward_model_coef is 0"),
        ({"name": "opd_mixed", "reward_coef": 0.0}, "raise it, or use opd, which reads none"),
        ({"teacher_coef": 0.5}, "teacher_coef=0.5 is not read by grpo but by opd_mixed"),
        ({"reward_model_coef": 0.1, "filter": FilterSettings(best_of=2)}, "every member scored"),
        ({"kl": KlSettings(0.1, "loss", "k1")}, "expected gradient of 0"),
        ({"kl": KlSettings(0.1, "reward", "k3+")}, "use k1 or k3"),
        ({"kl": KlSettings(0.1, "loss", "k3", 0.5)}, "in the reward only"),
        ({"correction": CorrectionSettings(level="token")}, "old_policy to one_update"),
        ({"name": "topr", "correction": CorrectionSettings(level="token")}, "set it to none"),
        (
            {
                "old_policy": "recompute",
                "correction": CorrectionSettings(level="token", low=3.0),
            },
            "must be below high=2",
        ),
        ({"correction": CorrectionSettings(reject_stat="k3", reject_level="segment")}, "no k3"),
        ({"correction": CorrectionSettings(reject_stat="k3", reject_low=1.0)}, "stat ratio only"),
        ({"correction": CorrectionSettings(m2po=0.04)}, "needs algorithm.old_policy=recompute"),
        (
            {
                "name": "kimi",
                "old_policy": "recompute",
                "correction": CorrectionSettings(m2po=0.04),
            },
            "kimi pulls on tokens without",
        ),
        (
            {"old_policy": "recompute", "correction": CorrectionSettings(batch_normalize=True)},
            "no weights to normalise",
        ),
        ({"overlong": OverlongSettings(buffer=8, max_tokens=8)}, "overlong.buffer=8 must be"),
        ({"filter": FilterSettings(mean_above=0.9, mean_below=0.1)}, "must be below mean_below"),
        ({"name": "reinforce_pp", "filter": FilterSettings(True)}, "drops every group of one"),
        ({"filter": FilterSettings(best_of=4)}, "leaves nobody out of rollout.group_size=4"),
        ({"filter": FilterSettings(best_of=1), "kl": KlSettings(0.1, "reward")}, "every member"),
    ],
)
def test_what_contradicts_is_refused_with_the_fix(given, line):
    size = 1 if given.get("name") == "reinforce_pp" else 4
    found = [e for e in errors(size, **given) if line in e]
    assert len(found) == 1, errors(size, **given)


NO_STD = [name for name, entry in ALGORITHMS.items() if "std_eps" not in entry.defaults]


@pytest.mark.parametrize("name", NO_STD)
def test_what_divides_by_no_std_reads_no_eps(name):
    (line,) = errors(name=name, std_eps=0.1)
    assert line.startswith(f"algorithm.std_eps=0.1 is not read by {name} but by grpo, ")


ONE = {"old_policy": "one_update"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        *[
            ({"name": n, "entropy_coef": 0.1}, f"entropy_coef=0.1 is not read by {n} but by")
            for n in ("sft", "dpo", "rm")
        ],
        *[
            ({"name": n, "overlong_filter": True}, f"overlong_filter=True is not read by {n} but")
            for n in ("sft", "rm")
        ],
        (
            {"name": "opd", "overlong": OverlongSettings(4, 6)},
            "overlong.buffer=4 is not read by opd",
        ),
        (
            {"correction": CorrectionSettings(high=3.0)},
            "correction.high=3.0 bounds importance weights",
        ),
        (
            {"correction": CorrectionSettings(low=0.5)},
            "correction.low=0.5 bounds importance weights",
        ),
        ({"correction": CorrectionSettings(mode="mask")}, "correction.mode=mask bounds importance"),
        (
            {"name": "decoupled_ppo", "correction": CorrectionSettings(level="none", high=3.0)},
            "correction.high=3.0 bounds importance weights",
        ),
        ({"kl": KlSettings(0.1, horizon=5)}, "kl.horizon=5 has no effect while kl.target is 0"),
        (
            {"kl": KlSettings(0.1, "reward", horizon=5)},
            "kl.horizon=5 has no effect while kl.target",
        ),
        ({"overlong": OverlongSettings(factor=2.0)}, "overlong.factor=2.0 has no effect while"),
        (
            {"name": "dpo", "preference": "ipo", "label_smoothing": 0.1},
            "label_smoothing=0.1 is read by preference=sigmoid only",
        ),
        ({**ONE, "clip_low": 0.1}, "clip_low=0.1 has no effect at algorithm.old_policy=one_update"),
        ({**ONE, "dual_clip": 3.0}, "dual_clip=3.0 has no effect at algorithm.old_policy"),
        ({**ONE, "name": "sapo", "tau_pos": 2.0}, "tau_pos=2.0 has no effect"),
        ({**ONE, "name": "kimi", "tau": 2.0}, "tau=2.0 has no effect"),
        ({**ONE, "name": "dppo", "div_low": 0.1}, "div_low=0.1 has no effect"),
        ({**ONE, "name": "cispo", "ratio_max": 2.0}, "ratio_max=2.0 has no effect"),
        ({"std_scope": "none", "std_eps": 0.1}, "std_eps=0.1 has no effect at std_scope=none"),
        ({"name": "rloo", "std_eps": 0.1}, "std_eps=0.1 has no effect at normalize=false"),
    ],
)
def test_what_would_be_ignored_is_refused_with_the_fix(given, line):
    found = [error for error in errors(4, **given) if line in error]
    assert len(found) == 1 and ";" in found[0], errors(4, **given)


def test_a_bound_that_excludes_a_ratio_of_one_is_no_idle_one():
    assert errors(name="cispo", **ONE, ratio_max=0.5) == []
    assert errors(name="cispo", **ONE, ratio_min=1.5) == []


def test_what_a_file_gives_to_another_algorithm_is_passed_over_and_what_was_typed_is_not():
    given = AlgorithmSettings(
        name="sft", entropy_coef=0.01, clip_low=0.1, kl=KlSettings(coef=0.1), reward_weights={"a": 1.0}
    )  # fmt: skip
    assert options.passed_over(given, None) == given
    assert options.passed_over(given, {"algorithm.name"}) == AlgorithmSettings(name="sft")
    for key in ("entropy_coef", "clip_low", "kl.coef", "reward_weights"):
        typed = key + (".a" if key == "reward_weights" else "")
        left = options.passed_over(given, {"algorithm.name", f"algorithm.{typed}"})
        (line,) = rules(left, 4)
        assert f"algorithm.{key}=" in line and "is not read by sft" in line
    unknown = replace(given, name="not.loaded:Yet")
    assert options.passed_over(unknown, {"algorithm.name"}) == unknown


def test_filters_drop_groups_by_the_task_reward_and_say_why():
    groups = [
        fake_group(0, [0.0, 1.0], [8, 8]),
        fake_group(1, [1.0, 1.0], [8, 8]),
        fake_group(2, [0.0, 0.0], [8, 8]),
        fake_group(3, [1.0, None], [8, 8]),
    ]
    kept, dropped = make("grpo", filter=FilterSettings(equal_rewards=True)).select(groups)
    assert [g.uid for g in kept] == ["r/0/0"]
    assert {reason for _, reason in dropped} == {"equal_rewards"} and len(dropped) == 3
    kept, dropped = make("rloo", filter=FilterSettings(mean_above=0.2)).select(groups)
    assert [g.uid for g in kept] == ["r/0/0", "r/0/1", "r/0/3"]
    assert dropped == [("r/0/2", "mean_reward")]


def test_rejection_sampling_trains_the_best_and_compares_with_all():
    groups = [
        fake_group(0, [0.0, 1.0, 0.5, 1.0], [8, 9, 10, 8]),
        fake_group(1, [0.0, 0.2, None], [8, 8, 8]),
    ]
    for given, trained in (
        (FilterSettings(min_reward=0.5), {"r/0/0/1", "r/0/0/2", "r/0/0/3"}),
        (FilterSettings(best_of=1), {"r/0/0/1", "r/0/1/1"}),  # of equals the first by uid
        (FilterSettings(min_reward=0.7, best_of=1), {"r/0/0/1"}),
    ):
        algorithm = make("dr_grpo", filter=given)
        kept, dropped = algorithm.select(groups)
        members = [t for g in kept for t in g.trajectories]
        assert {t.uid for t in members if t.num_trained and algorithm.trains(t)} == trained
        named = {t.uid for g in groups for t in g.trajectories if t.reward.value is not None}
        gone = {uid for uid, _ in dropped}
        assert ("r/0/1" in gone) == (given.min_reward is not None)
        assert named - gone - ({"r/0/1/0", "r/0/1/1"} if "r/0/1" in gone else set()) == trained
        values = estimates(algorithm, kept)
        assert values[1].max() == pytest.approx(1.0 - 0.625)  # the mean of all four


def test_filters_see_the_task_reward_and_not_the_shaped_one():
    """L21: the overlong penalty makes equal rewards differ, and must not make their group worth training."""
    equal, mixed = fake_group(0, [1.0, 1.0], [5, 15]), fake_group(1, [1.0, 0.0], [5, 15])
    algorithm = make(
        "grpo", overlong=OverlongSettings(4, 6, 0.5), filter=FilterSettings(equal_rewards=True)
    )
    assert estimates(algorithm, [equal])[0].any(), "shaped rewards differ"
    assert algorithm.select([equal, mixed]) == ([mixed], [("r/0/0", "equal_rewards")])


def test_a_rejected_member_pays_for_its_length_as_if_it_were_trained():
    group = [fake_group(0, [1.0, 0.9], [5, 15])]
    shape = OverlongSettings(4, 6, 0.5)
    plain = estimates(make("dr_grpo", overlong=shape), group)
    picky = make("dr_grpo", overlong=shape, filter=FilterSettings(best_of=1))
    np.testing.assert_allclose(estimates(picky, picky.select(group)[0])[0], plain[0])


def test_overlong_responses_pay_before_the_group_is_compared():
    groups = [fake_group(0, [1.0, 1.0], [5, 15])]  # 2 and 6 sampled tokens
    plain = estimates(make("dr_grpo"), groups)
    shaped = estimates(make("dr_grpo", overlong=OverlongSettings(4, 6, 0.5)), groups)
    assert not plain[0].any()
    assert shaped[0].max() == pytest.approx(0.25) and shaped[1].min() == pytest.approx(-0.25)


def test_kl_in_the_reward_reaches_groups_as_a_sum_and_tokens_as_it_is():
    groups = some_groups()
    given = KlSettings(coef=0.1, where="reward", kind="k1")
    for name in ("dr_grpo", "reinforce_pp", "turn_reinforce"):
        plain, penalised = (estimates(make(name, **o), groups) for o in ({}, {"kl": given}))
        assert any((a != b).any() for a, b in zip(plain, penalised))


def test_a_reward_models_score_joins_the_reward_before_groups_are_compared():
    """That of the last sampled token, whatever was said before it; what is unscored stays so."""
    groups = some_groups()
    members = [t for group in groups for t in group.trajectories]
    algorithm = make("dr_grpo", reward_model_coef=0.5)
    assert algorithm.needs == {"reward_scores"}
    values = [
        float(v.sum() / max(t.num_trained, 1))
        for v, t in zip(estimates(algorithm, groups), members)
    ]
    scores = [t.logprobs[t.loss_mask][-1] for t in members]
    rewards = [t.reward.value for t in members]
    for group in range(len(groups)):
        own = [i for i, t in enumerate(members) if t.index == group and rewards[i] is not None]
        total = np.array([rewards[i] + 0.5 * scores[i] for i in own])
        want = total - total.mean() if len(own) > 1 else 0 * total
        assert [values[i] for i in own] == pytest.approx(list(want), abs=1e-5)
    unscored = [v for v, r in zip(values, rewards) if r is None]
    assert unscored == [0.0]
    flat = make("dr_grpo", reward_model_coef=0.5, filter=FilterSettings(equal_rewards=True))
    assert [uid for uid, _ in flat.select(groups)[1]] == ["r/0/1", "r/0/2"]  # by the task alone


def two_turns(group, sample, reward):
    """Tokens 2, 3 and 6, 7 are sampled, of turns 0 and 1."""
    member = fake_group(group, [reward] * 2, [8, 8]).trajectories[sample]
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1], bool)
    turn_ids = np.array([-1, -1, 0, 0, 1, 1, 1, 1], np.int16)
    none = np.full(2, np.nan, np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    return replace(
        member, loss_mask=mask, turn_ids=turn_ids, turn_rewards=none, versions=versions, sample_starts=(0,)
    )  # fmt: skip


@pytest.mark.parametrize(
    "name, returns",
    [
        # A turn's return is its own score and those after it; the task's reward stands on the last turn.
        ("turn_reinforce", [[0.5 * (3 + 7) + 1, 0.5 * 7 + 1], [0.5 * (5 + 1), 0.5 * 1]]),
        ("dr_grpo", [[0.5 * 10 + 1] * 2, [0.5 * 6] * 2]),
    ],
)
def test_a_reward_model_scores_each_turn_at_its_end_and_credits_what_led_to_it(name, returns):
    """By hand: at tokens 3 and 7 the model says 3, 7 and 5, 1; the other tokens' values are read by nobody."""
    members = [two_turns(0, 0, 1.0), two_turns(0, 1, 0.0)]
    group = replace(fake_group(0, [1.0, 0.0], [8, 8]), trajectories=tuple(
        replace(m, reward=replace(m.reward, value=r)) for m, r in zip(members, (1.0, 0.0))
    ))  # fmt: skip
    said = [np.array([0, 0, 90, 3, 0, 0, 90, 7.0]), np.array([0, 0, 40, 5, 0, 0, 30, 1.0])]
    own = {"std_scope": "none"} if name == "turn_reinforce" else {}
    algorithm = make(name, reward_model_coef=0.5, reward_model_at="turns", **own)
    assert algorithm.needs == {"reward_scores"}
    values = algorithm.advantages([group], {"reward_scores": said}, None)[0]
    means = np.mean(returns, axis=0)
    for value, member, own in zip(values, group.trajectories, returns):
        want = own - means
        np.testing.assert_allclose(value[[2, 3, 6, 7]], want[[0, 0, 1, 1]], atol=1e-5)
        assert not value[~member.loss_mask].any()


def test_process_grpo_takes_every_turn_that_a_reward_model_scored_as_a_step():
    """Normalised among all turns of the group, then summed over the turns that end at or after a token."""
    members = [two_turns(0, 0, 0.0), two_turns(0, 1, 0.0)]
    group = replace(fake_group(0, [0.0, 0.0], [8, 8]), trajectories=tuple(members))
    said = [np.array([0, 0, 9, 3, 0, 0, 9, 7.0]), np.array([0, 0, 9, 5, 0, 0, 9, 1.0])]
    algorithm = make("process_grpo", reward_model_coef=1.0, reward_model_at="turns", std_eps=1e-6)
    values = algorithm.advantages([group], {"reward_scores": said}, None)[0]
    z = (np.array([3, 7, 5, 1.0]) - 4) / np.std([3, 7, 5, 1.0], ddof=1)
    assert values[0][[2, 6]] == pytest.approx([z[0] + z[1], z[1]], abs=1e-5)
    assert values[1][[2, 6]] == pytest.approx([z[2] + z[3], z[3]], abs=1e-5)


@pytest.mark.parametrize("coef", [0.1, 0.5])
def test_kl_in_the_reward_by_hand(coef):
    """k1: the sum of log p - log p_ref over the tokens, here -0.2 of what was sampled at; R - coef KL is centred."""
    group = fake_group(0, [1.0, 0.0], [8, 9])
    kl = [-0.2 * float(t.logprobs[t.loss_mask].sum()) for t in group.trajectories]
    assert min(kl) > 1.0  # log p is about -log of the vocabulary
    shaped = np.array([1.0 - coef * kl[0], 0.0 - coef * kl[1]])
    want = shaped - shaped.mean()
    algorithm = make("dr_grpo", kl=KlSettings(coef=coef, where="reward"))
    values = estimates(algorithm, [group])
    assert [float(v[t.loss_mask][0]) for v, t in zip(values, group.trajectories)] == pytest.approx(
        list(want), abs=1e-5
    )


def test_a_turn_pays_for_the_kl_of_its_own_tokens_and_of_those_after_it():
    """turn_reinforce by hand: two members of two turns whose first turns are equal but for what comes after them."""
    group = fake_group(0, [0.0, 0.0], [9, 9])
    first, second = (t.logprobs * 0 for t in group.trajectories)
    members = [replace(t, logprobs=l) for t, l in zip(group.trajectories, (first, second))]
    reference = [np.zeros(9, np.float32), np.zeros(9, np.float32)]
    last = members[0].turn_ids == 1
    reference[0][
        last & members[0].loss_mask
    ] = -1.0  # KL 1 a token of the last turn, of member 0 alone
    extras = {"reference_logprobs": reference}
    algorithm = make("turn_reinforce", kl=KlSettings(coef=0.1, where="reward"))
    values, _ = algorithm.advantages([replace(group, trajectories=tuple(members))], extras, None)
    half = np.sqrt(0.5)
    for value, sign in zip(values, (-1, 1)):
        for turn in (0, 1):
            own = value[(members[0].turn_ids == turn) & members[0].loss_mask]
            assert own == pytest.approx(sign * half, abs=1e-4)
    reference[0][last] = 0.0
    reference[0][
        (members[0].turn_ids == 0) & members[0].loss_mask
    ] = -1.0  # of the first turn alone
    values, _ = algorithm.advantages([replace(group, trajectories=tuple(members))], extras, None)
    assert values[0][(members[0].turn_ids == 0) & members[0].loss_mask] == pytest.approx(
        -half, abs=1e-4
    )
    assert not values[0][last].any()


def test_kl_controller_counts_the_samples_of_the_step():
    """0.1 (1 + 0.2 n / horizon): the KL is far above the target, so the error is at its bound."""
    groups = some_groups()
    num = sum(len(group.trajectories) for group in groups)
    given = KlSettings(coef=0.1, where="reward", kind="k2", target=1e-6, horizon=100)
    _, state = make("grpo", kl=given).advantages(groups, extras_of(groups), None)
    assert state["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * num / 100))


def test_the_kind_of_a_kl_follows_from_where_it_stands():
    for where, kind in (("reward", "k1"), ("loss", "k3")):
        own = options.resolved(AlgorithmSettings(kl=KlSettings(coef=0.1, where=where)))
        assert own.kl.kind == kind and errors(kl=KlSettings(coef=0.1, where=where)) == []
    given = AlgorithmSettings(kl=KlSettings(coef=0.1, where="reward", kind="k3"))
    assert options.resolved(given).kl.kind == "k3"


def test_kl_controller_lives_in_the_algorithms_state():
    given = KlSettings(coef=0.1, where="reward", kind="k2", target=1e-6)
    groups = some_groups()
    _, state = make("grpo", kl=given).advantages(groups, extras_of(groups), None)
    assert state["kl_coef"] > 0.1
    _, later = make("grpo", kl=given).advantages(groups, extras_of(groups), state)
    assert later["kl_coef"] > state["kl_coef"]


def policy_algorithms():
    return [name for name, entry in ALGORITHMS.items() if entry.policy]


@pytest.mark.slow
@pytest.mark.parametrize("name", policy_algorithms())
def test_corrections_only_take_away_and_leave_other_tokens_alone(name):
    """A vetoed sequence gives no gradient; every other token's stays exactly what it was."""
    x = some_inputs()
    sharp = np.where(x.mask, x.logprobs, 0.0).astype(np.float32)
    x = replace(x, logprobs=sharp, behaviour_logprobs=sharp.copy(), old_logprobs=sharp - 0.01)
    x.behaviour_logprobs[0, 2] = sharp[0, 2] + 3.0  # one token of the first row
    plain, vetoed = (gradient(make(name, **o), x) for o in ({}, {"correction": VETO}))
    assert not vetoed[0].any()
    np.testing.assert_array_equal(vetoed[1:], plain[1:])


VETO = CorrectionSettings(veto=0.1)


def gradient(algorithm, x):
    def total(logprobs):
        return algorithm.token_loss(replace(x, logprobs=logprobs))[0].sum()

    fast = {"xla_backend_optimization_level": 0}
    return np.asarray(jax.jit(jax.grad(total), compiler_options=fast)(jnp.asarray(x.logprobs)))


def test_weights_under_one_update_are_those_of_the_ratio_to_the_sampler():
    x = some_inputs()
    tis = CorrectionSettings(level="token", high=1.2)
    algorithm = make("grpo", old_policy="one_update", correction=tis, entropy_coef=0.0)
    got = gradient(algorithm, x)
    ratio = np.exp(np.where(x.mask, x.logprobs - x.behaviour_logprobs, 0.0))
    want = np.where(x.mask, -np.minimum(ratio, 1.2) * x.advantages, 0.0)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    _, sums = algorithm.token_loss(x)
    mean = np.minimum(ratio, 1.2)[x.mask].mean()
    assert float(sums["is/weight"][0] / sums["is/weight"][1]) == pytest.approx(mean, rel=1e-5)


def test_kl_in_the_loss_adds_its_gradient():
    x = some_inputs()
    plain = gradient(make("grpo", entropy_coef=0.0), x)
    with_kl = gradient(make("grpo", entropy_coef=0.0, kl=KlSettings(0.5, kind="k2")), x)
    want = np.where(x.mask, 0.5 * (x.logprobs - x.reference_logprobs), 0.0)
    np.testing.assert_allclose(with_kl - plain, want, atol=1e-6)


def test_loglinear_uses_the_age_of_each_token():
    x = some_inputs()
    fresh = make("grpo", old_policy="loglinear", entropy_coef=0.0)
    same = make("grpo", entropy_coef=0.0)
    np.testing.assert_allclose(gradient(fresh, x), gradient(same, x), rtol=1e-6)  # lag 1: alpha 0
    old = replace(x, lag=np.where(x.mask, 1000, 0))
    np.testing.assert_allclose(
        gradient(fresh, old), np.where(x.mask, -x.advantages, 0.0), rtol=1e-2, atol=1e-3
    )


@pytest.mark.parametrize("kind", ["k2", "k3", "unbiased"])
def test_kl_in_the_loss_has_its_gradient_at_any_coefficient_and_pulls_a_shifted_logit_back(kind):
    """L18, through a softmax of 5 logits: every token is there once, and nothing but the KL pulls."""
    with jax.enable_x64(True):
        reference = jnp.linspace(-1.0, 1.0, 5)
        shifted = reference.at[3].add(1.5)
        zeros, there = jnp.zeros((1, 5)), jnp.ones((1, 5), bool)

        def loss(logits, coef):
            logp = jax.nn.log_softmax(logits)[None]
            x = LossInputs(
                logprobs=logp, entropy=zeros, advantages=zeros, mask=there, segment_ids=there * 1,
                turn_ids=there * 0, behaviour_logprobs=jax.lax.stop_gradient(logp),
                reference_logprobs=jax.nn.log_softmax(reference)[None],
            )  # fmt: skip
            algorithm = make("grpo", entropy_coef=0.0, kl=KlSettings(coef, kind=kind))
            return algorithm.token_loss(x)[0].mean()

        coefs = (0.1, 0.5, 2.0)
        run = jax.jit(
            lambda logits: [jax.value_and_grad(loss)(logits, coef) for coef in coefs],
            compiler_options={"xla_backend_optimization_level": 0},
        )
        slopes = [grad for _, grad in run(shifted)]
        for coef, got in zip(coefs, slopes):
            np.testing.assert_allclose(got / coef, slopes[0] / 0.1, rtol=1e-9)
        if (
            kind != "unbiased"
        ):  # its ratio to the old policy has a gradient that this loss does not show
            around = [(run(shifted + e), run(shifted - e)) for e in 1e-5 * np.eye(5)]
            for i, got in enumerate(slopes):
                want = [float(up[i][0] - down[i][0]) / 2e-5 for up, down in around]
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)
        logits = np.asarray(shifted)
        for _ in range(150):
            logits = logits - np.asarray(run(logits)[2][1])
        gaps = logits - np.asarray(reference)
        assert np.abs(gaps - gaps.mean()).max() < 0.05


def test_corrections_of_the_whole_batch_act_through_the_advantages():
    """Against the formulas on flat arrays: M2PO drops the farthest tokens, the weights' mean becomes 1."""
    groups = some_groups()
    members = [t for group in groups for t in group.trajectories]
    trained = [t.loss_mask & (t.reward.value is not None) for t in members]
    d = [0.9 * t.logprobs - t.logprobs for t in members]  # of extras_of
    flat = np.concatenate([v[m] for v, m in zip(d, trained)])
    plain = estimates(make("grpo", old_policy="recompute"), groups)

    threshold = float(np.mean(flat**2) + np.min(flat**2)) / 2
    kept = estimates(
        make("grpo", old_policy="recompute", correction=CorrectionSettings(m2po=threshold)), groups
    )
    order = np.sort(flat**2)
    num_kept = int((np.cumsum(order) / np.arange(1, len(flat) + 1) < threshold).sum())
    assert 0 < num_kept < len(flat)
    for got, want, gap, mask in zip(kept, plain, d, trained, strict=True):
        stays = mask & (gap**2 <= order[num_kept - 1])
        np.testing.assert_allclose(got, np.where(stays, want, 0.0), atol=1e-6)

    tis = CorrectionSettings(level="token", batch_normalize=True)
    scaled = estimates(make("grpo", old_policy="recompute", correction=tis), groups)
    mean = np.exp(flat).clip(0, 2).mean()
    for got, want in zip(scaled, plain, strict=True):
        np.testing.assert_allclose(got, want / mean, rtol=1e-5)
