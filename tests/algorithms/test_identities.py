"""The ten identities of the specification on random inputs; float64, so that equal means equal."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rl_jax.algorithms import ALGORITHMS, correction, kl, staleness
from rl_jax.algorithms import sequence_losses as sequence
from rl_jax.algorithms import token_losses as token
from rl_jax.algorithms.aggregate import AGGREGATIONS, token_weights
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.group_advantages import group_normalised, leave_one_out
from rl_jax.algorithms.preference import Side, pair_loss
from rl_jax.algorithms.token_advantages import discounted_returns, gae, whiten, whiten_parts
from rl_jax.learner.mismatch import mismatch_metrics, mismatch_totals
from rl_jax.settings import CorrectionSettings
from rl_jax.testing.trajectories import fake_group
from tests.algorithms.test_common import estimates, make
from tests.algorithms.test_whole_batch import members_of

# Few, the same each time; one that fails is told as it is, since each try compiles or runs eagerly.
FEW = settings(
    max_examples=8, deadline=None, database=None, derandomize=True, phases=[Phase.generate]
)
SEEDS = st.integers(0, 2**31 - 1)
ROWS, SLOTS = 3, 6


def batch_of(seed, one_token=False):
    """Rows of 1 to SLOTS trained tokens; old and behaviour log-probs near the policy's."""
    rng = np.random.default_rng(seed)
    lengths = np.ones(ROWS, int) if one_token else rng.integers(1, SLOTS + 1, ROWS)
    mask = np.arange(SLOTS) < lengths[:, None]
    logp = np.where(mask, -np.abs(rng.normal(size=mask.shape)), 0.0)

    def near():
        return np.where(mask, logp + rng.normal(size=mask.shape) * 0.2, 0.0)

    return LossInputs(
        logprobs=logp,
        entropy=np.zeros(mask.shape),
        behaviour_logprobs=near(),
        advantages=np.where(mask, rng.normal(size=(ROWS, 1)), 0.0),
        mask=mask,
        segment_ids=mask.astype(np.int32),
        turn_ids=np.zeros(mask.shape, np.int32),
        old_logprobs=near(),
        lag=np.zeros(mask.shape, np.int32),
    )


TOTALS = jax.jit(mismatch_totals, compiler_options={"xla_backend_optimization_level": 0})
LOSSES = {
    "reinforce": token.reinforce,
    "ppo": lambda x: token.ppo(x, clip_low=0.2, clip_high=0.2),
    "gspo": lambda x: sequence.gspo(x, clip_low=0.1, clip_high=0.1),
    "gspo_token": lambda x: sequence.gspo_token(x, clip_low=0.1, clip_high=0.1),
    "turn_ppo": lambda x: sequence.turn_ppo(x, clip_low=0.1, clip_high=0.1),
    "cispo": token.cispo,
    "truncated_is": lambda x: token.truncated_is(x, cap=1e9),
    "tis_pg": lambda x: token.truncated_is(x, cap=2.0),
    "sapo": token.sapo,
    "kimi_token": lambda x: token.kimi_token(x, tau=0.3),
    "vespo": sequence.vespo,
    "dppo": token.dppo,
    "dppo_kl": lambda x: token.dppo(x, divergence="kl"),
    "topr": sequence.topr,
    "topr_token": lambda x: sequence.topr(x, level="token"),
    "decoupled": lambda x: decoupled(x),
}


def decoupled(x):
    gap = correction.gap(x.old, x.behaviour_logprobs, x.mask, x.segment_ids, x.turn_ids)
    weights, _ = correction.importance_weights(gap, level="token", mode="mask", high=5.0)
    loss = token.ppo(x, clip_low=0.2, clip_high=0.2).loss
    return token.TokenLoss(weights * loss, {})


@cache
def program(name):
    def total(logprobs, rest, weights):
        x = LossInputs(logprobs=logprobs, **rest)
        out = LOSSES[name](x)
        return jnp.where(x.mask, weights * out.loss, 0.0).sum(), out.loss

    fast = {"xla_backend_optimization_level": 0}
    return jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=fast)


def run(name, x, aggregation="seq-mean-token-mean"):
    """(loss, gradient) of the aggregated loss."""
    weights = token_weights(x.mask, aggregation, norm_length=8)
    rest = {n: v for n, v in vars(x).items() if n != "logprobs"}
    with jax.enable_x64(True):
        (loss, _), grad = program(name)(x.logprobs, rest, weights)
    return float(loss), np.asarray(grad)


