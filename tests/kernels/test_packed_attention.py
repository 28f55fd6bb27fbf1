"""Packed causal attention: values and gradients against float64, padding, groups of segments, shards, lowering.

A GPU or TPU runs the kernels; here their contracts stand in: `RAGGED` reads and writes exactly what cuDNN's calls may.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh

from kernels import cudnn_attention
from kernels import packed_attention as packed_attention_module
from kernels.packed_attention import (
    Ragged,
    Split,
    find_segments,
    packed_attention,
    packed_attention_ref,
    unfit,
)

ROWS = {
    "one segment": [[13], [13]],
    "ragged": [[3, 1, 9], [5, 5, 3]],
    "padding": [[4, 6], [2]],
    "an empty row": [[], [7, 1]],
    "one-token segments": [[1] * 13, [1, 1, 8]],
    "nothing": [[], []],
}
T, HEADS, HEAD_DIM = 13, (4, 2), 8


def ids_of(rows, size=T) -> np.ndarray:
    out = np.zeros((len(rows), size), np.int32)
    for row, lengths in zip(out, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    return out


def draw(ids, heads=HEADS, dtype=jnp.float32, seed=None):
    """[q, k, v, cotangent of the output], fresh each time."""
    rng = np.random.default_rng(seed)
    H, K = heads
    shapes = [(*ids.shape, n, HEAD_DIM) for n in (H, K, K, H)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def pulled(function, q, k, v, of_out):
    """[output, gradients of q, k and v]"""
    out, pull = jax.vjp(function, q, k, v)
    return [out, *pull(of_out.astype(out.dtype))]


@functools.partial(jax.jit, static_argnames=("kernel", "max_segments", "split"))
def run(ids, *inputs, kernel, max_segments=16, split=None):
    settings = {"kernel": kernel, "max_segments": max_segments, "split": split}
    return pulled(lambda *a: packed_attention(*a, find_segments(ids), **settings), *inputs)


@jax.jit
def run_reference(ids, *inputs):
    return pulled(lambda *a: packed_attention_ref(*a, ids), *inputs)


def reference(ids, *inputs):
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in inputs]
        return [np.asarray(x) for x in run_reference(ids, *wide)]


# --- what cuDNN does, by its contract ---------------------------------------------------------------------------------


def _cut(x, starts):
    """[N, T, ...]: T columns of the flattened rows from each start; beyond the end, the last."""
    flat = x.reshape(-1, *x.shape[2:])
    return flat.at[starts[:, None] + jnp.arange(x.shape[1])].get(mode="clip")


def _lay(parts, like, lengths, starts):
    """like's shape, NaN where no sequence is; else the parts [N, T, ...] at their columns."""
    position = jnp.arange(like.shape[1])
    columns = jnp.where(
        position < lengths[:, None], starts[:, None] + position, like[..., 0, 0].size
    )
    empty = jnp.full((like[..., 0, 0].size, *like.shape[2:]), jnp.nan, like.dtype)
    return empty.at[columns].set(parts, mode="drop").reshape(like.shape)


