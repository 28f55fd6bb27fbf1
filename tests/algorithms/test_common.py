"""What every name of ALGORITHMS must do. A new algorithm is one file, one line in the table, and this suite."""

import importlib
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import ALGORITHMS, options
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.settings import AlgorithmSettings
from rl_jax.testing.trajectories import fake_group
from rl_jax.types import Outcome

KNOWN_NEEDS = {
    "old_logprobs",
    "sum_squares",
    "reference_logprobs",
    "teacher_logprobs",
    "values",
    "rewards",
    "routes",
}
# The gradient goes through a ratio, which is clamped; elsewhere through log p.
THROUGH_RATIO = {"grpo", "dr_grpo", "rloo", "opo", "maxrl", "ppo", "reinforce_pp", "reinforce_pp_baseline", "gspo",
                 "turn_ppo", "gmpo", "sapo", "decoupled_ppo", "gigpo", "turn_reinforce", "grpo_passk", "gdpo", "otb",
                 "clip_cov"}  # fmt: skip
SEQUENCE = {"grpo", "dr_grpo", "rloo", "opo", "maxrl", "gspo", "turn_ppo", "cispo", "aipo", "gmpo", "sapo", "dppo",
            "kimi", "vespo", "topr", "decoupled_ppo", "dpo", "sft", "grpo_passk",
            "gdpo", "kl_cov"}  # one advantage a sequence  # fmt: skip


def make(name, **options):
    module, attribute = ALGORITHMS[name].target.split(":")
    settings = AlgorithmSettings(name=name, **{"entropy_coef": 0.01, **options})
    return getattr(importlib.import_module(module), attribute)(settings)


@pytest.fixture(params=ALGORITHMS)
def algorithm(request):
    return make(request.param)


def extras_of(groups):
    """What learner.score would give: an array per trajectory, which depends on the trajectory alone."""
    members = [t for group in groups for t in group.trajectories]
    return {
        "old_logprobs": [t.logprobs * np.float32(0.9) for t in members],
        "sum_squares": [np.exp(t.logprobs) * np.float32(0.9) for t in members],
        "reference_logprobs": [t.logprobs * np.float32(1.1) for t in members],
        "teacher_logprobs": [t.logprobs * np.float32(0.8) for t in members],
        "values": [np.where(t.loss_mask, t.logprobs, 0) for t in members],
        "rewards": [np.where(t.loss_mask, t.logprobs[-1], 0) for t in members],
        "reward_scores": [np.where(t.loss_mask, t.logprobs, 0) for t in members],
    }


def estimates(algorithm, groups):
    return algorithm.advantages(groups, extras_of(groups), None)[0]


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
        old_logprobs=logprobs + draw(0.1),
        reference_logprobs=logprobs + draw(0.3),
        teacher_logprobs=logprobs + draw(0.3),
        lag=mask.astype(np.int32),
        selected=(mask & (np.arange(shape[1]) % 2 == 0)).astype(np.float32),
    )
    return replace(x, **changes)


@lru_cache
def jitted(name):
    """One program an algorithm: the inputs are arguments."""
    algorithm = make(name)

    def total(logprobs, entropy, rest):
        x = LossInputs(logprobs=logprobs, entropy=entropy, **rest)
        loss, sums = algorithm.token_loss(x)
        return jnp.where(x.mask, loss, 0.0).sum(), (loss, sums)

    run = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def loss_and_gradient(algorithm, x):
    rest = {n: v for n, v in vars(x).items() if n not in ("logprobs", "entropy")}
    (_, (loss, sums)), grads = jitted(algorithm.settings.name)(x.logprobs, x.entropy, rest)
    return np.asarray(loss), [np.asarray(g) for g in grads], sums


def test_table_and_class_agree(algorithm):
    entry = ALGORITHMS[algorithm.settings.name]
    assert entry.target.endswith(":" + type(algorithm).__name__)
    for field in ("defaults", "needs", "compares", "pulls", "needs_lag", "reads_reward"):
        said = vars(type(algorithm)).get(field)  # what a class says too, as a plugin's does
        assert said is None or said == getattr(entry, field)
    own = {"old_logprobs"} if entry.defaults.get("old_policy") == "recompute" else set()
    assert algorithm.needs == entry.needs | own <= KNOWN_NEEDS
    assert isinstance(algorithm.samples, bool)
    assert options.resolved(algorithm.settings) == algorithm.settings
    for key, value in entry.defaults.items():
        assert options.get(algorithm.settings, key) == value or key == "entropy_coef"