def on_policy(x):
    return replace(x, old_logprobs=x.logprobs, behaviour_logprobs=x.logprobs)


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "reinforce"])
@FEW
@given(SEEDS, st.sampled_from(AGGREGATIONS[:4]))
def test_1_on_policy_every_gradient_is_reinforce(name, seed, aggregation):
    if name in ("gspo", "turn_ppo") and aggregation != "seq-mean-token-mean":
        aggregation = (
            "seq-mean-token-mean"  # theirs: a token's gradient is a mean over the sequence
        )
    x = on_policy(batch_of(seed))
    want = run("reinforce", x, aggregation)[1]
    np.testing.assert_allclose(run(name, x, aggregation)[1], want, atol=1e-12)


@FEW
@given(SEEDS, st.floats(0.1, 10.0), st.floats(-5.0, 5.0))
def test_2_group_baselines(seed, scale, shift):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 6, 3)
    groups, rewards = np.repeat([7, -1, 3], sizes), rng.normal(size=sizes.sum())
    centred = group_normalised(rewards, groups, std_scope="none")
    n = np.repeat(sizes, sizes)
    np.testing.assert_allclose(leave_one_out(rewards, groups), centred * n / (n - 1), atol=1e-12)
    plain = group_normalised(rewards, groups, eps=0.0)
    moved = group_normalised(scale * rewards + shift, groups, eps=0.0)
    np.testing.assert_allclose(moved, plain, atol=1e-8)
    for values in (centred, plain, leave_one_out(rewards, groups)):
        assert all(abs(values[groups == g].sum()) < 1e-9 for g in groups)


@FEW
@given(SEEDS)
def test_3_special_cases_of_each_other(seed):
    single = batch_of(seed, one_token=True)
    for got, want in zip(run("gspo", single), run("turn_ppo", single)):
        np.testing.assert_allclose(got, want, atol=1e-12)
    narrow = replace(single, old_logprobs=single.logprobs - 0.05 * np.sign(single.advantages))
    np.testing.assert_allclose(run("gspo", narrow)[1], run("ppo", narrow)[1], atol=1e-12)
    x = batch_of(seed)
    np.testing.assert_allclose(run("turn_ppo", x)[1], run("gspo", x)[1], atol=1e-12)
    np.testing.assert_allclose(run("gspo_token", x)[1], run("gspo", x)[1], atol=1e-12)
    same = replace(x, behaviour_logprobs=x.old_logprobs)
    np.testing.assert_allclose(run("decoupled", same)[1], run("ppo", same)[1], atol=1e-12)
    fresh = replace(x, old_logprobs=x.logprobs)  # decoupled at one update: weights do what IS does
    np.testing.assert_allclose(run("decoupled", fresh)[1], run("truncated_is", x)[1], atol=1e-12)


@pytest.mark.parametrize("name", ["ppo", "gspo", "topr", "vespo"])
@FEW
@given(SEEDS, st.sampled_from(AGGREGATIONS[:5]))
def test_4_parts_of_a_step_add_up_to_it(name, seed, aggregation):
    x = batch_of(seed)
    weights = token_weights(x.mask, aggregation, norm_length=8)
    whole = run(name, x, aggregation)
    sums, grads = 0.0, []
    with jax.enable_x64(True):
        for row in range(ROWS):
            only = np.where(np.arange(ROWS)[:, None] == row, weights, 0.0)
            rest = {n: v for n, v in vars(x).items() if n != "logprobs"}
            (loss, _), grad = program(name)(x.logprobs, rest, only)
            sums, grads = sums + float(loss), [*grads, np.asarray(grad)]
    np.testing.assert_allclose(sums, whole[0], atol=1e-12)
    np.testing.assert_allclose(sum(grads), whole[1], atol=1e-12)


@FEW
@given(SEEDS, st.integers(1, 5))
def test_4_whitening_of_shards_is_whitening_of_the_whole(seed, num_parts):
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=(6, 4)), rng.random((6, 4)) < 0.7
    parts = list(zip(np.array_split(x, num_parts), np.array_split(mask, num_parts)))
    np.testing.assert_allclose(np.concatenate(whiten_parts(parts)), whiten(x, mask), atol=1e-12)


