"""What every name of ALGORITHMS must do. A new algorithm is one file, one line in the table, and this suite."""

import importlib
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import ALGORITHMS, Entry, options
from rl_jax.algorithms.advantages import Scored
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.settings import AlgorithmSettings
from rl_jax.testing.trajectories import fake_group
from rl_jax.types import Outcome

KNOWN_NEEDS = {
    "old_logprobs",
    "sum_squares",
    "reference_logprobs",
    "teacher_logprobs",
    "teacher_divergence",
    "values",
    "rewards",
    "routes",
}


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
        fake_group(3, [0.0, 2.0, -1.0, None, 0.3], [11, 7, 30, 9, 14]),
        fake_group(4, [0.1, 0.7], [13, 8]),
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
        teacher_divergence=np.abs(draw(0.3)),
        lag=mask.astype(np.int32),
        selected=(mask & (np.arange(shape[1]) % 2 == 0)).astype(np.float32),
    )
    return replace(x, **changes)


def following(x, logprobs):
    """The inputs at these log-probs; their teacher_divergence follows the policy too, here by a slope of 1."""
    slope = logprobs - jax.lax.stop_gradient(logprobs)
    return replace(x, logprobs=logprobs, teacher_divergence=x.teacher_divergence + slope)


@lru_cache
def jitted(name):
    """One program an algorithm: the inputs are arguments."""
    algorithm = make(name)

    def total(logprobs, entropy, rest):
        x = LossInputs(logprobs=logprobs, entropy=entropy, **rest)
        loss, sums = algorithm.token_loss(following(x, logprobs))
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
    for field in Entry._fields[1:]:
        said = vars(type(algorithm)).get(field)  # what a class says too, as a plugin's does
        assert said is None or said == getattr(entry, field)
    own = {"old_logprobs"} if entry.defaults.get("old_policy") == "recompute" else set()
    own |= {"teacher_logprobs"} if entry.defaults.get("teacher_coef") else set()
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
            "teacher_logprobs", "teacher_divergence", "selected",
        )  # fmt: skip
        poisoned = {n: np.where(x.mask, getattr(x, n), np.float32(junk)) for n in fields}
        bad = replace(x, **poisoned)
        loss_bad, grads_bad, sums_bad = loss_and_gradient(algorithm, bad)
        np.testing.assert_array_equal(np.where(x.mask, loss_bad, 0), np.where(x.mask, loss, 0))
        for got, want in zip(grads_bad, grads, strict=True):
            np.testing.assert_array_equal(got, want)
        assert jax.tree.map(float, sums_bad) == jax.tree.map(float, sums)


def test_loss_and_gradient_are_finite_at_any_ratio(algorithm):
    found = {}
    for gap in (-100.0, -50.0, -20.0, 20.0, 50.0, 100.0):
        x = some_inputs()
        far = x.logprobs - np.float32(gap)
        x = replace(x, behaviour_logprobs=far, old_logprobs=far)
        loss, grads, _ = loss_and_gradient(algorithm, x)
        assert np.isfinite(loss).all() and all(np.isfinite(g).all() for g in grads)
        found[gap] = grads[0]
    if not ALGORITHMS[algorithm.settings.name].pulls:
        for side in (-1, 1):  # outside the clamp of +-20 no ratio moves any more
            np.testing.assert_array_equal(found[side * 100.0], found[side * 50.0])


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


