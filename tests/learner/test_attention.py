"""Which attention the learner takes, and that its gradient lowers for a GPU with it, on one device and on a mesh."""

import logging
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from kernels.cudnn_attention import CUSTOM_CALLS
from kernels.packed_attention import Split
from rl_jax.learner.attention import choose_attention, kernel_attention, plain_attention
from rl_jax.mesh import TRAIN_RULES, make_mesh
from rl_jax.models.attention import attention, causal_segment_mask
from rl_jax.models.features import Form
from rl_jax.settings import ModelSettings

FAST = {"xla_backend_optimization_level": 0}  # of compiling


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


def test_a_kernel_is_not_taken_for_a_model_that_it_does_not_know(caplog):
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H100")
    mesh = SimpleNamespace(devices=np.array([device]), size=1, shape=defaultdict(lambda: 1))
    settings = ModelSettings(dtype="bfloat16", window=16)
    with caplog.at_level(logging.INFO, "rl_jax.learner.attention"):
        assert choose_attention("auto", settings, TRAIN_RULES, mesh, 17)[0] == "plain"
    assert "attention kernels know no model.window=16" in caplog.text
    with pytest.raises(ValueError, match="attention=cudnn cannot run: .* know no model.window=16"):
        choose_attention("cudnn", settings, TRAIN_RULES, mesh, 17)
    assert choose_attention("auto", settings, TRAIN_RULES, mesh, 16)[0] == "cudnn"  # sees all


@pytest.mark.slow
@pytest.mark.parametrize(("T", "window"), [(300, 20), (300, 90), (80, 70), (40, 100)])
def test_blocks_of_a_layer_with_a_window_are_one_masked_attention(T, window):
    """With gradients; the other layer, without one, sees everything."""
    rng = np.random.default_rng()
    cut = T // 3
    segments = jnp.asarray([[1] * cut + [2] * (T - cut - 5) + [0] * 5])
    positions = jnp.asarray([[*range(cut), *range(T - cut - 5), *range(5)]])
    q, k, v = (jnp.asarray(rng.normal(size=(1, T, n, 8)), jnp.float32) for n in (4, 2, 2))
    settings = ModelSettings(
        window=window, full_every=2, attention_scale=0.6, attention_softcap=2.0
    )
    attend = plain_attention(settings, positions, segments)
    for layer, own in ((0, window), (1, 0)):
        mask = causal_segment_mask(positions, positions, segments, segments, own)
        assert int(mask[0].sum(-1).max()) == min(own or T, T - cut - 5)
        whole = partial(attention, mask=mask, form=Form(own, 0.6, 2.0))

        def pulled(function, *args):
            out, pull = jax.vjp(function, *args)
            return out, *pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

        both = [
            jax.jit(partial(pulled, f), compiler_options=FAST)(q, k, v)
            for f in (partial(attend, layer), whole)
        ]
        for got, want in zip(*both, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_keys_behind_the_window_of_a_block_cost_nothing():
    positions, segments = jnp.arange(2048)[None], jnp.ones((1, 2048), jnp.int32)
    shapes = [jax.ShapeDtypeStruct((1, 2048, n, 8), jnp.float32) for n in (4, 2, 2)]

    def flops(window):
        attend = plain_attention(ModelSettings(window=window), positions, segments)
        return jax.jit(partial(attend, 0)).lower(*shapes).compile().cost_analysis()["flops"]

    assert flops(128) < 0.25 * flops(0)  # 16 blocks of 128 x 255, of 4 up to 512 x 2048


@pytest.mark.slow
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


@pytest.mark.slow
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
