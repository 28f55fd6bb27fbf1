"""The learner's step against a slow reference, in every layout, and through all that can be wrong with a batch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_jax.algorithms.grpo import Grpo
from rl_jax.learner.batch import empty_batch, pack, with_advantages
from rl_jax.learner.learner import Learner, batch_metrics
from rl_jax.learner.trained import NonFiniteError
from rl_jax.lowering import LoweringError
from rl_jax.mesh import TRAIN_RULES, make_mesh
from rl_jax.models.attention import attention, causal_segment_mask
from rl_jax.settings import AlgorithmSettings, LearnerSettings
from rl_jax.testing.tiny_model import tiny_model
from rl_jax.testing.trajectories import PROMPT, fake_group, fake_trajectory

TEMPERATURE = 0.7
ALGORITHM = AlgorithmSettings(clip_low=0.2, clip_high=0.28, entropy_coef=0.01)
# grad_clip far away, so that Adam's first moment after one step is (1 - b1) * gradient.
SETTINGS = LearnerSettings(row_tokens=24, microbatch_rows=2, logprob_chunk=16, grad_clip=1e9)


@pytest.fixture(scope="module")
def model_and_params():
    return tiny_model(num_layers=1, embed_size=16, num_heads=2, num_kv_heads=2, mlp_size=32)


def make_learner(model, axes=None, settings=SETTINGS, algorithm=ALGORITHM, **kw):
    axes = axes or {}
    mesh = make_mesh(axes, jax.devices()[: int(np.prod(list(axes.values()), initial=1))])
    return Learner(
        model, mesh, TRAIN_RULES, Grpo(algorithm), settings,
        max_rows=16, temperature=TEMPERATURE, total_steps=10, **kw,
    )  # fmt: skip


@pytest.fixture(scope="module")
def shared(model_and_params, tmp_path_factory):
    """One compiled learner for the whole file; `learner` hands it out with fresh weights."""
    return make_learner(model_and_params[0], dump_dir=tmp_path_factory.mktemp("dump"))


@pytest.fixture
def learner(shared, model_and_params):
    shared.reset(model_and_params[1])
    return shared


def some_groups(version=0):
    """64 tokens and more: a full row, one trained token, none, and an unscored member."""
    return [
        fake_group(0, [0.0, 1.0, 1.0], [24, 10, PROMPT + 1], version=version),
        fake_group(1, [1.0, 0.0], [17, PROMPT], version=version),
        fake_group(2, [0.5, 2.0, None, -1.0], [7, 9, 9, 21], version=version),
    ]


def batch_for(learner, groups, needs=()):
    batch = pack(groups, learner.settings)
    extras = learner.score(batch, needs)
    algorithm = learner.algorithm
    return with_advantages(batch, groups, extras, algorithm, None, algorithm.settings)[0]


def gradient_of(learner, groups, params, version=0):
    """(loss, gradient) of one step from params."""
    learner.reset(params)
    metrics = learner.step(batch_for(learner, groups), version)
    moments = optax.tree_utils.tree_get(learner.state.opt_state, "mu")
    scale = 1 / (1 - learner.settings.adam_b1)
    gradient = {name: np.asarray(m) * scale for name, m in jax.device_get(moments).items()}
    return metrics, gradient


def reference_gradient(model, params, groups):
    """(loss, gradient) with one padded row a trajectory, all logits at once and the formulas written out."""
    algorithm = Grpo(ALGORITHM)
    members = [t for group in groups for t in group.trajectories]
    advantages, _ = algorithm.advantages(groups, {}, None)
    width = max(len(t.tokens) for t in members)

    def rows(values, dtype):
        out = np.zeros((len(members), width), dtype)
        for row, value in zip(out, values, strict=True):
            row[: len(value)] = value
        return out

    tokens = rows([t.tokens for t in members], np.int32)
    mask = rows([t.loss_mask & algorithm.trains(t) for t in members], bool)
    behaviour = rows([t.logprobs for t in members], np.float32)
    advantage = rows(advantages, np.float32)
    positions = np.broadcast_to(np.arange(width), tokens.shape)
    segments = rows([np.ones(len(t.tokens)) for t in members], np.int32)

    def loss(params):
        visible = causal_segment_mask(positions, positions, segments, segments)
        hidden = model.hidden(
            params, tokens, positions, lambda _, q, k, v: attention(q, k, v, visible)
        )
        table = jax.nn.log_softmax(model.logits(params, hidden) / TEMPERATURE)[:, :-1]
        logprobs = jnp.take_along_axis(table, tokens[:, 1:, None], axis=-1)[..., 0]
        entropy = -(jnp.exp(table) * table).sum(-1)
        on, a = mask[:, 1:], advantage[:, 1:]
        ratio = jnp.exp(jnp.where(on, logprobs - behaviour[:, 1:], 0.0))
        bounded = jnp.clip(ratio, 1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high)
        token_loss = jnp.maximum(-a * ratio, -a * bounded) - ALGORITHM.entropy_coef * entropy
        return jnp.where(on, token_loss, 0.0).sum() / on.sum()

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.fixture(scope="module")
def reference(model_and_params):
    return jax.device_get(reference_gradient(*model_and_params, some_groups()))


def assert_close(got, want, what=""):
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, atol=1e-5, err_msg=f"{what} {name}")


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradient_is_clipped_to_its_bound(model_and_params, reference):
    learner = make_learner(model_and_params[0], settings=replace(SETTINGS, grad_clip=1e-3))
    metrics, got = gradient_of(learner, some_groups(), model_and_params[1])
    norm = metrics["optim/grad_norm"].mean  # the one before
    assert norm > 0.01 and metrics["optim/grad_norm_clipped"].mean == pytest.approx(1e-3, rel=1e-4)
    assert np.sqrt(sum(np.square(g).sum() for g in got.values())) == pytest.approx(1e-3, rel=1e-4)
    assert_close(got, {name: g * 1e-3 / norm for name, g in reference[1].items()})


@pytest.mark.slow
def test_master_weights_keep_updates_that_bfloat16_would_lose(model_and_params):
    model, params = tiny_model(
        num_layers=1, embed_size=16, num_heads=2, num_kv_heads=2, mlp_size=32, dtype="bfloat16"
    )
    learner = make_learner(model, settings=replace(SETTINGS, learning_rate=1e-5))
    gradient_of(learner, some_groups(), params)
    after = learner.params
    assert all(array.dtype == jnp.float32 for array in after.values())
    name = max(after, key=lambda n: after[n].size)
    before, now = np.asarray(params[name]), np.asarray(after[name])
    moved = now != before
    assert moved.mean() > 0.5
    lost = now.astype(jnp.bfloat16) == before.astype(jnp.bfloat16)
    assert (moved & lost).sum() > 0.5 * moved.sum()


@pytest.mark.slow
def test_loss_gradient_and_update_equal_a_slow_reference(learner, model_and_params, reference):
    params, (loss, gradient) = model_and_params[1], reference
    metrics, got = gradient_of(learner, some_groups(), params)
    assert (
        metrics["optim/grad_norm_clipped"].mean == metrics["optim/grad_norm"].mean
    )  # below the bound
    assert metrics["policy/loss"].mean == pytest.approx(float(loss), abs=1e-5)
    assert metrics["optim/grad_norm"].mean == pytest.approx(
        np.sqrt(sum(np.square(g).sum() for g in gradient.values())), rel=1e-4
    )
    assert_close(got, gradient)
    s = learner.settings
    adamw = optax.adamw(s.learning_rate, s.adam_b1, s.adam_b2, s.adam_eps, weight_decay=0.0)
    updates, _ = adamw.update(gradient, adamw.init(params), params)
    # Adam divides by the gradient's own size: where that is at rounding, only the bound remains.
    for name, want in optax.apply_updates(params, updates).items():
        clear = np.abs(gradient[name]) > 1e-4
        after = np.asarray(learner.params[name])
        np.testing.assert_allclose(after[clear], np.asarray(want)[clear], atol=1e-5)
        assert np.abs(after - np.asarray(params[name])).max() < 1.01 * s.learning_rate


LAYOUT = ({"data": 2, "fsdp": 2}, {"microbatch_rows": 4, "row_tokens": 40, "logprob_chunk": 28})
MORE_LAYOUTS = [
    ({}, {"microbatch_rows": 1, "logprob_chunk": 7}),
    ({}, {"microbatch_rows": 8, "row_tokens": 64, "remat": "layer"}),
    ({"fsdp": 2, "tensor": 2}, {"microbatch_rows": 2, "logprob_chunk": 1024}),
]


def check_layout(learner, params, reference, axes, changes):
    loss, gradient = reference
    plain, _ = gradient_of(learner, some_groups(), params)
    other = make_learner(learner.model, axes, replace(SETTINGS, **changes))
    metrics, got = gradient_of(other, some_groups(), params)
    # L32: shards with few tokens and with many; what one device says is the mean over all tokens.
    assert metrics.keys() == plain.keys()
    for name in set(plain) - {"batch/fill"}:
        want = plain[name]
        assert metrics[name].count == pytest.approx(want.count, abs=1e-5), name
        assert metrics[name].mean == pytest.approx(want.mean, rel=1e-4, abs=1e-5), name
    assert metrics["policy/loss"].mean == pytest.approx(float(loss), abs=1e-5)
    assert_close(got, gradient, f"{axes} {changes}")


@pytest.mark.slow
def test_layout_changes_nothing(learner, model_and_params, reference):
    """L13: devices, microbatches, packing and padded lengths, all at once; every loss is in test_layouts.py."""
    check_layout(learner, model_and_params[1], reference, *LAYOUT)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "changes"), MORE_LAYOUTS)
def test_more_layouts_change_nothing(learner, model_and_params, reference, axes, changes):
    """L13, one at a time."""
    check_layout(learner, model_and_params[1], reference, axes, changes)


def test_order_of_arrival_changes_nothing(learner, model_and_params):
    groups = some_groups()
    shuffled = [replace(g, trajectories=g.trajectories[::-1]) for g in groups[::-1]]
    _, want = gradient_of(learner, groups, model_and_params[1])
    _, got = gradient_of(learner, shuffled, model_and_params[1])
    assert_close(got, want)


@pytest.mark.slow
def test_scored_logprobs_are_those_of_the_tempered_distribution(learner, model_and_params):
    """L7: with the same weights trainer and sampler agree, at the temperature of sampling; so do sums of squares."""
    model, params = model_and_params
    groups = some_groups()
    batch = pack(groups, learner.settings)
    found = learner.score(batch, {"old_logprobs", "sum_squares"})
    scored, squares = found["old_logprobs"], found["sum_squares"]
    for array in (scored, squares):
        assert array.dtype == np.float32 and array.shape == batch.tokens.shape
        assert not array[~batch.targets_mask].any()
    squares = batch.gather(squares, sum(len(g.trajectories) for g in groups))
    members = [t for group in groups for t in group.trajectories]

    @jax.jit
    def table(tokens):
        positions, one = np.arange(24)[None], np.ones((1, 24), np.int32)
        visible = causal_segment_mask(positions, positions, one, one)
        hidden = model.hidden(
            params, tokens, positions, lambda _, q, k, v: attention(q, k, v, visible)
        )
        return jax.nn.log_softmax(model.logits(params, hidden)[0] / TEMPERATURE)

    each = zip(members, batch.gather(scored, len(members)), squares, strict=True)
    for member, values, sums in each:
        if not len(values):
            continue
        n = len(member.tokens)
        logprobs = table(np.pad(member.tokens, (0, 24 - n))[None])
        columns = np.flatnonzero(member.loss_mask)
        want = np.asarray(logprobs)[columns - 1, member.tokens[columns]]
        np.testing.assert_allclose(values[columns], want, atol=1e-5)
        want = np.square(np.exp(np.asarray(logprobs)))[columns - 1].sum(-1)
        np.testing.assert_allclose(sums[columns], want, rtol=1e-4)


def test_contexts_of_one_trajectory_train_as_if_they_were_two(learner, model_and_params):
    """A chat template rewrote history at token 13: nothing of what stood before is seen behind it."""
    whole = fake_group(0, [1.0, 0.0], [22, 9])
    member, other = whole.trajectories
    cut = lambda own, uid: replace(
        member, uid=uid, turn_rewards=member.turn_rewards,
        **{n: getattr(member, n)[own] for n in ("tokens", "loss_mask", "logprobs", "versions",
                                                "context_mixed", "turn_ids")},
    )  # fmt: skip
    parts = (cut(slice(13), "r/0/0/0a"), cut(slice(13, None), "r/0/0/0b"))
    joined = replace(whole, trajectories=(replace(member, sample_starts=(0, 13)), other))
    split = replace(whole, trajectories=(*parts, other))
    (a, _), (b, c, _) = (
        batch.gather(learner.score(batch, {"old_logprobs"})["old_logprobs"], n)
        for batch, n in ((pack([joined], learner.settings), 2), (pack([split], learner.settings), 3))
    )  # fmt: skip
    np.testing.assert_allclose(a, np.concatenate([b, c]), atol=1e-6)
    plain = pack([whole], learner.settings)
    unsplit = plain.gather(learner.score(plain, {"old_logprobs"})["old_logprobs"], 2)[0]
    assert np.abs(a - unsplit)[13:].max() > 1e-3

    def gradient(group, advantages):
        batch = batch_for(learner, [group])
        placed = batch.place(advantages, np.float32)
        learner.reset(model_and_params[1])
        learner.step(replace(batch, advantages=np.where(batch.targets_mask, placed, 0)), 0)
        return optax.tree_utils.tree_get(learner.state.opt_state, "mu")

    assert_close(gradient(joined, [0.7, -0.4]), gradient(split, [0.7, 0.7, -0.4]))


def test_a_sampler_with_the_same_weights_shows_no_mismatch(learner):
    """The step's own log-probs are compared with the sampler's, split by the lag the version gives."""
    groups = some_groups(version=3)
    batch = batch_for(learner, groups)
    behaviour = learner.score(batch, {"old_logprobs"})["old_logprobs"]
    metrics = learner.step(replace(batch, behaviour_logprobs=behaviour), version=4)
    assert metrics["mismatch/abs_max"].mean < 1e-6
    assert metrics["mismatch/abs_mean_lag1_pure"].count == batch.targets_mask.sum()
    assert "mismatch/abs_mean_lag0_pure" not in metrics
    assert metrics["staleness/mean"].mean == metrics["staleness/max"].mean == 1.0
    assert metrics["policy/clip_frac"].mean == 0.0 and metrics["is/ess"].mean > 0.999999
    assert metrics["is/ess_sequence"].mean > 0.999999
    assert metrics["mismatch/ppl_ratio"].count == len(batch.trained(batch.versions))


def test_ages_are_told_of_tokens_and_of_trajectories():
    """Two of three turns of one trajectory are a version newer; it began two versions before its consumer."""
    old, swapped = (
        fake_trajectory(0, 0, 12, 1.0, version=3),
        fake_trajectory(0, 1, 12, 0.0, version=3),
    )
    later = swapped.loss_mask & (swapped.turn_ids > 0)
    swapped = replace(swapped, versions=np.where(later, 4, swapped.versions))
    group = replace(fake_group(0, [0.0], [8]), trajectories=(old, swapped))
    batch = pack([group], LearnerSettings(row_tokens=32))
    metrics = batch_metrics(batch, 5, samples=True)
    num_new, num = int(later.sum()), 2 * int(old.loss_mask.sum())
    assert (
        metrics["staleness/mean"].sum == 2 * num - num_new
        and metrics["staleness/mean"].count == num
    )
    assert (metrics["staleness/mean"].min, metrics["staleness/mean"].max) == (1.0, 2.0)
    assert metrics["staleness/max"].mean == metrics["staleness/start"].mean == 2.0
    assert metrics["staleness/versions"].mean == 1.5


def test_unknown_needs_are_refused_and_no_needs_cost_nothing(learner):
    batch = pack(some_groups(), learner.settings)
    assert learner.score(batch, frozenset()) == {}
    with pytest.raises(ValueError, match="needs values; this learner computes old_logprobs"):
        learner.score(batch, {"values"})


def test_rewarded_tokens_become_likelier(learner):
    groups = [fake_group(0, [1.0, 0.0], [12, 12]), fake_group(1, [0.0, 1.0], [12, 12])]
    batch = batch_for(learner, groups)

    def gap():
        logprobs = learner.score(batch, {"old_logprobs"})["old_logprobs"]
        return (logprobs * np.sign(batch.advantages)).sum()

    before = gap()
    for _ in range(5):
        learner.step(batch)
    assert gap() > before + 0.1


# --- bad batches ---


def test_junk_off_the_mask_changes_no_bit(learner, model_and_params):
    """L16."""
    batch = batch_for(learner, some_groups())
    off = ~batch.targets_mask
    results = []
    for junk in (0.0, np.nan, np.inf):
        fields = ("behaviour_logprobs", "advantages", "loss_weights")
        changed = {n: np.where(off, np.float32(junk), getattr(batch, n)) for n in fields}
        learner.reset(model_and_params[1])
        metrics = learner.step(replace(batch, **changed))
        results.append((metrics, jax.device_get(learner.params)))
    for metrics, params in results[1:]:
        assert metrics == results[0][0]
        jax.tree.map(np.testing.assert_array_equal, params, results[0][1])


@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_a_huge_log_ratio_stays_finite(learner, gap):
    """L16."""
    batch = batch_for(learner, some_groups())
    behaviour = np.where(batch.targets_mask, batch.behaviour_logprobs + np.float32(gap), 0)
    metrics = learner.step(replace(batch, behaviour_logprobs=behaviour))
    assert metrics["optim/skipped"].mean == 0.0
    assert all(np.isfinite(metric.mean) for metric in metrics.values())


def test_a_nonfinite_update_is_skipped_counted_and_dumped(shared, learner, model_and_params):
    groups = some_groups()
    good = batch_for(learner, groups)
    bad = replace(good, advantages=np.where(good.targets_mask, np.float32(np.nan), 0))
    learner.step(good)
    before = jax.device_get(learner.state)
    metrics = learner.step(bad, version=6)
    after = jax.device_get(learner.state)
    assert metrics["optim/skipped"].mean == 1.0
    for part in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, part), getattr(before, part))
    assert (after.step, after.skipped, after.skipped_in_row) == (2, 1, 1)
    with np.load(shared._dump_dir / "nonfinite_step_7.npz") as dump:
        np.testing.assert_array_equal(dump["tokens"], bad.tokens)
        assert np.isnan(dump["advantages"]).any() and dump["version"] == 6
    assert learner.step(good)["optim/skipped"].mean == 0.0  # and it goes on
    assert jax.device_get(learner.state.skipped_in_row) == 0


def test_too_many_nonfinite_updates_in_a_row_stop_the_run(learner):
    batch = batch_for(learner, some_groups())
    batch = replace(batch, advantages=np.where(batch.targets_mask, np.float32(np.inf), 0))
    for _ in range(learner.settings.max_skipped - 1):
        learner.step(batch)
    with pytest.raises(NonFiniteError, match=r"5 in a row.*learner\.max_skipped=5 reached"):
        learner.step(batch)


def test_a_batch_without_anything_to_train_changes_nothing(learner):
    """L20: no group, or none with a sampled token."""
    batch = batch_for(learner, some_groups())
    learner.step(batch)  # moments are not zero now: a zero gradient would still move the weights
    before = jax.device_get(learner.state)
    for groups in ([], [fake_group(0, [1.0, 0.0], [PROMPT, PROMPT])]):
        metrics = learner.step(batch_for(learner, groups))
        assert metrics["policy/loss"].mean == 0.0 and metrics["optim/skipped"].mean == 0.0
        assert metrics["batch/trained_tokens"].mean == 0
        assert not [n for n in metrics if n.startswith(("mismatch", "staleness", "is/"))]
    after = jax.device_get(learner.state)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    assert after.step - before.step == 2 and after.skipped_in_row == 0


def test_one_token_and_full_rows_train(learner):
    """L20: responses of one token, and one that fills its row to the last position."""
    groups = [fake_group(0, [0.0, 1.0], [PROMPT + 1, 24])]
    metrics = learner.step(batch_for(learner, groups))
    trained = sum(t.num_trained for t in groups[0].trajectories)
    assert metrics["batch/trained_tokens"].mean == trained
    assert metrics["policy/entropy"].count == trained and metrics["optim/skipped"].mean == 0.0


def test_support_of_what_was_sampled_is_in_the_lowered_batch_too(learner):
    batch = empty_batch(SETTINGS, ["old_logprobs"], support=5)
    shapes = {name: x.shape for name, x in learner.rows.abstract(batch).items()}
    assert shapes["support"] == (*shapes["old_logprobs"], 5) and 0 not in shapes["support"]


class Reduced(Grpo):
    def token_loss(self, x):
        loss, sums = super().token_loss(x)
        return loss.sum(axis=1, keepdims=True), sums


def test_loss_that_is_not_one_of_each_token_is_refused_while_it_is_traced(model_and_params):
    learner = Learner(
        model_and_params[0], make_mesh({}, jax.devices()[:1]), TRAIN_RULES,
        Reduced(AlgorithmSettings()), SETTINGS, max_rows=8, temperature=1.0, total_steps=1,
    )  # fmt: skip
    with pytest.raises(
        LoweringError, match=r"^policy step cannot be traced: ContractError: Reduced: token_loss"
    ):
        list(learner.lower(empty_batch(SETTINGS, ())))


def test_a_batch_of_other_rows_is_refused(learner):
    with pytest.raises(ValueError, match=r"rows of 32 tokens.*learner\.row_tokens=24"):
        learner.step(pack(some_groups(), replace(SETTINGS, row_tokens=32)))


# --- state ---


def test_a_loaded_state_goes_on_as_if_nothing_had_happened(learner):
    batch = batch_for(learner, some_groups())
    learner.step(batch)
    saved = jax.device_get(learner.state)
    learner.step(batch)
    want = jax.device_get(learner.state)
    abstract = learner.abstract_state()
    assert jax.tree.structure(abstract) == jax.tree.structure(saved)
    jax.tree.map(
        lambda a, s: np.testing.assert_equal((a.shape, a.dtype), (s.shape, s.dtype)),
        abstract,
        saved,
    )
    kept = jax.tree.map(np.copy, saved)
    learner.load(saved)
    learner.step(batch)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(learner.state), want)
    jax.tree.map(np.testing.assert_array_equal, saved, kept)  # the caller's arrays are not donated


def test_initial_weights_depend_on_the_key_and_not_on_the_mesh(shared, model_and_params):
    shared.init(jax.random.key(3))
    one = jax.device_get(shared.params)
    split = make_learner(
        model_and_params[0], {"data": 2, "fsdp": 2}, replace(SETTINGS, microbatch_rows=4)
    )
    split.init(jax.random.key(3))
    for name, array in split.params.items():
        assert array.sharding.is_equivalent_to(split.param_shardings[name], array.ndim)
        np.testing.assert_array_equal(array, one[name])


def test_what_cannot_be_is_refused_before_any_compile(model_and_params):
    model = model_and_params[0]
    with pytest.raises(
        ValueError, match=r"microbatch_rows=2 is not divisible by .*data\*fsdp=4; use 4"
    ):
        make_learner(model, {"data": 2, "fsdp": 2})
    with pytest.raises(ValueError, match=r"rollout\.temperature=0\.0 cannot be trained"):
        Learner(
            model, make_mesh({}, jax.devices()[:1]), TRAIN_RULES, Grpo(ALGORITHM), SETTINGS,
            max_rows=2, temperature=0.0, total_steps=1,
        )  # fmt: skip
    with pytest.raises(RuntimeError, match="no weights yet; call init, reset or load"):
        _ = make_learner(model).params
