import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.engine.sampling import _draw_unfiltered, allowed_tokens, likeliest, sample, sample_tiled
from rl_jax.mesh import make_mesh

LOGITS = np.log(np.array([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]], np.float32))


def draw(logits, *, seed=0, index=0, temperature=1.0, top_p=1.0, top_k=0, by=sample):
    S = len(logits)
    full = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (S,))
    seeds = np.broadcast_to(np.array(seed, np.uint64), (S,))
    key = np.stack([seeds >> np.uint64(32), seeds & np.uint64(2**32 - 1)], -1).astype(np.uint32)
    return jax.jit(by)(
        jnp.asarray(logits), key, full(index, jnp.int32), full(temperature, jnp.float32),
        full(top_p, jnp.float32), full(top_k, jnp.int32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, {0, 1, 2, 3}),
        (1.0, 1, {1}),
        (1.0, 2, {1, 3}),
        (0.4, 0, {1}),  # 0.4 reaches 0.4
        (0.41, 0, {1, 3}),
        (0.95, 0, {0, 1, 2, 3}),
        (0.5, 2, {1}),  # of 0.4 and 0.3, renormalised to 4/7 and 3/7
        (0.6, 2, {1, 3}),
        (0.0, 0, {1}),  # always at least one
    ],
)
def test_allowed_tokens_by_hand(top_p, top_k, kept):
    mask = allowed_tokens(LOGITS[:1], jnp.array([top_p], jnp.float32), jnp.array([top_k]))
    assert set(np.flatnonzero(np.asarray(mask)[0])) == kept


def test_ties_keep_exactly_top_k_and_prefer_lower_ids():
    mask = allowed_tokens(LOGITS[1:], jnp.array([1.0]), jnp.array([2]))
    assert np.asarray(mask).tolist() == [[True, True, False, False]]


def test_greedy_takes_the_lowest_best_id_with_temperature_1_logprobs():
    out = draw(LOGITS, temperature=0.0, top_p=0.5, top_k=1)
    assert out.tokens.tolist() == [1, 0]
    np.testing.assert_allclose(out.logprobs, np.log([0.4, 0.25]), atol=1e-6)
    np.testing.assert_allclose(out.sampled_logprobs, out.logprobs)


def test_logprobs_are_tempered_and_sampled_logprobs_are_filtered_too():
    out = draw(LOGITS[:1], temperature=0.7, top_k=2, seed=3)
    tempered = np.array([0.1, 0.4, 0.2, 0.3]) ** (1 / 0.7)
    token = int(out.tokens[0])
    assert token in (1, 3)
    np.testing.assert_allclose(out.logprobs, np.log(tempered[[token]] / tempered.sum()), atol=1e-6)
    want = np.log(tempered[[token]] / tempered[[1, 3]].sum())
    np.testing.assert_allclose(out.sampled_logprobs, want, atol=1e-6)


@pytest.mark.parametrize("by", [sample, sample_tiled])
def test_no_logprob_is_above_0_where_one_token_is_nearly_certain(by):
    """Logits out of a product, as a model's are, at a low temperature: their quotients are large, and rounded so."""
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((64, 32)), rng.standard_normal((32, 384))
    best = rng.integers(0, 384, 64)
    head[:, best] += 1.5 * hidden.T
    hidden, head = hidden.astype(np.float32), head.astype(np.float32)
    rows = lambda value, dtype: jnp.full(64, value, dtype)

    @jax.jit
    def drawn(hidden, head):
        key = jnp.stack([jnp.zeros(64, jnp.uint32), jnp.arange(64, dtype=jnp.uint32)], 1)
        filters = (rows(0.3, jnp.float32), rows(1.0, jnp.float32), rows(0, jnp.int32))
        return by(hidden @ head, key, rows(0, jnp.int32), *filters)

    out = drawn(hidden, head)
    z = hidden.astype(np.float64) @ head.astype(np.float64) / np.float32(0.3)
    z -= z.max(axis=1, keepdims=True)
    want = (z - np.log(np.exp(z).sum(axis=1, keepdims=True)))[np.arange(64), out.tokens]
    np.testing.assert_allclose(out.logprobs, want, atol=1e-4)
    assert (want > -1e-6).sum() > 32 and out.logprobs.max() <= 0


