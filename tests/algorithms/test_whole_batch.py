"""What looks at a whole step before it is cut: covariances, parts of rewards, baselines by place, what is counted."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from rl_jax.algorithms.algorithm import RewardPartError
from rl_jax.algorithms.correction import m2po_keep
from rl_jax.learner.batch import pack, with_advantages
from rl_jax.metrics import Metric
from rl_jax.settings import (
    CorrectionSettings,
    EntropySettings,
    FilterSettings,
    KlSettings,
    LearnerSettings,
    OverlongSettings,
)
from rl_jax.testing.trajectories import fake_group
from rl_jax.types import Reward
from tests.algorithms.test_common import estimates, extras_of, make, some_groups, some_inputs
from tests.algorithms.test_options import errors, gradient

ROWS = LearnerSettings(row_tokens=40)


def members_of(groups):
    return [t for group in groups for t in group.trajectories]


def trained_batch(algorithm, groups, state=None):
    """(the batch as the learner gets it, the next state)."""
    batch = pack(groups, ROWS)
    extras = {n: batch.place(a, np.float32) for n, a in extras_of(groups).items()}
    return with_advantages(batch, groups, extras, algorithm, state, algorithm.settings)


def with_parts(group, parts):
    """The group with these parts of its members' rewards; None = none."""
    members = [
        replace(t, reward=replace(t.reward, parts=own or {}))
        for t, own in zip(group.trajectories, parts, strict=True)
    ]
    return replace(group, trajectories=tuple(members))


# --- KL-Cov and Clip-Cov ---


def flat_covariance(groups, values):
    """(cov of every trained token, which members they are of, places) written out on flat arrays."""
    trained = [t.loss_mask & (t.reward.value is not None) for t in members_of(groups)]
    policy = extras_of(groups)["old_logprobs"]
    a = np.concatenate([v[m] for v, m in zip(values, trained)]).astype(np.float64)
    p = np.concatenate([v[m] for v, m in zip(policy, trained)]).astype(np.float64)
    return (a - a.mean()) * (p - p.mean()), trained


@pytest.mark.parametrize("share", [1e-6, 0.1, 0.5])
def test_kl_cov_selects_the_tokens_that_covary_most(share):
    groups = some_groups()
    algorithm = make("kl_cov", cov_share=share)
    batch, _ = trained_batch(algorithm, groups)
    values = estimates(algorithm, groups)
    covariance, trained = flat_covariance(groups, values)
    num = max(int(share * len(covariance)), 1)
    bound = np.sort(covariance)[-num]
    got = batch.gather(batch.extras["selected"], len(trained))
    selected = np.concatenate([g[m] for g, m in zip(got, trained) if len(g)])
    np.testing.assert_array_equal(selected == 1, covariance >= bound)
    assert selected.sum() == num and sum(g.sum() for g in got) == num


def test_kl_cov_pulls_the_selected_tokens_back_to_the_policy_that_sampled():
    x = some_inputs()
    algorithm = make("kl_cov", cov_coef=0.7, entropy_coef=0.0)
    d = np.where(x.mask, x.logprobs - x.behaviour_logprobs, 0.0)
    want = np.where(x.mask, -x.advantages * np.exp(d), 0.0) + 0.7 * x.selected * np.sign(d)
    np.testing.assert_allclose(gradient(algorithm, x), want, rtol=1e-5, atol=1e-6)


def test_clip_cov_leaves_out_some_of_the_tokens_in_the_band_that_the_clip_does_not_hold():
    """And the same ones in whatever order groups and members come."""
    groups = some_groups()
    plain = estimates(make("grpo"), groups)
    covariance, trained = flat_covariance(groups, plain)
    d = np.concatenate([-0.1 * t.logprobs[m] for t, m in zip(members_of(groups), trained)])
    clip = float(np.exp(np.median(d)) - 1)
    low, high = np.quantile(covariance, [0.3, 0.9])
    algorithm = make("clip_cov", cov_share=0.1, cov_low=low, cov_high=high, clip_high=clip)

    def left_out(order):
        shuffled = [replace(g, trajectories=g.trajectories[::order]) for g in groups[::order]]
        found = dict(zip([t.uid for t in members_of(shuffled)], estimates(algorithm, shuffled)))
        values = [found[t.uid][m] for t, m in zip(members_of(groups), trained)]
        return np.concatenate(values)

    before = np.concatenate([v[m] for v, m in zip(plain, trained)])
    held = (before > 0) & (d > np.log1p(clip))
    after = left_out(1)
    gone = (after == 0) & (before != 0)
    in_band = (covariance > low) & (covariance < high)
    assert (in_band & held & (before != 0)).any() and not (gone & (held | ~in_band)).any()
    open_ = in_band & ~held & (before != 0)
    assert 0 < gone.sum() <= int(0.1 * len(covariance)) < open_.sum()
    np.testing.assert_array_equal(after[~gone], before[~gone])
    np.testing.assert_array_equal(left_out(-1), after)