@pytest.mark.slow
@FEW
@given(SEEDS)
def test_5_kl_estimates_are_not_negative_and_the_unbiased_one_pulls_as_k2(seed):
    x = batch_of(seed)
    with jax.enable_x64(True):
        for kind in ("k2", "k3", "k3+", "abs"):
            values = kl.token_kl(x.logprobs, x.old_logprobs, x.mask, kind)
            assert (np.asarray(values) >= 0).all()

        def unbiased(logprobs):
            return kl.unbiased_kl(logprobs, x.logprobs, x.old_logprobs, x.mask).sum()

        def square(logprobs):
            return kl.token_kl(logprobs, x.old_logprobs, x.mask, "k2").sum()

        got, want = jax.grad(unbiased)(x.logprobs), jax.grad(square)(x.logprobs)
    np.testing.assert_allclose(got, want, atol=1e-12)


@FEW
@given(SEEDS)
def test_6_effective_sample_size(seed):
    x = batch_of(seed)
    off = np.zeros(x.mask.shape)
    equal = np.where(
        x.mask, x.logprobs - 0.3, 0.0
    )  # every token's weight is the same; the sequences' are not
    with jax.enable_x64(True):
        out, same = (
            mismatch_metrics(
                TOTALS(
                    *(jnp.asarray(a)[None] for a in (x.logprobs, old, x.mask, off.astype(int))),
                    *(jnp.asarray(a)[None] for a in (off > 0, x.segment_ids)),
                )
            )
            for old in (x.behaviour_logprobs, equal)
        )
    d = x.logprobs - x.behaviour_logprobs
    for weights, ess, chi2 in (
        (np.exp(d[x.mask]), "is/ess", "mismatch/chi2"),
        (np.exp(d.sum(axis=1)), "is/ess_sequence", "mismatch/chi2_sequence"),
    ):
        assert 0 < out[ess].mean <= 1
        assert out[chi2].mean == pytest.approx(weights.mean() ** 2 / out[ess].mean - 1, abs=1e-9)
        assert out[ess].mean < 1 or np.ptp(weights) < 1e-7
    assert same["is/ess"].mean == same["is/ess_lag0"].mean == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("beta", [0.05, 0.1, 0.5])
def test_7_preference_losses_at_the_reference(beta):
    x = batch_of(3)
    side = Side(x.logprobs, x.logprobs, x.mask)
    with jax.enable_x64(True):
        dpo = pair_loss(side, side, beta=beta)
        ipo = pair_loss(side, side, beta=beta, kind="ipo")
    np.testing.assert_allclose(dpo.loss, np.log(2), atol=1e-12)
    np.testing.assert_allclose(ipo.loss, 1 / (4 * beta**2), atol=1e-9)


@pytest.mark.slow
@FEW
@given(
    SEEDS,
    st.sampled_from(correction.WEIGHT_LEVELS),
    st.sampled_from(("truncate", "mask")),
    st.floats(0.9, 3.0),
)
def test_8_weights_never_exceed_the_cap_and_filters_only_take_away(seed, level, mode, high):
    x = batch_of(seed)
    with jax.enable_x64(True):
        gap = correction.gap(x.old, x.behaviour_logprobs, x.mask, x.segment_ids, x.turn_ids)
        weights, _ = correction.importance_weights(gap, level=level, mode=mode, high=high)
        keep = correction.passes(gap, stat="ratio", level="token", high=high, low=1 / high)
    assert (np.asarray(weights) <= high + 1e-12).all()
    assert not np.asarray(weights)[~x.mask].any()
    ratio = np.exp(x.old_logprobs - x.behaviour_logprobs)
    np.testing.assert_array_equal(keep, x.mask & (ratio <= high) & (ratio >= 1 / high))
    given = CorrectionSettings(reject_stat="ratio", reject_high=high, reject_low=1 / high)
    plain, filtered = (
        gradient_of(make("grpo", old_policy="recompute", correction=c), x)
        for c in (CorrectionSettings(), given)
    )
    # Exactly the others keep their loss, and exactly theirs: weights hold the whole count.
    np.testing.assert_array_equal(filtered, np.where(keep, plain, 0.0))
    assert (plain != 0).any()


def gradient_of(algorithm, x):
    def total(logprobs):
        loss, _ = algorithm.token_loss(replace(x, logprobs=logprobs))
        return (token_weights(x.mask, "seq-mean-token-mean") * loss).sum()

    with jax.enable_x64(True):
        return np.asarray(jax.grad(total)(jnp.asarray(x.logprobs)))