def _one(q, k, v, length):
    """(out [T, H, Dh], stats [H, T]) of one sequence."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    visible = jnp.tri(len(q), dtype=bool) & (jnp.arange(len(q)) < length)
    scores = jnp.where(visible, scores, -1e30)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, axis=-1)


def _ragged_forward(q, k, v, lengths, starts):
    assert lengths.shape == starts.shape and lengths.size % q.shape[0] == 0
    out, stats = jax.vmap(_one)(*(_cut(x, starts) for x in (q, k, v)), lengths)
    used = jnp.arange(q.shape[1]) < lengths[:, None]
    return _lay(out, q, lengths, starts), jnp.where(used[:, None], stats, jnp.nan)


def _ragged_backward(q, k, v, saved, of_out, sequences):
    """By autodiff; NaN unless it is given the output and statistics that forward gave."""
    (out, stats), (lengths, starts) = saved, sequences
    again, stats_again = _ragged_forward(q, k, v, lengths, starts)
    right = (jnp.nanmax(jnp.abs(stats - stats_again), initial=0.0) < 1e-4) & (
        jnp.nanmax(jnp.abs(out - again), initial=0.0) < 1e-4
    )
    inputs = [_cut(x, starts) for x in (q, k, v)]
    used = (jnp.arange(q.shape[1]) < lengths[:, None])[..., None, None]
    of_out = jnp.where(used, _cut(of_out, starts), 0)
    pull = jax.vjp(lambda *a: jax.vmap(_one)(*a, lengths)[0], *inputs)[1]
    found = (
        _lay(x, like, lengths, starts) for x, like in zip(pull(of_out), (q, k, v), strict=True)
    )
    return tuple(jnp.where(right, x, jnp.nan) for x in found)


RAGGED = Ragged(_ragged_forward, _ragged_backward)


# --- tests ------------------------------------------------------------------------------------------------------------


def check(got, want, rtol=1e-5):
    for name, a, b in zip(("output", "q", "k", "v"), got, want, strict=True):
        a = np.asarray(a, np.float64)
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b) + 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("max_segments", [2, 16])
def test_values_and_gradients_are_those_of_float64(rows, max_segments):
    """max_segments 2: rows of 13 segments take several groups."""
    ids = ids_of(rows)
    inputs = draw(ids)
    got = run(ids, *inputs, kernel=RAGGED, max_segments=max_segments)
    check(got, reference(ids, *inputs))


@pytest.mark.parametrize("most, loops", [(16, 0), (None, 1)])
def test_no_more_segments_than_a_call_takes_need_no_loop(most, loops):
    ids = ids_of(ROWS["one-token segments"])  # 16; 8 a row and call
    inputs = draw(ids)
    settings = {"kernel": RAGGED, "max_segments": 8}
    attend = jax.jit(lambda *a: packed_attention(*a, find_segments(jnp.asarray(ids), most), **settings))  # fmt: skip
    np.testing.assert_allclose(attend(*inputs[:3]), reference(ids, *inputs)[0], atol=1e-5)
    assert attend.lower(*inputs[:3]).as_text().count("stablehlo.while") == loops


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (5, 1)])
def test_query_heads_read_their_kv_head(heads):
    ids = ids_of(ROWS["ragged"])
    inputs = draw(ids, heads)
    check(run(ids, *inputs, kernel=RAGGED), reference(ids, *inputs))


def test_reference_is_softmax_by_hand():
    """One head, one number: weights 1, then softmax of (q k) over two keys."""
    q, k, v = (
        np.asarray(x, np.float64).reshape(1, 3, 1, 1) for x in ([1, 2, 5], [1, 3, 0], [1, 2, 9])
    )
    with jax.enable_x64(True):
        out = packed_attention_ref(*map(jnp.asarray, (q, k, v)), jnp.asarray([[4, 4, 7]]))
    weight = 1 / (1 + np.exp(2 * 3 - 2 * 1))
    np.testing.assert_allclose(out[0, :, 0, 0], [1, weight + 2 * (1 - weight), 9])


def test_padding_may_hold_anything():
    ids = ids_of(ROWS["padding"])
    clean = draw(ids)
    padding = jnp.asarray(ids == 0)[..., None, None]
    for function in (functools.partial(run, kernel=RAGGED), run_reference):
        expected = function(ids, *clean)
        for poison in (np.nan, np.inf):
            got = function(ids, *(jnp.where(padding, poison, x) for x in clean))
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(a, b)
                assert not np.asarray(jnp.where(padding, a, 0)).any()


@pytest.mark.slow
def test_find_segments_counts_over_rows():
    found = find_segments(jnp.asarray(ids_of([[2, 1], [], [3]], 4)))
    assert found.count == 3
    np.testing.assert_array_equal(found.starts[:4], [0, 2, 8, 12])
    np.testing.assert_array_equal(found.lengths[:4], [2, 1, 3, 0])
    np.testing.assert_array_equal(found.number, [[0, 0, 1, -1], [-1] * 4, [2, 2, 2, -1]])
    np.testing.assert_array_equal(found.position, [[0, 1, 0, 0], [0] * 4, [0, 1, 2, 0]])
    bounded = find_segments(jnp.asarray(ids_of([[2, 1], [], [3]], 4)), 4)
    np.testing.assert_array_equal(bounded.starts, [0, 2, 8, 12])
    np.testing.assert_array_equal(bounded.lengths, [2, 1, 3, 0])
    np.testing.assert_array_equal(bounded.number, found.number)
    np.testing.assert_array_equal(bounded.position, found.position)


def test_padding_between_segments_and_any_ids():
    found = find_segments(jnp.asarray([[0, 5, 5, 0, 2, 9]]))
    np.testing.assert_array_equal(found.starts[:4], [1, 4, 5, 6])
    np.testing.assert_array_equal(found.lengths[:4], [2, 1, 1, 0])


def exported(function, *inputs, platform="cuda"):
    allowed = [export.DisabledSafetyCheck.custom_call(c) for c in cudnn_attention.CUSTOM_CALLS]
    return export.export(jax.jit(function), platforms=[platform], disabled_checks=allowed)(*inputs)


@pytest.mark.slow
@pytest.mark.parametrize("policy, calls", [("nothing_saveable", 2), ("save_only_these_names", 1)])
def test_a_policy_that_saves_the_name_saves_the_forward_call(policy, calls):
    policy = getattr(jax.checkpoint_policies, policy)
    policy = policy("attention") if calls == 1 else policy
    ids = ids_of(ROWS["ragged"])
    segments = find_segments(jnp.asarray(ids))
    attend = jax.checkpoint(
        lambda *a: packed_attention(*a, segments, max_segments=16), policy=policy
    )
    inputs = draw(ids, dtype=jnp.bfloat16)
    text = exported(lambda *a: pulled(attend, *a), *inputs).mlir_module()
    assert text.count("@__cudnn$fmhaSoftmax(") == calls
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1


@pytest.mark.slow
def test_split_over_a_mesh_equals_unsplit():
    ids = np.concatenate([ids_of(ROWS["ragged"]), ids_of(ROWS["an empty row"])])
    inputs = draw(ids)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("rows", "heads"))
    split = Split(mesh, ("rows",), ("heads",))
    whole, parts = (
        run(ids, *inputs, kernel=RAGGED, max_segments=2, split=s) for s in (None, split)
    )
    check(parts, [np.asarray(x, np.float64) for x in whole])


@pytest.mark.slow
@pytest.mark.parametrize("name, platform", [("cudnn", "cuda"), ("splash", "tpu")])
@pytest.mark.parametrize("T", [64, 200])
def test_lowers_for_accelerators(name, platform, T):
    ids = ids_of([[T // 2, 5], [T]], T)
    inputs = draw(ids, (4, 2), jnp.bfloat16)
    found = exported(lambda *a: run(ids, *a, kernel=name), *inputs, platform=platform)
    target = {"cuda": "__cudnn$fmhaSoftmaxBackward", "tpu": "tpu_custom_call"}[platform]
    assert found.platforms == (platform,) and target in found.mlir_module()


@pytest.mark.slow
def test_splash_is_given_the_same_function():
    """JAX's own kernel, interpreted; padded to its rows of 128 and heads of 128 lanes."""
    ids = ids_of([[70, 1, 60], [9]], 140)
    q, k, v, of_out = draw(ids)
    valid = jnp.asarray(ids > 0)[..., None, None]
    splash = lambda *a: jnp.where(
        valid, packed_attention_module._splash(*a, ids, interpret=True), 0
    )
    got = jax.jit(lambda *a: pulled(splash, *a))(q, k, v, jnp.where(valid, of_out, 0))
    check(got, reference(ids, q, k, v, of_out))