def test_clip_cov_leaves_nothing_out_where_no_token_is_in_the_band():
    groups = some_groups()
    for got, want in zip(estimates(make("clip_cov"), groups), estimates(make("grpo"), groups)):
        np.testing.assert_array_equal(got, want)


# --- Pass@k, GDPO, OTB ---


def test_only_the_best_of_a_group_is_credited_with_what_it_adds():
    groups = [fake_group(0, [0.0, 3.0, 1.0], [8, 8, 8]), fake_group(1, [1.0, 1.0, 0.0], [8, 8, 8])]
    values = [float(v.max() + v.min()) for v in estimates(make("grpo_passk"), groups)]
    assert values == pytest.approx([0, 2 / np.std([0, 3, 1], ddof=1), 0, 0, 0, 0], abs=1e-5)


def normalised(x):
    return (x - x.mean()) / x.std(ddof=1) if x.max() > x.min() else 0 * x


def test_gdpo_weighs_parts_whatever_their_scale():
    """Two tasks: one scorer gives both parts, the other one of them."""
    parts = [{"form": f, "answer": a} for f, a in ((0, 100), (1, 0), (1, 300), (0, 0))]
    one = with_parts(fake_group(0, [0.1, 0.2, 0.3, 0.4], [8, 9, 8, 12]), parts)
    answers = [{"answer": a} for a in (1, 2)]
    two = with_parts(fake_group(1, [1.0, 0.0], [8, 8]), answers)
    algorithm = make("gdpo", reward_weights={"form": 0.5, "answer": 2.0}, std_eps=1e-9)
    form, answer = (np.array([p[n] for p in parts], float) for n in ("form", "answer"))
    total = [*(0.5 * normalised(form) + 2 * normalised(answer)), *2 * normalised(np.array([1, 2]))]
    got = [float(v.max() + v.min()) for v in estimates(algorithm, [one, two])]
    assert got == pytest.approx(list(normalised(np.array(total))), abs=1e-5)
    scaled = [{**p, "answer": 1e4 * p["answer"]} for p in parts]
    again = estimates(algorithm, [with_parts(one, scaled), two])
    assert [float(v.max() + v.min()) for v in again] == pytest.approx(got, abs=1e-5)


def test_gdpo_without_named_parts_takes_the_reward_and_what_shapes_it():
    groups = [fake_group(0, [0.0, 1.0, 0.5], [8, 8, 15])]
    got = [float(v.max() + v.min()) for v in estimates(make("gdpo"), groups)]
    assert got == pytest.approx(list(normalised(np.array([0.0, 1.0, 0.5]))), abs=1e-4)
    long = make("gdpo", overlong=OverlongSettings(4, 6, 0.5))
    got = [float(v.max() + v.min()) for v in estimates(long, groups)]
    assert [int(t.loss_mask.sum()) for t in groups[0].trajectories] == [3, 3, 6]
    penalties = np.array([-0.125, -0.125, -0.5])
    want = normalised(np.array([0.0, 1.0, 0.5])) + penalties - penalties.mean()
    assert got == pytest.approx(list(want), abs=1e-4)


@pytest.mark.parametrize(
    "options_of",
    [
        lambda c: {"overlong": OverlongSettings(4, 6, c)},
        lambda c: {"kl": KlSettings(coef=c, where="reward")},
        lambda c: {"reward_model_coef": c},
    ],
)
def test_what_shapes_a_gdpo_reward_acts_by_its_coefficient(options_of):
    """Twice the coefficient moves an advantage twice as far, and next to none hardly at all."""
    groups = [fake_group(0, [0.0, 1.0, 0.5], [8, 8, 15])]
    plain = np.concatenate(estimates(make("gdpo"), groups))
    once, twice, hardly = (
        np.concatenate(estimates(make("gdpo", **options_of(c)), groups)) - plain
        for c in (0.1, 0.2, 1e-8)
    )
    assert np.abs(once).max() > 0.01 and np.abs(hardly).max() < 1e-6
    np.testing.assert_allclose(twice, 2 * once, atol=1e-6)


def test_gdpo_says_which_part_is_missing():
    group = fake_group(0, [0.0, 1.0], [8, 8])
    named = make("gdpo", reward_weights={"form": 1.0})
    with pytest.raises(RewardPartError, match="names form, which no reward .* parts are answer"):
        estimates(named, [with_parts(group, [{"answer": 1.0}] * 2)])
    with pytest.raises(RewardPartError, match="r/0/0/1: its reward lacks part form"):
        estimates(named, [with_parts(group, [{"form": 1.0}, {}])])
    unscored = replace(group.trajectories[1], reward=Reward(None, {}, (), "error", "fake"))
    alone = with_parts(group, [{"form": 1.0}, {}])
    alone = replace(alone, trajectories=(alone.trajectories[0], unscored))
    assert not any(v.any() for v in estimates(named, [alone]))


