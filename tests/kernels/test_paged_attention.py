"""Attention over pages: the definition against float64, the Hopper kernel interpreted and lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import paged_attention as pa
from kernels import paged_attention_hopper as hopper

K, G, DH, PAGE = 2, 3, 64, 64
SCORES = pa.Scores(0.3)


def draw(num_sequences, num_pages, dtype=jnp.float32, seed=0, page=PAGE, sizes=(K, G, DH)):
    rng, (kv_heads, queries, head_dim) = np.random.default_rng(seed), sizes
    q = jnp.asarray(rng.normal(size=(num_sequences, kv_heads * queries, head_dim)), dtype)
    cache = [
        jnp.asarray(rng.normal(size=(num_pages, page, kv_heads, head_dim)), dtype) for _ in "kv"
    ]
    return q, tuple(cache)


def expected(q, cache, tables, first, end, scores=SCORES):
    """By one sequence, float64; 0 where nothing is visible."""
    q, k, v = (np.asarray(jnp.asarray(x, jnp.float32), np.float64) for x in (q, *cache))
    kv_heads, out = k.shape[2], np.zeros(q.shape)
    for b, (table, low, high) in enumerate(zip(tables, first, end, strict=True)):
        if low >= high:
            continue
        mine = [np.concatenate(list(x[np.asarray(table)]))[low:high] for x in (k, v)]
        score = np.einsum("kgd,tkd->kgt", q[b].reshape(kv_heads, -1, q.shape[2]), mine[0])
        score = score * scores.scale
        if scores.soft_cap is not None:
            score = scores.soft_cap * np.tanh(score / scores.soft_cap)
        weights = np.exp(score - score.max(axis=-1, keepdims=True))
        attended = np.einsum("kgt,tkd->kgd", weights, mine[1])
        out[b] = (attended / weights.sum(axis=-1)[..., None]).reshape(q.shape[1:])
    return out


def ragged(page=PAGE):
    """Tables, first and end of: whole pages, one token, nothing, a window inside one page, one over three."""
    tables = np.arange(1, 21).reshape(5, 4)
    return (
        tables,
        np.array([0, 0, 0, page + 3, 5]),
        np.array([4 * page, 1, 0, 2 * page - 1, 3 * page - 7]),
    )


def poisoned(cache, tables, end, page=PAGE):
    """NaN wherever no sequence may look: in page 0, and behind each end."""
    cache = [x.at[0].set(jnp.nan) for x in cache]
    for table, stop in zip(tables, end, strict=True):
        for i, where in enumerate(table):
            live = min(max(int(stop) - i * page, 0), page)
            cache = [x.at[where, live:].set(jnp.nan) for x in cache]
    return tuple(cache)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_ragged_contexts_in_any_number_of_parts(parts, cap):
    tables, first, end = ragged()
    q, cache = draw(5, 21)
    want, scores = expected(q, cache, tables, first, end, pa.Scores(0.3, cap)), pa.Scores(0.3, cap)
    split = jax.jit(pa.split_items, static_argnums=(3, 4))
    items = split(*(jnp.asarray(x, jnp.int32) for x in (tables, first, end)), PAGE, parts)
    got = pa.paged_attention(q, poisoned(cache, tables, end), items, scores)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    assert not np.asarray(got[2]).any()  # nothing is visible


@pytest.mark.slow
@pytest.mark.parametrize("run", [1, 2, 8])
@pytest.mark.parametrize("rows", [2, 8])
def test_prefixes_that_sequences_share_are_read_once(rows, run):
    """Two groups, of three and two sequences, and one alone; a group beyond `rows` is read again."""
    tables = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 6], [7, 8], [7, 11], [9, 10]]
    end = [2 * PAGE + 1, 4 * PAGE, 3 * PAGE - 1, PAGE + 5, 2 * PAGE, 2 * PAGE]
    q, cache = draw(6, 12)
    items = pa.shared_items(tables, end, PAGE, rows, run)
    got = pa.paged_attention(q, poisoned(cache, tables, end), items, SCORES)
    np.testing.assert_allclose(got, expected(q, cache, tables, [0] * 6, end), rtol=2e-6, atol=2e-6)
    read = sum(-(-int(stop) // PAGE) for _, stop in items.span)
    assert read == (11 if rows == 8 else 13)  # of 16 pages in the tables
    taken = items.slots[items.slots >= 0]
    assert len(set(taken.tolist())) == len(taken) == items.used.sum()


def test_a_shared_page_is_whole_for_all_that_read_it_together():
    """The third sequence ends inside the second page, so only the first one is common."""
    tables, end = [[1, 2], [1, 2], [1, 2]], [2 * PAGE, 2 * PAGE, PAGE + 1]
    items = pa.shared_items(tables, end, PAGE, 8, 8)
    assert [(int(stop), (slots >= 0).sum()) for (_, stop), slots in zip(items.span, items.slots)] == [
        (PAGE, 3), (PAGE, 1), (PAGE, 1), (1, 1),
    ]  # fmt: skip


def test_unused_parts_may_hold_anything():
    tables, first, end = ragged()
    q, cache = draw(5, 21)
    items = pa.split_items(*(jnp.asarray(x, jnp.int32) for x in (tables, first, end)), PAGE, 3)

    def attend(*args):
        parts, logs = pa.attend_reference(*args)
        unused = ~items.used[..., None, None]
        return jnp.where(unused[..., None], jnp.nan, parts), jnp.where(unused, jnp.nan, logs)

    got = pa.paged_attention(q, cache, items, SCORES, attend)
    np.testing.assert_allclose(got, expected(q, cache, tables, first, end), rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="this jax interprets no GPU")
@pytest.mark.parametrize("stages", [(2, 2), (2, 1), (3, 1)])
def test_hopper_kernel_interpreted_gives_the_numbers_of_float64(stages):
    tables, first, end = ragged()
    q, cache = draw(5, 21, jnp.bfloat16)
    tuning = hopper.Tuning(*stages, stages_weights=True, interpret=plgpu.InterpretGPUParams())
    attend = lambda *args: hopper.attend(*args, tuning=tuning)
    scores = pa.Scores(0.3, 2.0)
    items = pa.split_items(*(jnp.asarray(x, jnp.int32) for x in (tables, first, end)), PAGE, 2)
    got = pa.paged_attention(q, poisoned(cache, tables, end), items, scores, attend)
    want = expected(q, cache, tables, first, end, scores)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.02)
    shared = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 6], [7, 8]]
    end = [2 * PAGE + 1, 4 * PAGE, 3 * PAGE - 1, PAGE + 5]
    items = pa.shared_items(shared, end, PAGE, 8, 1)
    got = pa.paged_attention(q[:4], poisoned(cache, shared, end), items, scores, attend)
    want = expected(q[:4], cache, shared, [0] * 4, end, scores)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("pages", [4, 500])
@pytest.mark.parametrize(("queries", "head_dim"), [(1, 64), (7, 128), (16, 256)])
def test_hopper_kernel_lowers_for_the_gpu(queries, head_dim, pages):
    """On a machine without one. 500 pages: a header of several lines."""

    def run(q, k, v, table, first, end):
        items = pa.split_items(table, first, end, PAGE, 1)
        return pa.paged_attention(q, (k, v), items, pa.Scores(0.1, 30.0), hopper.attend)

    assert hopper.unfit(jnp.bfloat16, head_dim, queries, PAGE) == ""
    shape = jax.ShapeDtypeStruct
    cache = shape((1000, PAGE, K, head_dim), jnp.bfloat16)
    numbers = [shape(s, jnp.int32) for s in ((4, pages), (4,), (4,))]
    arguments = (shape((4, K * queries, head_dim), jnp.bfloat16), cache, cache, *numbers)
    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(*arguments)
    assert "mosaic_gpu" in exported.mlir_module()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((jnp.float32, 128, 4, 64), "is for bfloat16, the dtype is float32"),
        ((jnp.bfloat16, 96, 4, 64), "head_dim 64, 128 or 256, it is 96"),
        ((jnp.bfloat16, 128, 4, 16), "multiple of 64 tokens, they have 16"),
        ((jnp.bfloat16, 128, 20, 64), "20 queries a kv head do not divide"),
    ],
)
def test_where_the_kernel_does_not_fit_it_is_said(given, why):
    assert why in hopper.unfit(*given)


def test_items_for_more_sequences_than_a_tile_holds_are_refused():
    q, cache = draw(4, 6, jnp.bfloat16)
    items = pa.shared_items([[1, 2]] * 4, [2 * PAGE] * 4, PAGE, 4, 2)
    wide = jnp.tile(q, (1, 11, 1))  # 33 queries a kv head: one sequence a tile
    with pytest.raises(ValueError, match="33 queries a kv head are not in"):
        pa.paged_attention(wide, cache, items, SCORES, hopper.attend)
    wide = jnp.tile(q, (1, 8, 1))[:, : K * 24]
    with pytest.raises(ValueError, match="24 queries a kv head are not in"):
        pa.paged_attention(wide, cache, items, SCORES, hopper.attend)
    wide = jnp.tile(q, (1, 11, 1))[:, : K * 32]
    with pytest.raises(ValueError, match="items hold 4 sequences, a tile only 2"):
        pa.paged_attention(wide, cache, items, SCORES, hopper.attend)
