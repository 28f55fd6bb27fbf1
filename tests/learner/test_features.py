"""Training a model with windows, soft caps and norms behind: gradients in any packing and on any mesh."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.learner.rows import Rows
from rl_jax.mesh import TRAIN_RULES, make_mesh
from rl_jax.models.attention import attention, causal_segment_mask
from rl_jax.models.decoder import build_model
from rl_jax.models.features import form_of
from rl_jax.models.value import value_model
from rl_jax.settings import LearnerSettings
from rl_jax.testing.tiny_model import GEMMA, tiny_model, tiny_settings

FAST = {"xla_backend_optimization_level": 0}  # of compiling
B, LENGTHS, TEMPERATURE = 4, (17, 23), 0.7
T = sum(LENGTHS)
SETTINGS = LearnerSettings(row_tokens=T, microbatch_rows=B, logprob_chunk=B * 8, remat="elementwise")  # fmt: skip


@cache
def gemma():
    """Two layers, with a window and without, all features on."""
    model, params = tiny_model(vocab_size=40, **{**GEMMA, "num_layers": 2})
    rng = np.random.default_rng(3)
    return model, {n: p + 0.2 * rng.normal(size=p.shape).astype("f4") for n, p in params.items()}


@cache
def sequences():
    rng = np.random.default_rng(4)
    return [rng.integers(0, 40, n) for n in LENGTHS * B]


def rows_of(members):
    """A microbatch of B rows; members: indices of the sequences of each row. All tokens but the first are trained."""
    shape = (B, T)
    micro = {n: np.zeros(shape, np.int32) for n in ("tokens", "positions", "sample_ids", "target_index")}  # fmt: skip
    for row, own in enumerate(members):
        columns, at = [], 0
        for number, member in enumerate(own, 1):
            tokens = sequences()[member]
            span = slice(at, at + len(tokens))
            micro["tokens"][row, span] = tokens
            micro["positions"][row, span] = np.arange(len(tokens))
            micro["sample_ids"][row, span] = number
            columns += range(at + 1, at + len(tokens))
            at += len(tokens)
        micro["target_index"][row, : len(columns)] = columns
    index = micro["target_index"]
    taken = np.take_along_axis(micro["tokens"], index, axis=1)
    return {
        **micro,
        "target_tokens": np.where(index > 0, taken, 0),
        "target_mask": index > 0,
        "num_chunks": np.int32(T / 8),
    }


def gradient(axes, members):
    """(loss, gradient) of the sum of log-probs and a part of the entropies."""
    model, params = gemma()
    mesh = make_mesh(axes, jax.devices()[: math.prod(axes.values())])
    rows = Rows(model, mesh, TRAIN_RULES, SETTINGS, max_rows=B)
    forward = rows.log_probs(TEMPERATURE)

    def loss(params, micro):
        logprobs, entropy = forward(params, micro)
        return (logprobs.sum() + 0.3 * entropy.sum()) / 100

    step = jax.jit(
        jax.value_and_grad(loss),
        out_shardings=(None, rows.param_shardings),
        compiler_options=FAST,
    )
    return jax.device_get(step(rows.place(params), rows_of(members)))


PACKED = ((0, 1), (2, 3), (4, 5), (6, 7))


@cache
def packed():
    return gradient({}, PACKED)


@pytest.mark.slow
def test_gradients_equal_those_of_the_formula_written_out():
    """One sequence at a time, all logits at once, whole masks."""
    model, params = gemma()

    def loss(params):
        total = 0.0
        for length, own in ((n, sequences()[i :: len(LENGTHS)]) for i, n in enumerate(LENGTHS)):
            tokens = jnp.asarray(np.stack(own))
            positions = jnp.tile(jnp.arange(length), (B, 1))

            def attend(layer, q, k, v, positions=positions):
                form = form_of(model.settings, layer)
                where = (positions, positions, positions * 0, positions * 0)
                return attention(q, k, v, causal_segment_mask(*where, form.window), form)

            hidden = model.hidden(params, tokens, positions, attend)
            table = jax.nn.log_softmax(model.logits(params, hidden) / TEMPERATURE)[:, :-1]
            total += jnp.take_along_axis(table, tokens[:, 1:, None], axis=-1).sum()
            total -= 0.3 * (jnp.exp(table) * table).sum()
        return total / 100

    want, gradients = jax.jit(jax.value_and_grad(loss), compiler_options=FAST)(params)
    got, found = packed()
    assert got == pytest.approx(float(want), rel=1e-5)
    for name, array in gradients.items():
        assert np.isfinite(found[name]).all() and np.abs(found[name]).max() > 0, name
        np.testing.assert_allclose(found[name], array, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "members"),
    [
        ({"fsdp": 2, "tensor": 2}, PACKED),
        ({}, ((1, 0), (6, 3), (2, 7), (5, 4))),  # other neighbours, other places
    ],
)
def test_meshes_and_packing_change_nothing(axes, members):
    (want, gradients), (got, found) = packed(), gradient(axes, members)
    assert got == pytest.approx(want, rel=1e-5)
    for name, array in gradients.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_value_model_has_the_same_trunk():
    model, params = gemma()
    critic = value_model(build_model, tiny_settings(**{**GEMMA, "num_layers": 2}), 40)
    own = critic.from_policy(params)
    assert "layers.1.mlp_post_norm.scale" in own
    tokens, positions = jnp.asarray(sequences()[0])[None], jnp.arange(LENGTHS[0])[None]
    mask = causal_segment_mask(positions, positions, positions * 0, positions * 0, 7)
    attend = lambda layer, q, k, v: attention(q, k, v, mask, form_of(model.settings, layer))
    got, want = (
        jax.jit(lambda p, m=m: m.hidden(p, tokens, positions, attend), compiler_options=FAST)(p)
        for m, p in ((critic, own), (model, params))
    )
    np.testing.assert_array_equal(got, want)