def test_support_is_what_the_filters_left_in_order_of_likelihood():
    out = draw(
        np.repeat(LOGITS[:1], 2, 0),
        top_k=np.array([3, 3]),
        top_p=0.75,
        by=partial(sample, support=3),
    )
    assert out.support.tolist() == [[1, 3, -1]] * 2  # 0.4 and 0.3 of 0.9 reach 0.75
    out = draw(LOGITS, top_k=2, by=partial(sample, support=2))
    assert out.support.tolist() == [[1, 3], [0, 1]]
    assert all(token in ids for token, ids in zip(out.tokens.tolist(), out.support.tolist()))


def test_frequencies_follow_the_distribution():
    n = 4000
    out = draw(np.repeat(LOGITS[:1], n, 0), seed=np.arange(n))
    share = np.bincount(out.tokens, minlength=4) / n
    np.testing.assert_allclose(share, [0.1, 0.4, 0.2, 0.3], atol=0.03)  # 4 sigma = 0.031


def test_seed_is_64_bits_and_the_index_folds_in():
    logits = np.zeros((1, 1000), np.float32)
    base = int(draw(logits, seed=5).tokens[0])
    others = [
        int(draw(logits, seed=5 + 2**32).tokens[0]),
        int(draw(logits, seed=5 + 2**63).tokens[0]),
        int(draw(logits, seed=5, index=1).tokens[0]),
    ]
    assert base not in others
    assert len(set(others)) == 3
    with jax.enable_x64(True):
        key = jax.random.fold_in(jax.random.key(np.uint64(5 + 2**63), impl="threefry2x32"), 0)
    with jax.enable_x64(False):
        assert int(jnp.argmax(jax.random.gumbel(key, (1000,), jnp.float32))) == others[1]


def test_a_filtered_row_changes_no_bit_of_its_neighbours():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    plain = draw(logits, seed=np.arange(3))
    mixed = draw(logits, seed=np.arange(3), top_k=np.array([0, 2, 0]))
    for row in (0, 2):
        for field in ("tokens", "logprobs", "sampled_logprobs"):
            assert getattr(plain, field)[row] == getattr(mixed, field)[row]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_logits_are_flagged_in_their_row_only(value):
    logits = LOGITS.copy()
    logits[0, 2] = value
    assert draw(logits).nan.tolist() == [True, False]


@pytest.mark.slow
def test_one_pass_over_tiles():
    """Two tiles of 3 ids, drawn by their distribution; bad rows, greedy ones, and one that is filtered."""
    n, p = 4000, np.array([0.1, 0.4, 0.2, 0.3, 1e-20, 1e-20])
    logits = np.log(np.repeat(p[None], n, 0)).astype(np.float32)
    logits[1, 2], logits[2, 4] = np.nan, -np.inf
    temperature = np.where(np.arange(n) == 3, 0.0, np.where(np.arange(n) == 4, 0.7, 1.0))
    how = {"seed": np.arange(n), "temperature": temperature, "by": sample_tiled}
    out = draw(logits, **how)
    np.testing.assert_allclose(np.bincount(out.tokens, minlength=6) / n, p, atol=0.03)
    assert np.flatnonzero(out.nan).tolist() == [1, 2] and int(out.tokens[3]) == 1
    tempered = p ** (1 / 0.7)
    for row, q in ((0, p), (3, p), (4, tempered)):
        want = np.log(q[int(out.tokens[row])] / q.sum())
        np.testing.assert_allclose([out.logprobs[row], out.sampled_logprobs[row]], want, atol=1e-5)
    mixed = draw(logits, top_k=np.where(np.arange(n) == 0, 2, 0), **how)
    for field in ("tokens", "logprobs", "sampled_logprobs"):
        same = np.asarray(getattr(out, field)) == np.asarray(getattr(mixed, field))
        assert same[3:].all(), "a filtered row changed its neighbours"
    token = int(mixed.tokens[0])
    assert token in (1, 3)
    np.testing.assert_allclose(mixed.sampled_logprobs[0], np.log(p[token] / 0.7), atol=1e-5)
    np.testing.assert_allclose(mixed.logprobs[0], np.log(p[token]), atol=1e-5)