def test_otb_compares_the_tokens_of_one_place_across_observations():
    """Members sample 5, 5 and 8 tokens, in turns of two between observations; W by hand, at places and not columns."""
    group = fake_group(0, [1.0, 0.0, 0.5], [12, 12, 17])
    members = group.trajectories
    assert [int(t.loss_mask.sum()) for t in members] == [5, 5, 8]
    extras, weights = extras_of([group]), []
    for t, logp, squares in zip(members, extras["old_logprobs"], extras["sum_squares"]):
        energy = 1 - 2 * np.exp(logp[t.loss_mask]) + squares[t.loss_mask]
        weights.append(np.cumsum(energy))
    got = [v[t.loss_mask] for v, t in zip(estimates(make("otb"), [group]), members)]
    for place in range(8):
        here = [i for i in range(3) if place < len(weights[i])]
        rewards = np.array([1.0, 0.0, 0.5])[here]
        w = np.array([weights[i][place] for i in here])
        baseline = (w * rewards).sum() / w.sum() if len(here) > 1 else 0.0
        assert [got[i][place] for i in here] == pytest.approx(list(rewards - baseline), abs=1e-5)


def test_otb_has_no_signal_in_a_group_of_one_or_of_equals():
    groups = [fake_group(0, [1.0], [12]), fake_group(1, [1.0, 1.0], [8, 20])]
    assert not any(v.any() for v in estimates(make("otb"), groups))


# --- an entropy that is held at a target ---


def test_the_entropy_coefficient_follows_the_entropy_and_acts_only_below_the_target():
    """0.01 at first; 1.0 > 0.5: 0.007, and no bonus; 0.4: the bonus of 0.007, then 0.01 again."""
    control = EntropySettings(target=0.5, delta=0.003)
    algorithm = make("grpo", entropy=control)
    groups, state, applied = some_groups(), None, []
    for entropy in (1.0, 0.4, float("nan"), 0.4):
        batch, state = trained_batch(algorithm, groups, state)
        (coef,) = set(batch.extras["entropy_coef"][batch.targets_mask].tolist())
        applied.append(coef)
        state = algorithm.learned(state, {"policy/entropy": Metric(3 * entropy, 3)})
    assert applied == pytest.approx([0.01, 0.0, 0.01, 0.01], abs=1e-7)
    assert state == {"entropy_coef": pytest.approx(0.013), "entropy": pytest.approx(0.4)}
    assert algorithm.learned(state, {}) == state  # nothing was trained
    x = some_inputs(entropy_coef=np.full((3, 6), 0.25, np.float32))
    plain, held = (gradient_of_entropy(a, x) for a in (make("grpo", entropy_coef=0.0), algorithm))
    np.testing.assert_allclose(held - plain, np.where(x.mask, -0.25, 0.0))
    _, sums = algorithm.token_loss(x)
    assert float(sums["policy/entropy_coef"][0] / sums["policy/entropy_coef"][1]) == 0.25


def gradient_of_entropy(algorithm, x):
    def total(entropy):
        return algorithm.token_loss(replace(x, entropy=entropy))[0].sum()

    return np.asarray(jax.grad(total)(x.entropy))


def test_the_coefficients_of_kl_and_entropy_keep_each_others_state():
    given = KlSettings(coef=0.1, where="reward", kind="k2", target=1e-6)
    algorithm = make("grpo", kl=given, entropy=EntropySettings(target=0.5))
    _, state = trained_batch(algorithm, some_groups())
    state = algorithm.learned(state, {"policy/entropy": Metric(0.4, 1)})
    assert state["entropy_coef"] == pytest.approx(0.015) and state["kl_coef"] > 0.1
    _, later = trained_batch(algorithm, some_groups(), state)
    assert later["kl_coef"] > state["kl_coef"] and later["entropy"] == 0.4


# --- what is counted ---


def counted_weights(correction, aggregation="token-mean"):
    algorithm = make("grpo", old_policy="recompute", aggregation=aggregation, correction=correction)
    groups = some_groups()
    batch, _ = trained_batch(algorithm, groups)
    num = len(members_of(groups))
    return groups, batch.gather(batch.loss_weights, num)