@pytest.mark.parametrize(
    "case, reason",
    [
        (("cudnn", "gpu", "9.0", "bfloat16", 128), ""),
        (("cudnn", "gpu", "10.0", "bfloat16", 64), ""),
        (("splash", "tpu", "", "float32", 24), ""),
        (("cudnn", "gpu", "8.0", "bfloat16", 128), "9.0 on"),
        (("cudnn", "gpu", "9.0", "float32", 128), "float32"),
        (("cudnn", "gpu", "9.0", "bfloat16", 132), "up to 128"),
        (("cudnn", "cpu", "", "bfloat16", 128), "cpu"),
        (("splash", "gpu", "9.0", "bfloat16", 128), "tpu"),
    ],
)
def test_unfit_says_why(case, reason):
    assert (unfit(*case) == "") == (reason == "") and reason in unfit(*case)


@pytest.mark.slow
def test_what_does_not_fit_is_refused():
    ids = ids_of(ROWS["ragged"])
    q, k, v, _ = draw(ids)
    segments = find_segments(jnp.asarray(ids))
    for bad in ((q, k[:, :5], v), (q[:, :, :3], k, v), (q, k, v[..., :4])):
        with pytest.raises(ValueError, match="does not fit"):
            packed_attention(*bad, segments)
    with pytest.raises(ValueError, match="rows"):
        packed_attention(q, k, v, find_segments(jnp.asarray(ids[:1])))
    with pytest.raises(ValueError, match="unknown"):
        packed_attention(q, k, v, segments, kernel="triton")