@pytest.mark.slow
def test_a_split_vocabulary_is_sampled_without_gathering_logits():
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "tensor"))
    logits = np.random.default_rng().normal(size=(4, 2560)).astype(np.float32)
    rows = (jnp.zeros((4, 2), jnp.uint32), jnp.arange(4), jnp.ones(4))
    step = jax.jit(_draw_unfiltered)
    compiled = step.lower(jax.device_put(logits, place), *rows).compile()
    shapes = re.findall(r"= \S*\[([\d,]+)\]\S* all-gather", compiled.as_text())
    assert all(math.prod(map(int, shape.split(","))) < 4 * 1280 for shape in shapes), shapes
    got, want = compiled(jax.device_put(logits, place), *rows), step(logits, *rows)
    assert got.tokens.tolist() == want.tokens.tolist()


def test_likeliest_are_the_log_probs_of_the_largest_logits():
    logits = jax.random.normal(jax.random.key(3), (3, 50)) * 4
    temperature = jnp.array([0.0, 0.5, 2.0])
    ids, logprobs = likeliest(logits, temperature, 5)
    for row, t, i, p in zip(np.asarray(logits, np.float64), (1.0, 0.5, 2.0), ids, logprobs):
        whole = row / t - np.log(np.exp(row / t).sum())
        assert np.asarray(i).tolist() == np.argsort(-row)[:5].tolist()
        np.testing.assert_allclose(p, whole[np.asarray(i)], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("by", [sample, sample_tiled])
def test_banned_ids_are_never_drawn_and_cost_the_others_nothing(by):
    """Of 64 rows every other one may not draw its best id; half of all have a filter, a quarter are greedy."""
    rows, num_ids = np.arange(64), 40
    logits = np.asarray(jax.random.normal(jax.random.key(5), (64, num_ids)) * 3)
    best, temperature = logits.argmax(axis=1), np.where(rows % 4 == 0, 0.0, 1.0)
    seeds = np.stack([rows * 0, rows], -1).astype(np.uint32)
    top_k = np.where(rows < 32, 0, 3).astype(np.int32)
    jitted = jax.jit(lambda banned: by(
        logits, seeds, rows * 0, temperature.astype(np.float32), np.ones(64, np.float32), top_k, banned=banned
    ))  # fmt: skip
    banned = (rows % 2 == 0)[:, None] & (np.arange(num_ids) == best[:, None])
    free, held = (jax.tree.map(np.asarray, jitted(b)) for b in (np.zeros_like(banned), banned))
    odd = rows % 2 == 1
    assert free.tokens[odd].tolist() == held.tokens[odd].tolist()
    assert (held.tokens[~odd] != best[~odd]).all() and not held.nan.any()
    assert (free.tokens[temperature == 0] == best[temperature == 0]).all()
    scaled = logits.astype(np.float64)  # temperature 1, greedy too
    whole = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(held.logprobs, whole[rows, held.tokens], atol=1e-5)
    cut = np.where(banned, -np.inf, scaled)
    third = np.sort(cut, axis=1)[:, -3]
    filtered = (top_k > 0) & (temperature > 0)
    cut = np.where(filtered[:, None] & (cut < third[:, None]), -np.inf, cut)
    cut -= np.log(np.exp(cut).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(held.sampled_logprobs, cut[rows, held.tokens], atol=1e-5)