@pytest.mark.slow
@FEW
@given(SEEDS, st.integers(1, SLOTS - 1), st.integers(1, 4))
def test_9_an_observation_changes_no_return_and_no_token_loss(seed, at, width):
    x = batch_of(seed)
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, *x.mask.shape))

    def gapped(array, fill=0):
        hole = np.full((ROWS, width), fill, array.dtype)
        return np.concatenate([array[:, :at], hole, array[:, at:]], axis=1)

    mask = gapped(x.mask, False)
    for lam in (1.0, 0.9):
        plain = gae(rewards, values, x.mask, gamma=0.95, lam=lam)
        other = gae(gapped(rewards, 9.0), gapped(values, 9.0), mask, gamma=0.95, lam=lam)
        for a, b in zip(plain, other):
            np.testing.assert_allclose(b, gapped(a), atol=1e-12)
    returns = discounted_returns(rewards, x.mask, 0.9)
    np.testing.assert_allclose(discounted_returns(gapped(rewards), mask, 0.9), gapped(returns))
    np.testing.assert_allclose(whiten(gapped(returns), mask), gapped(whiten(returns, x.mask)))
    wide = LossInputs(**{n: None if v is None else gapped(v) for n, v in vars(x).items()})
    with jax.enable_x64(True):
        for name in ("ppo", "cispo", "sapo"):
            want = LOSSES[name](x).loss
            np.testing.assert_allclose(
                LOSSES[name](wide).loss, gapped(np.asarray(want)), atol=1e-12
            )


GROUPED = [n for n, e in ALGORITHMS.items() if e.policy and e.compares]


@pytest.mark.parametrize("name", [n for n in GROUPED if n not in ("gigpo", "turn_reinforce")])
@FEW
@given(SEEDS, st.integers(1, 4))
def test_9_an_observation_changes_no_advantage_of_a_group(name, seed, width):
    """Between any two turns; a turn-level estimator sees the same turns."""
    rng = np.random.default_rng(seed)
    groups = [
        fake_group(i, rng.normal(size=3).tolist(), rng.integers(8, 16, 3).tolist(), seed=seed)
        for i in range(2)
    ]
    wider = [
        replace(g, trajectories=tuple(with_gap(t, width) for t in g.trajectories)) for g in groups
    ]
    algorithm = make(name)
    for plain, gapped, t, w in zip(
        estimates(algorithm, groups),
        estimates(algorithm, wider),
        members_of(groups),
        members_of(wider),
    ):
        np.testing.assert_allclose(gapped[w.loss_mask], plain[t.loss_mask], atol=1e-6)
        assert not gapped[~w.loss_mask].any()


def with_gap(trajectory, width):
    """The trajectory with `width` more tokens of observation before its second turn."""
    at = int(np.argmax(trajectory.turn_ids == 1))
    fills = {"tokens": 9, "loss_mask": False, "logprobs": 0, "versions": -1, "context_mixed": False}
    arrays = {n: getattr(trajectory, n) for n in fills} | {"turn_ids": trajectory.turn_ids}
    fills["turn_ids"] = 0
    return replace(
        trajectory,
        **{n: np.insert(a, [at] * width, fills[n]).astype(a.dtype) for n, a in arrays.items()},
    )


@FEW
@given(SEEDS, st.integers(0, 3), st.integers(1, 8), st.integers(1, 24))
def test_10_what_is_consumed_is_never_older_than_the_bound(seed, max_staleness, batch, slots):
    """Random starts, finishes and steps with stragglers: admission, and the check at consumption."""
    rng = np.random.default_rng(seed)
    version = accepted = 0
    running: list[int] = []
    done: list[int] = []
    for _ in range(400):
        event = rng.integers(3)
        num_open = accepted + len(running) - version * batch
        room = staleness.admissible(num_open, max_staleness, batch)
        if event == 0 and min(room, slots - len(running)) > 0:
            running.append(version)
        elif event == 1 and running:
            last = len(running) - 1  # the oldest are stragglers
            done.append(running.pop(last if rng.random() < 0.9 else 0))
            accepted += 1
        elif event == 2 and len(done) >= batch:
            taken, done = done[:batch], done[batch:]
            assert all(staleness.is_fresh(version, v, max_staleness) for v in taken)
            version += 1
            stale = [v for v in done if not staleness.is_fresh(version, v, max_staleness)]
            done = [v for v in done if staleness.is_fresh(version, v, max_staleness)]
            aborted = [v for v in running if not staleness.is_fresh(version, v, max_staleness)]
            running = [v for v in running if staleness.is_fresh(version, v, max_staleness)]
            accepted -= len(stale)
            assert len(done) <= staleness.buffer_limit(max_staleness, batch)
            assert all(version - v == max_staleness + 1 for v in (*stale, *aborted))