@pytest.mark.parametrize(
    ("options", "keeps"),
    [
        (
            {"reject_stat": "ratio", "reject_low": 1.75, "reject_high": 2.0},
            lambda d: d >= np.log(1.75),
        ),
        ({"level": "token", "mode": "mask", "high": 1.75}, lambda d: d <= np.log(1.75)),
        ({"m2po": 0.31}, None),
    ],
)
def test_after_filter_counts_the_tokens_that_stay(options, keeps):
    before, after = (
        CorrectionSettings(**options, denominator=d) for d in ("before_filter", "after_filter")
    )
    groups, plain = counted_weights(before)
    _, got = counted_weights(after)
    d = [-0.1 * t.logprobs for t in members_of(groups)]  # of extras_of: old = 0.9 behaviour
    trained = [t.loss_mask & (t.reward.value is not None) for t in members_of(groups)]
    flat = np.concatenate([v[m] for v, m in zip(d, trained)])
    if keeps is None:
        num_kept = m2po_keep(flat[None], 0 * flat[None], np.ones((1, len(flat))), 0.31).sum()
    else:
        num_kept = keeps(flat).sum()
    assert 0 < num_kept < len(flat)
    for a, b, gap, mask in zip(got, plain, d, trained):
        if len(a):
            stays = gap[mask] <= np.sort(flat)[num_kept - 1] if keeps is None else keeps(gap[mask])
            np.testing.assert_allclose(b[mask], 1 / len(flat), rtol=1e-6)
            np.testing.assert_allclose(a[mask], stays.any() / num_kept, rtol=1e-6)


def test_after_filter_counts_sequences_that_keep_a_token():
    """OPSM drops negative sequences that drifted; here all negative ones did."""
    options = {"opsm_delta": 1e-9}
    groups = some_groups()

    def weights(denominator):
        algorithm = make(
            "grpo", old_policy="recompute", aggregation="seq-mean-token-sum",
            correction=CorrectionSettings(**options, denominator=denominator),
        )  # fmt: skip
        batch = pack(groups, ROWS)
        # Below the sampler's: mean log(behaviour / old) is positive, which is drift.
        old = batch.place([1.1 * t.logprobs for t in members_of(groups)], np.float32)
        batch, _ = with_advantages(
            batch, groups, {"old_logprobs": old}, algorithm, None, algorithm.settings
        )
        values = batch.gather(batch.advantages, len(members_of(groups)))
        return batch.gather(batch.loss_weights, len(values)), values

    (plain, values), (got, _) = weights("before_filter"), weights("after_filter")
    negative = [bool(len(v)) and v.sum() < 0 for v in values]
    scored = [
        bool(len(v)) and t.reward.value is not None for v, t in zip(values, members_of(groups))
    ]
    for i, t in enumerate(members_of(groups)):
        if scored[i]:
            assert plain[i][t.loss_mask] == pytest.approx(1 / sum(scored))
            want = 0.0 if negative[i] else 1 / (sum(scored) - sum(negative))
            assert got[i][t.loss_mask] == pytest.approx(want)
    assert 0 < sum(negative) < sum(scored)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"name": "kl_cov", "old_policy": "one_update"}, "the ratio is 1 at every update"),
        ({"name": "clip_cov", "cov_low": 6.0}, "cov_low=6.0 must be below cov_high=5.0"),
        ({"name": "kl_cov", "clip_low": 0.1}, "clip_low=0.1 is not read by kl_cov"),
        ({"name": "otb", "filter": FilterSettings(best_of=1)}, "needs that of every member"),
        ({"name": "gdpo", "reward_weights": {"a": 0.0}}, "are all 0, which leaves no reward"),
        ({"reward_weights": {"a": 1.0}}, "is not read by grpo but by gdpo"),
        ({"entropy": EntropySettings(delta=0.1)}, "no effect while entropy.target is 0"),
        ({"entropy": EntropySettings(0.5, low=0.2, high=0.1)}, "must be below entropy.high=0.1"),
        ({"entropy": EntropySettings(0.5, low=0.2)}, "lies outside entropy.low=0.2"),
        ({"name": "sft", "entropy": EntropySettings(0.5)}, "entropy.target=0.5 is not read by sft"),
        (
            {"correction": CorrectionSettings(veto=0.1, denominator="after_filter")},
            "needs algorithm.old_policy=recompute, not behaviour",
        ),
        (
            {
                "old_policy": "recompute",
                "correction": CorrectionSettings(denominator="after_filter"),
            },
            "nothing to leave out",
        ),
        (
            {
                "old_policy": "recompute",
                "correction": CorrectionSettings(denominator="after_filter", max_token_age=1),
            },
            "lower rollout.max_staleness",
        ),
    ],
)
def test_what_contradicts_is_refused_with_the_fix(given, line):
    found = [e for e in errors(4, **given) if line in e]
    assert len(found) == 1, errors(4, **given)