def test_a_microbatch_knows_nothing_of_the_others(algorithm):
    """The loss of the whole is the sum of its parts', so no count of the batch may be in it."""
    x = some_inputs()
    loss, grads, sums = loss_and_gradient(algorithm, x)
    parts = [
        LossInputs(**{n: v if v is None else v[row : row + 1] for n, v in vars(x).items()})
        for row in range(len(x.mask))
    ]
    found = [loss_and_gradient(algorithm, part) for part in parts]
    rows, slopes = (np.concatenate(a) for a in zip(*((f[0], f[1][0]) for f in found), strict=True))
    np.testing.assert_allclose(rows, loss, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(slopes, grads[0], rtol=1e-6, atol=1e-7)
    for name, (total, count) in sums.items():
        assert float(count) == sum(float(f[2][name][1]) for f in found)
        assert float(total) == pytest.approx(sum(float(f[2][name][0]) for f in found), abs=1e-5)


def test_sequences_of_one_row_do_not_speak_to_each_other(algorithm):
    """Two sequences side by side in one row, and each in a row of its own."""
    x = some_inputs()
    apart = {n: v for n, v in vars(x).items() if v is not None}
    second = {n: np.concatenate([v[:1, 3:], np.zeros_like(v[:1, :3])], 1) for n, v in apart.items()}
    first = {n: np.concatenate([v[:1, :3], np.zeros_like(v[:1, :3])], 1) for n, v in apart.items()}
    apart = {
        n: np.concatenate([first[n], second[n], np.zeros_like(v[:1])]) for n, v in apart.items()
    }
    packed = {
        n: np.concatenate([v[:1], np.zeros_like(v[:2])])
        for n, v in vars(x).items()
        if v is not None
    }
    packed["segment_ids"][0, 3:] = 2
    loss, (grads, _), sums = loss_and_gradient(algorithm, LossInputs(**apart))
    got, (slopes, _), told = loss_and_gradient(algorithm, LossInputs(**packed))
    for a, b in ((loss, got), (grads, slopes)):
        np.testing.assert_allclose(b[0], np.concatenate([a[0, :3], a[1, :3]]), rtol=1e-6, atol=1e-7)
    for name in sums:
        np.testing.assert_allclose(told[name], sums[name], rtol=1e-5, atol=1e-6)


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
        if not ALGORITHMS[algorithm.settings.name].by_token:
            assert len(set(values[member.loss_mask].tolist())) <= 1


def test_zero_advantage_pulls_nowhere(algorithm):
    x = some_inputs()
    x = replace(x, advantages=np.zeros_like(x.advantages))
    _, (gradient, _), _ = loss_and_gradient(algorithm, x)
    assert bool(gradient.any()) == ALGORITHMS[algorithm.settings.name].pulls


def by_uid(algorithm, groups):
    values = estimates(algorithm, groups)
    members = [t for group in groups for t in group.trajectories]
    return {t.uid: v.tolist() for t, v in zip(members, values, strict=True)}


def same_advantages(got, want):
    assert got.keys() == want.keys()
    for uid in want:
        np.testing.assert_allclose(got[uid], want[uid], rtol=1e-6, atol=1e-9)


def test_order_of_groups_and_members_changes_no_pairing(algorithm):
    """L17: each trajectory keeps its own advantage however completion ordered them."""
    groups = some_groups()
    want = by_uid(algorithm, groups)
    rng = np.random.default_rng(0)
    for _ in range(4):  # sizes differ, so no block stays at its place
        mixed = [
            replace(g, trajectories=tuple(g.trajectories[i] for i in rng.permutation(len(g.trajectories))))
            for g in (groups[i] for i in rng.permutation(len(groups)))
        ]  # fmt: skip
        same_advantages(by_uid(algorithm, mixed), want)


def test_members_of_a_group_need_not_stand_side_by_side(algorithm):
    """Groups are told by their id: what an estimator sees may be in any order."""
    if not isinstance(algorithm, PolicyAlgorithm):
        return  # it has no estimate(), and gets whole groups
    groups = some_groups()
    scored, _ = algorithm._scored(groups, extras_of(groups), None)
    order = np.random.default_rng(1).permutation(len(scored.members))

    def taken(values):
        return values[order] if isinstance(values, np.ndarray) else [values[i] for i in order]

    mixed = Scored(
        taken(scored.members), taken(scored.rewards), taken(scored.groups), taken(scored.valid), taken(scored.trained),
        None, {name: taken(arrays) for name, arrays in scored.extras.items()},
    )  # fmt: skip

    def named(scored):
        values = algorithm.estimate(scored)
        return {t.uid: v.tolist() for t, v in zip(scored.members, values, strict=True)}

    same_advantages(named(mixed), named(scored))


def test_a_group_without_a_signal_has_advantage_exactly_0(algorithm):
    """Of equal rewards, or of one: rounding over a std, or a raw reward, would train."""
    entry = ALGORITHMS[algorithm.settings.name]
    if not (entry.compares and entry.reads_reward):
        return
    flat = [
        fake_group(0, [0.1] * 6, [8, 9, 10, 11, 12, 7]),
        fake_group(1, [7.3], [10]),
        fake_group(2, [-0.7] * 3, [8, 8, 20]),
        fake_group(3, [0.3, 0.3, None], [8, 9, 10]),
    ]
    # A discount tells equal rewards apart by when they come.
    plain = {"gamma": 1.0} if "gamma" in entry.defaults else {}
    scaled = {"normalize": True} if "normalize" in entry.defaults else {}
    for given in (plain, {**plain, **scaled}):
        one = make(algorithm.settings.name, **given)
        for values in estimates(one, flat):
            assert not values.any()
        if entry.whitens:
            continue
        beside = estimates(one, [fake_group(9, [0.1, 0.7, 0.3], [9, 8, 12]), *flat])
        assert any(values.any() for values in beside[:3])
        for values in beside[3:]:
            assert not values.any()


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
