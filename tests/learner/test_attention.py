"""Which attention the learner takes, and that its gradient lowers for a GPU with it, on one device and on a mesh."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from kernels.cudnn_attention import CUSTOM_CALLS
from kernels.packed_attention import Split
from rl_jax.learner.attention import choose_attention, kernel_attention, plain_attention
from rl_jax.mesh import TRAIN_RULES, make_mesh
from rl_jax.settings import ModelSettings


def test_auto_on_the_cpu_is_plain_and_says_why(caplog):
    with caplog.at_level(logging.INFO, "rl_jax.learner.attention"):
        name, attention = choose_attention(
            "auto", ModelSettings(), TRAIN_RULES, make_mesh({}, jax.devices()[:1])
        )
    assert name == "plain" and attention.func is plain_attention
    assert "plain runs" in caplog.text and "the platform is cpu" in caplog.text


@pytest.mark.parametrize("name", ["cudnn", "splash"])
def test_a_kernel_that_cannot_run_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"attention={name} cannot run.*use auto or plain"):
        choose_attention(name, ModelSettings(), TRAIN_RULES, make_mesh({}, jax.devices()[:1]))


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "tensor": 2}])
def test_rows_lower_for_a_gpu_with_their_gradients(axes):
    mesh = make_mesh(axes, jax.devices()[: 4 if axes else 1])
    split = Split(mesh, ("data", "fsdp"), ("tensor",)) if axes else None
    B, T, H, K, Dh = 4, 32, 4, 2, 16
    positions = jnp.tile(jnp.arange(T), (B, 1))

    def loss(q, k, v, segments):
        attend = kernel_attention("cudnn", split, positions, segments)
        return attend(0, q, k, v).astype(jnp.float32).sum()

    shapes = [jax.ShapeDtypeStruct((B, T, n, Dh), jnp.bfloat16) for n in (H, K, K)]
    found = export.export(
        jax.jit(jax.grad(loss, argnums=(0, 1, 2))),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS],
    )(*shapes, jax.ShapeDtypeStruct((B, T), jnp.int32))
    # Twice each: the first group of segments, and the loop over others that the data may have.
    assert [found.mlir_module().count(f"@{name}(") for name in CUSTOM_CALLS] == [2, 2]


def test_plain_attention_keeps_segments_apart():
    rng = np.random.default_rng()
    segments = jnp.asarray([[1] * 5 + [2] * 7])
    positions = jnp.asarray([[*range(5), *range(7)]])
    q, k, v = (jnp.asarray(rng.normal(size=(1, 12, n, 8)), jnp.float32) for n in (4, 2, 2))
    attend = plain_attention(ModelSettings(), positions, segments)
    out = attend(0, q, k, v)
    other = attend(0, q, k.at[:, :5].add(1.0), v.at[:, :5].add(1.0))
    np.testing.assert_array_equal(out[:, 5:], other[:, 5:])
    assert np.abs(out[:, :5] - other[:, :5]).max() > 0