def test_what_stands_off_the_mask_changes_nothing(algorithm):
    x = some_inputs()
    loss, grads, sums = loss_and_gradient(algorithm, x)
    for junk in (np.nan, np.inf, -np.inf):
        fields = (
            "logprobs", "entropy", "behaviour_logprobs", "advantages", "old_logprobs", "reference_logprobs",
            "teacher_logprobs", "selected",
        )  # fmt: skip
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
        far = x.logprobs - np.float32(gap)
        x = replace(x, behaviour_logprobs=far, old_logprobs=far)
        loss, grads, _ = loss_and_gradient(algorithm, x)
        assert np.isfinite(loss).all() and all(np.isfinite(g).all() for g in grads)
        if abs(gap) > 20 and algorithm.settings.name in THROUGH_RATIO:
            assert not grads[0].any()  # outside the clamp nothing may pull


def test_sums_count_the_trained_tokens(algorithm):
    x = some_inputs()
    _, _, sums = loss_and_gradient(algorithm, x)
    num_sequences = int(x.mask.any(axis=1).sum())  # one a row
    for name, (total, count) in sums.items():
        counted = num_sequences if name.endswith("_sequences") else int(x.mask.sum())
        assert np.isfinite(total) and count == counted, name


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
    advantages = estimates(algorithm, groups)
    assert len(advantages) == len(members)
    for values, member in zip(advantages, members, strict=True):
        assert values.dtype == np.float32 and values.shape == member.tokens.shape
        assert np.isfinite(values).all()
        assert not values[~member.loss_mask].any()
        if algorithm.settings.name in SEQUENCE:
            assert len(set(values[member.loss_mask].tolist())) <= 1


def test_zero_advantage_pulls_nowhere(algorithm):
    x = some_inputs()
    x = replace(x, advantages=np.zeros_like(x.advantages))
    _, (gradient, _), _ = loss_and_gradient(algorithm, x)
    assert bool(gradient.any()) == ALGORITHMS[algorithm.settings.name].pulls


def test_order_of_groups_and_members_changes_no_pairing(algorithm):
    """L17: each trajectory keeps its own advantage however completion ordered them."""
    groups = some_groups()

    def by_uid(groups):
        values = estimates(algorithm, groups)
        members = [t for group in groups for t in group.trajectories]
        return {t.uid: v.tolist() for t, v in zip(members, values, strict=True)}

    shuffled = [replace(g, trajectories=g.trajectories[::-1]) for g in groups[::-1]]
    want, got = by_uid(groups), by_uid(shuffled)
    assert got.keys() == want.keys()
    for uid in want:
        np.testing.assert_allclose(got[uid], want[uid], rtol=1e-6, atol=1e-9)


def test_failed_members_are_left_out_and_never_train(algorithm):
    rewards, lengths = [1.0, 0.0, 0.5], [8, 9, 10]
    whole = fake_group(0, rewards, lengths)
    for outcome in (Outcome.FAILED, Outcome.CANCELLED):
        failed = replace(whole.trajectories[2], outcome=outcome)
        group = replace(whole, trajectories=(*whole.trajectories[:2], failed))
        assert not algorithm.trains(failed)
        values = estimates(algorithm, [group])
        alone = estimates(algorithm, [replace(whole, trajectories=whole.trajectories[:2])])
        for got, want in zip(values[:2], alone, strict=True):
            np.testing.assert_array_equal(got, want)


def test_a_batch_without_episodes_has_the_inputs_of_any_other(algorithm):
    """From it the dry run lowers the step's program."""
    groups = some_groups()
    told = algorithm.token_inputs(groups, estimates(algorithm, groups), extras_of(groups), None)
    nothing = algorithm.token_inputs((), (), dict.fromkeys(extras_of(groups), ()), None)
    assert nothing.keys() == told.keys() and not any(len(arrays) for arrays in nothing.values())


def test_select_accounts_for_every_group(algorithm):
    groups = some_groups()
    kept, dropped = algorithm.select(groups)
    assert sorted([g.uid for g in kept] + [uid for uid, _ in dropped]) == [g.uid for g in groups]
