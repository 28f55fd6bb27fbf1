"""Log-probs and entropies without [T, V]: values and gradients against float64, shards, memory, lowering."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh

from kernels.linear_logprob import Hopper, Split, linear_logprob, linear_logprob_ref

RTOL = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}  # of a norm; bf16 gradients are rounded twice


def draw(shape, V, dtype=jnp.float32, scale=1.0, seed=None):
    """(hidden, head, targets, cotangents of both outputs), fresh each time."""
    rng = np.random.default_rng(seed)
    D = shape[-1]
    hidden = jnp.asarray(scale * rng.normal(size=shape), dtype)
    head = jnp.asarray(rng.normal(size=(D, V)) / np.sqrt(D), dtype)
    targets = jnp.asarray(rng.integers(0, V, shape[:-1]), jnp.int32)
    cotangents = tuple(jnp.asarray(rng.normal(size=shape[:-1]), jnp.float32) for _ in range(2))
    return hidden, head, targets, cotangents


def run(function, hidden, head, targets, cotangents):
    """[log-probs, entropies, gradient of hidden, gradient of head]"""
    outputs, pull = jax.vjp(lambda h, w: function(h, w, targets), hidden, head)
    cotangents = [c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True)]
    return [*outputs, *pull(tuple(cotangents))]


def reference(hidden, head, targets, cotangents, temperature, softcap=0.0):
    with jax.enable_x64(True):
        wide = (x.astype(jnp.float64) for x in (hidden, head))
        out = run(
            lambda h, w, t: linear_logprob_ref(h, w, t, temperature, softcap),
            *wide,
            targets,
            cotangents,
        )
        return [np.asarray(x) for x in out]


def error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "shape, V, chunk, temperature",
    [
        ((37, 24), 151, 16, 0.7),  # ragged in every way
        ((32, 16), 128, 8, 1.0),
        ((1, 8), 5, 1024, 1.3),
        ((3, 10, 8), 50, 4, 1.0),  # rows
        ((7, 8), 1, 2, 1.0),  # a vocabulary of one
    ],
)
def test_values_and_gradients_are_those_of_float64(dtype, shape, V, chunk, temperature):
    case = draw(shape, V, dtype)
    function = lambda h, w, t: linear_logprob(h, w, t, temperature, chunk=chunk)
    got = jax.jit(lambda *a: run(function, *a))(*case)
    want = reference(*case, temperature)
    for name, g, w in zip(("logprob", "entropy", "hidden", "head"), got, want, strict=True):
        # Values are float32 sums of exact products; only gradients are rounded.
        limit = RTOL[dtype] if name in ("hidden", "head") else RTOL[jnp.float32]
        assert error(g, w) < limit or np.abs(g - w).max() < 1e-6, name
    assert [g.dtype for g in got] == [jnp.float32, jnp.float32, dtype, dtype]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_soft_cap_is_in_values_and_both_gradients(dtype):
    """Logits of std 1 under a cap of 1.5; asked for the Hopper kernels too, which know none and are left out."""
    case = draw((37, 24), 151, dtype)
    function = partial(linear_logprob, temperature=0.7, softcap=1.5, chunk=16, hopper=Hopper(132))
    got = jax.jit(lambda *a: run(function, *a))(*case)
    want, uncapped = reference(*case, 0.7, 1.5), reference(*case, 0.7)
    for name, g, w, other in zip(
        ("logprob", "entropy", "hidden", "head"), got, want, uncapped, strict=True
    ):
        limit = RTOL[dtype] if name in ("hidden", "head") else RTOL[jnp.float32]
        assert error(g, w) < limit < error(other, w), name


def test_no_position_is_an_empty_result_and_zero_gradients():
    hidden, head, targets, cotangents = draw((0, 8), 16)
    logprobs, entropy, of_hidden, of_head = run(linear_logprob, hidden, head, targets, cotangents)
    assert logprobs.shape == entropy.shape == (0,)
    assert of_hidden.shape == (0, 8) and not of_head.any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_extreme_logits_give_finite_values_and_gradients(dtype):
    """Logits of about +-1000: one token has all the probability."""
    case = draw((16, 8), 64, dtype, scale=1000.0)
    got = run(lambda h, w, t: linear_logprob(h, w, t, chunk=8), *case)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in got)
    want = reference(*case, 1.0)
    assert error(got[0], want[0]) < 1e-5
    assert (np.asarray(got[1]) >= -1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1])
def test_target_outside_the_vocabulary_has_probability_zero(bad):
    hidden, head, targets, cotangents = draw((6, 8), 50)
    targets = targets.at[2].set(bad)
    logprobs, entropy, of_hidden, _ = run(linear_logprob, hidden, head, targets, cotangents)
    want = reference(hidden, head, targets, cotangents, 1.0)
    assert logprobs[2] == -np.inf and np.isfinite(np.delete(logprobs, 2)).all()
    assert error(entropy, want[1]) < 1e-5
    assert np.isfinite(of_hidden).all()


@pytest.mark.slow
def test_chunks_beyond_the_count_are_not_computed():
    """Their inputs may be anything; they give 0 and get no gradient."""
    hidden, head, targets, cotangents = draw((2, 12, 8), 20)
    poisoned = hidden.at[:, 8:].set(np.nan)

    @jax.jit
    def count(number):
        function = lambda h, w, t: linear_logprob(h, w, t, chunk=4, num_chunks=number)
        return run(function, poisoned, head, targets, cotangents)

    logprobs, entropy, of_hidden, of_head = count(2)
    want = run(linear_logprob, hidden[:, :8], head, targets[:, :8], [c[:, :8] for c in cotangents])
    for got, expected in zip((logprobs, entropy, of_hidden), want, strict=False):
        assert error(got[:, :8], expected) < 1e-5 and not np.asarray(got)[:, 8:].any()
    assert error(of_head, want[3]) < 1e-5
    assert not any(np.asarray(x).any() for x in count(0))


@pytest.mark.parametrize("batch, vocab", [(1, 2), (1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_split_over_a_mesh_equals_unsplit(batch, vocab, dtype):
    case = draw((4, 11, 16), 48, dtype)
    how = {"temperature": 0.8, "softcap": 2.0 if vocab == 4 else 0.0, "chunk": 4}
    devices = np.array(jax.devices()[: batch * vocab]).reshape(batch, vocab)
    split = Split(Mesh(devices, ("rows", "columns")), ("rows",), ("columns",))
    whole, parts = (
        jax.jit(partial(run, partial(linear_logprob, **how, split=s)))(*case) for s in (None, split)
    )
    for name, got, want in zip(("logprob", "entropy", "hidden", "head"), parts, whole, strict=True):
        exact = dtype == jnp.float32 or name in ("logprob", "entropy")
        assert error(got, want) < (1e-5 if exact else 4e-3), name  # 2^-8: last bits of bf16


def test_no_collective_runs_inside_a_loop():
    """A sum over devices a chunk would cost more than the chunk."""
    case = draw((4, 16, 8), 32)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    split = Split(Mesh(devices, ("rows", "columns")), ("rows",), ("columns",))
    function = lambda *b: linear_logprob(*b, chunk=4, split=split)
    jaxpr = jax.make_jaxpr(lambda *a: run(function, *a))(*case)
    text = str(jaxpr)
    loops = [part.split("]")[0] for part in text.split("while[")[1:]]
    assert loops and not any("psum" in loop or "pmax" in loop for loop in loops)


def test_memory_is_that_of_a_chunk_not_of_all_logits():
    T, D, V, chunk = 4096, 16, 1024, 64
    shapes = (
        jax.ShapeDtypeStruct((T, D), jnp.float32),
        jax.ShapeDtypeStruct((D, V), jnp.float32),
        jax.ShapeDtypeStruct((T,), jnp.int32),
    )

    def loss(hidden, head, targets):
        logprobs, entropy = linear_logprob(hidden, head, targets, chunk=chunk)
        return logprobs.sum() + entropy.sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 4 * (3 * T * D + 4 * chunk * V + 2 * D * V + 16 * T)
    assert temporary < T * V  # a quarter of the logits


@pytest.mark.slow
def test_hopper_kernels_lower_for_cuda_from_a_cpu():
    case = draw((2, 300, 64), 700, jnp.bfloat16)
    for cluster in (1, 2):
        hopper = Hopper(132, cluster=cluster, columns=256)
        function = jax.jit(
            lambda *a, o=hopper: run(partial(linear_logprob, chunk=128, hopper=o), *a)
        )
        exported = jax.export.export(function, platforms=["cuda"])(*case)
        assert exported.mlir_module().count("mosaic_gpu") >= 3  # stats, and two tiles of gradients


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="this jax interprets no GPU")
def test_hopper_kernels_interpreted_give_the_numbers_of_float64():
    """Rows and columns that are not whole tiles, a tile of gradients narrower than the vocabulary."""
    case = draw((100, 64), 520, jnp.bfloat16)
    hopper = Hopper(1, cluster=1, columns=256, interpret=plgpu.InterpretGPUParams())
    function = lambda h, w, t: linear_logprob(h, w, t, 0.7, chunk=100, hopper=hopper)
    got = jax.jit(lambda *a: run(function, *a))(*case)
    want = reference(*case, 0.7)
    limits = (1e-5, 1e-5, 1e-2, 1e-2)
    assert all(error(g, w) < limit for g, w, limit in zip(got, want, limits, strict=True))


@pytest.mark.slow
def test_hopper_kernels_leave_what_does_not_fit_to_the_portable_way():
    case = draw((20, 24), 300, jnp.bfloat16)  # D is no multiple of 64
    outs = [run(partial(linear_logprob, hopper=o), *case) for o in (None, Hopper(132))]
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowers_for_accelerators(platform, dtype):
    case = draw((32, 16), 64, dtype)
    function = jax.jit(lambda *a: run(lambda *b: linear_logprob(*b, chunk=16), *a))
    assert jax.export.export(function, platforms=[platform])(*case).platforms == (platform,)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head": np.zeros((9, 50), np.float32)}, "does not fit head"),
        ({"targets": np.zeros(5, np.int32)}, "one a hidden state"),
        ({"head": jnp.zeros((8, 50), jnp.bfloat16)}, "cast one"),
        ({"temperature": 0.0}, "above 0"),
        ({"softcap": -1.0}, "softcap=-1.0 must be at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    hidden, head, targets, _ = draw((6, 8), 50)
    inputs = {"hidden": hidden, "head": head, "targets": targets} | change
    with pytest.raises(ValueError, match=message):
        linear_logprob(**inputs)
