"""The decoder: against a numpy reference, and equal to itself however cut, compiled or fed."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.mesh import (
    SERVE_RULES,
    TRAIN_RULES,
    constrainer,
    make_mesh,
    merge_rules,
    named_sharding,
    shardings,
)
from rl_jax.models.attention import attention, causal_segment_mask
from rl_jax.models.decoder import build_model
from rl_jax.testing.tiny_model import tiny_model, tiny_settings

EXTRAS = {"qk_norm": True, "qkv_bias": True, "tie_embeddings": False}
B, T = 4, 12


@functools.cache
def model_and_params(extras: bool, num_layers: int = 2):
    model, params = tiny_model(num_layers=num_layers, **(EXTRAS if extras else {}))
    # Biases start at 0 and norms at 1: move everything, or the test would not see them.
    rng = np.random.default_rng(3)
    params = {n: p + 0.1 * rng.normal(size=p.shape).astype(np.float32) for n, p in params.items()}
    return model, params


def batch():
    """Two segments a row: i32[B, T] tokens, positions, segments."""
    tokens = np.random.default_rng(0).integers(0, 264, (B, T))
    positions = np.concatenate([np.arange(5), np.arange(T - 5)])
    segments = np.where(np.arange(T) < 5, 1, 2)
    return tokens, np.tile(positions, (B, 1)), np.tile(segments, (B, 1))


def packed_logits(model, params, tokens, positions, segments, remat="none", **kwargs):
    """f32[B, T, V] as the learner computes them: whole rows, causal within a segment."""
    mask = causal_segment_mask(positions, positions, segments, segments)
    attend = lambda layer, q, k, v: attention(q, k, v, mask)
    return model.logits(params, model.hidden(params, tokens, positions, attend, remat, **kwargs))


forward = jax.jit(packed_logits, static_argnums=0)


def unsegmented():
    """(positions, segments) of rows that are one sequence each."""
    return np.tile(np.arange(T), (B, 1)), np.ones((B, T), int)


def squared_logits(model, *args, **kwargs):
    return jnp.mean(jnp.square(packed_logits(model, *args, **kwargs)))


# --- a reference that shares no code -------------------------------------------------------------


def reference_logits(model, params, tokens):
    """float64 numpy, one sequence, in the formulas of the published Llama / Qwen models."""
    s, w = model.settings, {n: np.asarray(p, np.float64) for n, p in params.items()}
    half, n = s.head_dim // 2, len(tokens)

    def norm(x, name):
        scale = w[f"{name}.scale"]
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + s.norm_eps) * scale

    def rope(x):  # [n, heads, Dh]
        angle = np.arange(n)[:, None] * s.rope_theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["embed"][tokens]
    for i in range(s.num_layers):
        at, normed = f"layers.{i}.attention", norm(x, f"layers.{i}.attention_norm")
        q, k, v = (
            np.einsum("td,dhk->thk", normed, w[f"{at}.{p}"]) + w.get(f"{at}.{p}_bias", 0)
            for p in ("query", "key", "value")
        )
        if s.qk_norm:
            q, k = norm(q, f"{at}.query_norm"), norm(k, f"{at}.key_norm")
        q, k = rope(q), rope(k)
        k, v = (np.repeat(a, s.num_heads // s.num_kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("thk,shk->hts", q, k) / np.sqrt(s.head_dim)
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shk,hkd->td", weights, v, w[f"{at}.out"])
        normed, mlp = norm(x, f"layers.{i}.mlp_norm"), f"layers.{i}.mlp"
        gate = normed @ w[f"{mlp}.gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w[f"{mlp}.up"])) @ w[f"{mlp}.down"]
    return norm(x, "final_norm") @ w.get("unembed", w["embed"].T)


@pytest.mark.parametrize("extras", [False, True])
def test_logits_equal_a_numpy_reference(extras):
    model, params = model_and_params(extras)
    tokens = batch()[0]
    logits = forward(model, params, tokens, *unsegmented())
    assert logits.dtype == jnp.float32
    expected = [reference_logits(model, params, row) for row in tokens]
    np.testing.assert_allclose(logits, expected, atol=1e-4)


# --- equal however it is fed ---------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def extend(model, params, cache, slots, tokens, positions):
    """Logits of tokens i32[B, T] and the cache with their KV in it, kept as an engine would.

    cache: per layer (k, v), each [S, context, K, Dh]; slots: i32[B * T], the slot of each token.
    """
    cache, flat_positions = list(cache), positions.reshape(-1)

    def attend(layer, q, k, v):
        keys, values = cache[layer]
        flat = lambda a: a.reshape(-1, *a.shape[2:])  # [B, T, heads, Dh] -> [B*T, heads, Dh]
        keys = keys.at[slots, flat_positions].set(flat(k))
        values = values.at[slots, flat_positions].set(flat(v))
        cache[layer] = keys, values
        visible = jnp.arange(keys.shape[1]) <= flat_positions[:, None]  # [B*T, context]
        one_each = attention(flat(q)[:, None], keys[slots], values[slots], visible[:, None])
        return one_each.reshape(q.shape)

    return model.logits(params, model.hidden(params, tokens, positions, attend)), cache


@pytest.mark.slow
def test_packed_prefill_then_decode_equals_one_forward():
    model, params = model_and_params(True)
    s, context = model.settings, 16
    prompts = np.array([3, 5])  # tokens prefilled, packed into one chunk of 8
    tokens = batch()[0][:2]
    # Start from rubbish: nothing stale may be read.
    rubbish = jnp.full((2, context, s.num_kv_heads, s.head_dim), 1e3)
    cache = [(rubbish, rubbish)] * s.num_layers

    slots = np.repeat([0, 1], prompts)
    positions = np.concatenate([np.arange(n) for n in prompts])
    chunk = tokens[slots, positions]
    logits, cache = extend(model, params, cache, slots, chunk[None], positions[None])
    got = {(a, b): x for a, b, x in zip(slots, positions, np.asarray(logits)[0])}
    for step in range(T - max(prompts)):
        positions = prompts + step
        step_tokens = tokens[[0, 1], positions][:, None]  # [S, 1]
        logits, cache = extend(model, params, cache, np.arange(2), step_tokens, positions[:, None])
        got |= {(slot, positions[slot]): np.asarray(logits)[slot, 0] for slot in range(2)}

    whole = forward(model, params, batch()[0], *unsegmented())
    assert len(got) == sum(prompts) + 2 * (T - max(prompts))
    for (slot, position), logits in got.items():
        np.testing.assert_allclose(logits, whole[slot, position], atol=1e-5)


def test_segments_of_a_row_do_not_see_each_other():
    model, params = model_and_params(True)
    tokens, positions, segments = batch()
    packed = forward(model, params, tokens, positions, segments)
    alone = forward(model, params, np.roll(tokens, -5, axis=1), *unsegmented())
    np.testing.assert_allclose(packed[:, 5:], alone[:, : T - 5], atol=1e-5)


# --- equal however it is compiled or cut ---------------------------------------------------------


@pytest.mark.slow
def test_jit_equals_no_jit():
    model, params = model_and_params(True)
    jitted = forward(model, params, *batch())
    with jax.disable_jit():
        plain = packed_logits(model, params, *batch())
    np.testing.assert_allclose(jitted, plain, atol=1e-5)


@functools.cache
def one_device_gradients(remat: str = "none"):
    """(loss, gradients) of a one-layer model with every option; deeper ones only compile longer."""
    model, params = model_and_params(True, num_layers=1)
    step = jax.jit(jax.value_and_grad(functools.partial(squared_logits, model, remat=remat)))
    return step(params, *batch())


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["elementwise", "layer"])
def test_remat_gives_the_same_gradients(remat):
    loss, gradients = one_device_gradients()
    remat_loss, remat_gradients = one_device_gradients(remat)
    np.testing.assert_allclose(loss, remat_loss, rtol=1e-6)
    for name, gradient in gradients.items():
        assert np.abs(gradient).max() > 0, f"{name} has no gradient"
        np.testing.assert_allclose(gradient, remat_gradients[name], atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes, rules",
    [
        ({"fsdp": 2, "tensor": 2}, {}),
        pytest.param({"data": 2, "fsdp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"tensor": 4}, {"kv_heads": None}, marks=pytest.mark.slow),
        pytest.param({"data": 4, "tensor": 2}, {"embed": ("data", "fsdp")}, marks=pytest.mark.slow),
    ],
    ids=["fsdp2_tensor2", "data2_fsdp2", "kv_replicated", "embed_over_data"],
)
def test_sharded_training_equals_unsharded(axes, rules):
    model, params = model_and_params(True, num_layers=1)
    rules = merge_rules(TRAIN_RULES, rules)
    mesh = make_mesh(axes, jax.devices()[: math.prod(axes.values())])
    placements = shardings(model.logical_axes, rules, mesh)
    rows = named_sharding(("batch", "length"), rules, mesh)
    loss_of = functools.partial(squared_logits, model, constrain=constrainer(rules, mesh))
    step = jax.jit(jax.value_and_grad(loss_of), out_shardings=(None, placements))
    placed = {n: jax.device_put(p, placements[n]) for n, p in params.items()}
    assert len(placed["layers.0.mlp.up"].sharding.device_set) == mesh.size
    assert any(not p.sharding.is_fully_replicated for p in placed.values())
    loss, gradients = step(placed, *(jax.device_put(a, rows) for a in batch()))
    expected_loss, expected = one_device_gradients()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name, gradient in gradients.items():
        assert gradient.sharding.is_equivalent_to(placements[name], gradient.ndim)
        np.testing.assert_allclose(gradient, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "tensor, rules",
    [(2, {}), (4, {"kv_heads": None})],  # 2 kv heads: replicated over 4, as a pool may ask
    ids=["tensor2", "kv_replicated"],
)
def test_tensor_sharded_serving_equals_unsharded(tensor, rules):
    model, params = model_and_params(True)
    mesh = make_mesh({"tensor": tensor}, jax.devices()[:tensor])
    placements = shardings(model.logical_axes, merge_rules(SERVE_RULES, rules), mesh)
    placed = {n: jax.device_put(p, placements[n]) for n, p in params.items()}
    np.testing.assert_allclose(
        forward(model, placed, *batch()), forward(model, params, *batch()), atol=1e-5
    )


# --- weights -------------------------------------------------------------------------------------


def test_init_depends_on_the_key_and_the_name_only():
    _, small = tiny_model(seed=7)
    _, other = tiny_model(seed=7, qkv_bias=True, tie_embeddings=False)
    np.testing.assert_array_equal(small["embed"], other["embed"])
    query = "layers.1.attention.query"
    np.testing.assert_array_equal(small[query], other[query])
    assert not np.array_equal(small[query], small["layers.0.attention.query"])
    assert not np.array_equal(small[query], tiny_model(seed=8)[1][query])


def test_init_on_a_mesh_equals_init_on_one_device():
    model, _ = model_and_params(False)
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    placements = shardings(model.logical_axes, TRAIN_RULES, mesh)
    sharded = jax.jit(model.init, out_shardings=placements)(jax.random.key(0))
    _, single = tiny_model(seed=0)
    for name, array in single.items():
        np.testing.assert_array_equal(sharded[name], array, err_msg=name)


def test_each_name_reaches_its_own_weight_beyond_ten_layers():
    model = build_model(tiny_settings(num_layers=12), 264)
    scale = lambda i: jnp.full((32,), float(i))
    params = {n: jnp.zeros(a.shape, a.dtype) for n, a in model.abstract.items()}
    params |= {f"layers.{i}.mlp_norm.scale": scale(i) for i in range(12)}
    module = model._module(params)
    for i in range(12):
        np.testing.assert_array_equal(module.layers[i].mlp_norm.scale[...], scale(i))


def test_abstract_names_shapes_and_dtypes_equal_init():
    model = build_model(tiny_settings(param_dtype="bfloat16", **EXTRAS), 264)
    made = jax.eval_shape(model.init, jax.random.key(0))
    assert list(made) == list(model.abstract) == list(model.logical_axes)
    for name, array in made.items():
        assert array.shape == model.abstract[name].shape
        assert array.dtype == model.abstract[name].dtype == jnp.bfloat16
        assert len(model.logical_axes[name]) == array.ndim


def test_bfloat16_activations_stay_near_float32():
    model, params = model_and_params(False)
    low = build_model(tiny_settings(dtype="bfloat16"), 264)
    served = low.cast(params, jnp.bfloat16)
    assert all(p.dtype == jnp.bfloat16 for p in served.values())
    logits = forward(low, served, *batch())
    assert logits.dtype == jnp.float32
    exact = forward(model, params, *batch())
    np.testing.assert_allclose(logits, exact, atol=0.15)  # of logits of std 1, in 8-bit mantissas


def test_token_outside_the_vocabulary_stays_finite():
    model, params = model_and_params(False)
    tokens, positions, segments = batch()
    tokens[:, -1], tokens[:, 0] = 10_000, -1
    assert np.isfinite(forward(model, params, tokens, positions, segments)).all()


def test_impossible_settings_name_every_error():
    settings = tiny_settings(num_heads=5, head_dim=7, mlp_size=0, dtype="float16", vocab_size=9)
    with pytest.raises(ValueError) as error:
        build_model(settings, 264)
    for part in ("num_heads=5", "head_dim=7", "mlp_size=0", "float16", "vocab_size=9"):
        assert part in str(error.value)


def test_missing_weight_is_named():
    model, params = model_and_params(False)
    params = {n: p for n, p in params.items() if n != "layers.1.mlp.up"}
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up"):
        model.head(params)


@pytest.mark.slow
def test_packed_weights_give_the_same_hidden_states():
    model, params = model_and_params(True)
    tokens = np.random.default_rng().integers(0, model.vocab_size, (2, 9))
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    mask = causal_segment_mask(positions, positions, positions * 0, positions * 0)
    attend = lambda _, q, k, v: attention(q, k, v, mask)
    packed = model.pack(dict(params))
    assert sorted(packed) == sorted(model.packed.abstract) != sorted(params)
    assert all(x.shape == model.packed.abstract[n].shape for n, x in packed.items())
    got = model.packed.hidden(packed, tokens, positions, attend)
    np.testing.assert_allclose(got, model.hidden(params, tokens, positions, attend), atol=1e-5)
