"""Chunked log-probs against the plain formula, and what must never be held."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rl_jax.learner.logprobs import support_logprobs, target_logprobs, token_logprobs
from rl_jax.mesh import make_mesh

B, T, D, V = 2, 24, 8, 50


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    hidden = jnp.float32(rng.normal(size=(B, T, D)))
    head = jnp.float32(rng.normal(size=(D, V)))
    tokens = rng.integers(0, V, (B, T)).astype(np.int32)
    index = np.zeros((B, T), np.int32)
    columns = [np.arange(1, T), np.array([2, 3, 9, 10, 23])]  # all that can be scored; a few
    for row, chosen in enumerate(columns):
        index[row, : len(chosen)] = chosen
    valid = np.arange(T) < np.array([[T - 1], [5]])
    return hidden, head, tokens, index, valid


def chunked(case, chunk, temperature=0.7):
    """The function of (hidden, head) under test: a number, and (log-probs, entropy)."""
    hidden, head, tokens, index, valid = case
    slots = -(-T // chunk) * chunk
    pad = [(0, 0), (0, slots - T)]
    index, valid = np.pad(index, pad), np.pad(valid, pad)
    targets = np.where(valid, np.take_along_axis(tokens, index[:, :slots], axis=1), 0)
    num_chunks = jnp.int32(-(-valid.sum(axis=1).max() // chunk))

    def total(hidden, head):
        logprobs, entropy = target_logprobs(
            hidden,
            head,
            jnp.asarray(index),
            jnp.asarray(targets),
            num_chunks,
            chunk=chunk,
            temperature=temperature,
        )
        logprobs, entropy = (jnp.where(valid, x, 0.0) for x in (logprobs, entropy))
        return logprobs.sum() + 0.3 * entropy.sum(), (logprobs[:, :T], entropy[:, :T])

    return total


def plain(case, temperature=0.7):
    """All logits at once, log_softmax, then a gather: the slow reference."""
    hidden, head, tokens, index, valid = case
    targets = np.take_along_axis(tokens, index, axis=1)

    def total(hidden, head):
        logprobs = jax.nn.log_softmax(hidden @ head / temperature)  # [B, T, V]
        entropy = -(jnp.exp(logprobs) * logprobs).sum(axis=-1)
        rows = np.arange(B)[:, None]
        before = np.maximum(index - 1, 0)
        chosen = jnp.where(valid, logprobs[rows, before, targets], 0.0)
        entropy = jnp.where(valid, entropy[rows, before], 0.0)
        return chosen.sum() + 0.3 * entropy.sum(), (chosen, entropy)

    return total


def run(total, case):
    (_, values), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(*case[:2])
    return values, grads


@pytest.mark.parametrize("chunk", [24, 5, 1])
def test_chunks_give_the_same_numbers_and_gradients(case, chunk):
    (logprobs, entropy), grads = run(chunked(case, chunk), case)
    (want, want_entropy), want_grads = run(plain(case), case)
    np.testing.assert_allclose(logprobs, want, atol=1e-5)
    np.testing.assert_allclose(entropy, want_entropy, atol=1e-5)
    for got, expected in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def all_shapes(jaxpr):
    """Shapes of every value of a jaxpr, inner ones included."""
    for equation in jaxpr.eqns:
        for variable in (*equation.invars, *equation.outvars):
            if hasattr(variable.aval, "shape"):
                yield variable.aval.shape
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from all_shapes(inner)


def test_no_array_holds_more_logits_than_a_chunk(case):
    total = chunked(case, 4)
    jaxpr = jax.make_jaxpr(jax.grad(lambda h, w: total(h, w)[0], argnums=(0, 1)))(*case[:2])
    with_vocabulary = [shape for shape in all_shapes(jaxpr.jaxpr) if V in shape]
    assert (B, 4, V) in with_vocabulary  # the chunk itself: the walk sees inside
    assert max(np.prod(shape) for shape in with_vocabulary) == max(B * 4 * V, D * V)


def test_a_sampled_support_keeps_no_head_of_each_chunk(case):
    hidden, head, tokens, _, _ = case
    support = np.repeat(tokens[..., None], 2, axis=-1)
    how = {"chunk": 4, "temperature": 0.7}

    def total(hidden, head):
        return support_logprobs(hidden, head, tokens, support, jnp.int32(2), **how)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(hidden, head)
    shapes = [shape for shape in all_shapes(jaxpr.jaxpr) if V in shape]
    assert max(np.prod(shape) for shape in shapes) == D * V


def test_trained_gradient_is_zero_where_nothing_is_scored(case):
    hidden, head, tokens, index, valid = case
    _, (grad, _) = run(chunked(case, 8), case)
    scored = np.zeros((B, T), bool)
    for row in range(B):
        scored[row, index[row, valid[row]] - 1] = True
    assert np.abs(grad).sum(axis=-1)[scored].min() > 0
    assert not np.asarray(grad)[~scored].any()


def test_empty_chunks_are_not_computed(case):
    """A slot beyond num_chunks is 0 whatever stands in its inputs."""
    _, head, tokens, index, _ = case

    @jax.jit
    def score(hidden):
        return target_logprobs(hidden, head, index, tokens, 0, chunk=8, temperature=1.0)

    logprobs, entropy = score(np.full((B, T, D), np.nan, np.float32))
    assert not logprobs.any() and not entropy.any()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_extreme_logits_are_safe(scale):
    logits = np.float32([[0.0, 0.5, -0.8], [0.8, 0.79, -1.2]]) * np.float32(scale)
    targets = np.array([1, 2])

    def total(z):
        logprobs, entropy = token_logprobs(z, targets)
        return logprobs.sum() + entropy.sum(), (logprobs, entropy)

    (_, (logprobs, entropy)), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(logits)
    z = np.asarray(logits, np.float64)
    want = z - np.logaddexp.reduce(z, axis=-1, keepdims=True)
    np.testing.assert_allclose(logprobs, want[np.arange(2), targets], rtol=1e-6, atol=1e-6)
    assert np.isfinite(grad).all() and np.isfinite(entropy).all()


@pytest.mark.parametrize(("axes", "softcap"), [({}, 0.0), ({}, 2.0), ({"data": 2, "tensor": 2}, 0)])
def test_sampled_support_is_the_distribution_over_its_ids(case, axes, softcap):
    """Values and gradients of the masked formula, chunks beyond the last used one aside, on a mesh as without."""
    hidden, head, tokens, _, _ = case
    rng = np.random.default_rng(1)
    support = np.argsort(rng.random((B, T, V)), axis=-1)[..., :5].astype(np.int32)
    support[..., 0] = tokens  # somewhere among them, once
    support[..., 1:][support[..., 1:] == tokens[..., None]] = -1
    support[:, ::3, 3:] = -1
    keep = (support[..., None] == np.arange(V)).any(axis=-2)

    def chunked(hidden, head):
        logprobs, entropy = support_logprobs(
            hidden,
            head,
            tokens,
            support,
            jnp.int32(2),
            chunk=8,
            temperature=0.7,
            softcap=softcap,
        )
        return logprobs.sum() + 0.3 * entropy.sum(), (logprobs, entropy)

    def plain(hidden, head):
        logits = hidden @ head
        logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
        logprobs, entropy = token_logprobs(logits, tokens, 0.7, keep)
        logprobs, entropy = (jnp.where(np.arange(T) < 16, x, 0.0) for x in (logprobs, entropy))
        return logprobs.sum() + 0.3 * entropy.sum(), (logprobs, entropy)

    want = jax.jit(jax.value_and_grad(plain, argnums=(0, 1), has_aux=True))(hidden, head)
    if axes:
        mesh = make_mesh(axes, jax.devices()[:4])
        hidden = jax.device_put(hidden, NamedSharding(mesh, PartitionSpec("data")))
        head = jax.device_put(head, NamedSharding(mesh, PartitionSpec(None, "tensor")))
    got = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1), has_aux=True))(hidden, head)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
