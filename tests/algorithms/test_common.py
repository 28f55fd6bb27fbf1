"""What every name of ALGORITHMS must do. A new algorithm is one file, one line in the table, and this suite."""

import importlib
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import ALGORITHMS
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.settings import AlgorithmSettings
from rl_jax.testing.trajectories import fake_group
from rl_jax.types import Outcome

SETTINGS = AlgorithmSettings(entropy_coef=0.01)
KNOWN_NEEDS = {"old_logprobs", "reference_logprobs", "teacher_logprobs", "values", "routes"}


@pytest.fixture(params=ALGORITHMS)
def algorithm(request):
    module, attribute = ALGORITHMS[request.param][0].split(":")
    return getattr(importlib.import_module(module), attribute)(SETTINGS)


def some_groups():
    return [
        fake_group(0, [0.0, 1.0, 1.0, 0.0], [8, 12, 9, 15]),
        fake_group(1, [0.5, 0.5, 0.5], [8, 8, 20]),
        fake_group(2, [1.0], [10]),
        fake_group(3, [0.0, 2.0, -1.0, None], [11, 7, 30, 9]),
    ]


def some_inputs(seed=0, shape=(3, 6), **changes):
    rng = np.random.default_rng(seed)
    mask = np.arange(shape[1]) < np.array([[6], [0], [3]])[: shape[0]]

    def draw(scale=1.0):
        return np.where(mask, rng.normal(size=shape) * scale, 0.0).astype(np.float32)

    logprobs = -np.abs(draw())
    x = LossInputs(
        logprobs=logprobs,
        entropy=np.abs(draw()),
        behaviour_logprobs=logprobs + draw(0.3),
        advantages=draw(),
        mask=mask,
        segment_ids=mask.astype(np.int32),
        turn_ids=np.zeros(shape, np.int32),
    )
    return replace(x, **changes)


@lru_cache
def jitted(algorithm_class):
    """One program an algorithm: the inputs are arguments."""
    algorithm = algorithm_class(SETTINGS)

    def total(logprobs, entropy, rest):
        x = LossInputs(logprobs=logprobs, entropy=entropy, **rest)
        loss, sums = algorithm.token_loss(x)
        return jnp.where(x.mask, loss, 0.0).sum(), (loss, sums)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


def loss_and_gradient(algorithm, x):
    rest = {n: v for n, v in vars(x).items() if n not in ("logprobs", "entropy")}
    (_, (loss, sums)), grads = jitted(type(algorithm))(x.logprobs, x.entropy, rest)
    return np.asarray(loss), [np.asarray(g) for g in grads], sums


def test_table_and_class_agree(algorithm):
    name = next(n for n, (path, _) in ALGORITHMS.items() if path.endswith(type(algorithm).__name__))
    assert algorithm.needs == ALGORITHMS[name][1] <= KNOWN_NEEDS
    assert isinstance(algorithm.samples, bool)


def test_what_stands_off_the_mask_changes_nothing(algorithm):
    x = some_inputs()
    loss, grads, sums = loss_and_gradient(algorithm, x)
    for junk in (np.nan, np.inf, -np.inf):
        fields = ("logprobs", "entropy", "behaviour_logprobs", "advantages")
        poisoned = {n: np.where(x.mask, getattr(x, n), np.float32(junk)) for n in fields}
        bad = replace(x, **poisoned)
        loss_bad, grads_bad, sums_bad = loss_and_gradient(algorithm, bad)
        np.testing.assert_array_equal(np.where(x.mask, loss_bad, 0), np.where(x.mask, loss, 0))
        for got, want in zip(grads_bad, grads, strict=True):
            np.testing.assert_array_equal(got, want)
        assert jax.tree.map(float, sums_bad) == jax.tree.map(float, sums)


def test_loss_and_gradient_are_finite_at_any_ratio(algorithm):
    for gap in (-100.0, -20.0, 20.0, 100.0):
        x = some_inputs()
        x = replace(x, behaviour_logprobs=x.logprobs - np.float32(gap))
        loss, grads, _ = loss_and_gradient(algorithm, x)
        assert np.isfinite(loss).all() and all(np.isfinite(g).all() for g in grads)
        if algorithm.samples and abs(gap) > 20:  # outside the clamp nothing may pull
            assert not grads[0].any()


def test_sums_count_the_trained_tokens(algorithm):
    x = some_inputs()
    _, _, sums = loss_and_gradient(algorithm, x)
    for name, (total, count) in sums.items():
        assert np.isfinite(total) and count == int(x.mask.sum()), name


def test_rows_do_not_speak_to_each_other(algorithm):
    x = some_inputs()
    loss, grads, _ = loss_and_gradient(algorithm, x)
    order = np.array([2, 0, 1])
    moved = LossInputs(**{n: v if v is None else v[order] for n, v in vars(x).items()})
    loss_moved, grads_moved, _ = loss_and_gradient(algorithm, moved)
    np.testing.assert_array_equal(loss_moved, loss[order])
    np.testing.assert_array_equal(grads_moved[0], grads[0][order])


def test_advantages_stand_on_the_sampled_tokens_only(algorithm):
    """Neither one to the left nor one to the right: the learner shifts, once, and nobody else."""
    groups = some_groups()
    members = [t for group in groups for t in group.trajectories]
    advantages, _ = algorithm.advantages(groups, {}, None)
    assert len(advantages) == len(members)
    for values, member in zip(advantages, members, strict=True):
        assert values.dtype == np.float32 and values.shape == member.tokens.shape
        assert np.isfinite(values).all()
        assert not values[~member.loss_mask].any()
        assert len(set(values[member.loss_mask].tolist())) <= 1


def test_zero_advantage_pulls_nowhere(algorithm):
    x = some_inputs()
    x = replace(x, advantages=np.zeros_like(x.advantages))
    _, (gradient, _), _ = loss_and_gradient(algorithm, x)
    assert algorithm.samples != bool(gradient.any())


def test_order_of_groups_and_members_changes_no_pairing(algorithm):
    """L17: each trajectory keeps its own advantage however completion ordered them."""
    groups = some_groups()

    def by_uid(groups):
        values, _ = algorithm.advantages(groups, {}, None)
        members = [t for group in groups for t in group.trajectories]
        return {t.uid: v.tolist() for t, v in zip(members, values, strict=True)}

    shuffled = [replace(g, trajectories=g.trajectories[::-1]) for g in groups[::-1]]
    want, got = by_uid(groups), by_uid(shuffled)
    assert got.keys() == want.keys()
    for uid in want:
        np.testing.assert_allclose(got[uid], want[uid], rtol=1e-6, atol=0)


def test_failed_members_are_left_out_and_never_train(algorithm):
    rewards, lengths = [1.0, 0.0, 0.5], [8, 9, 10]
    whole = fake_group(0, rewards, lengths)
    for outcome in (Outcome.FAILED, Outcome.CANCELLED):
        failed = replace(whole.trajectories[2], outcome=outcome)
        group = replace(whole, trajectories=(*whole.trajectories[:2], failed))
        assert not algorithm.trains(failed)
        values, _ = algorithm.advantages([group], {}, None)
        alone, _ = algorithm.advantages(
            [replace(whole, trajectories=whole.trajectories[:2])], {}, None
        )
        for got, want in zip(values[:2], alone, strict=True):
            np.testing.assert_array_equal(got, want)


def test_select_accounts_for_every_group(algorithm):
    groups = some_groups()
    kept, dropped = algorithm.select(groups)
    assert sorted([g.uid for g in kept] + [uid for uid, _ in dropped]) == [g.uid for g in groups]
