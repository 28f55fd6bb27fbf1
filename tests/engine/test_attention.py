"""A decode step's attention: against float64, what is chosen, and that the kernels lower for a GPU anywhere."""

import functools
import inspect
import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec, use_abstract_mesh

from kernels import decode_rows_hopper, paged_attention_hopper
from kernels.decode_attention import Tuning, decode_attention
from kernels.decode_rows import add_norm, gated_matmul, split_matmul
from kernels.decode_rows_hopper import Hopper
from rl_jax.engine.attention import (
    HOPPER,
    PLAIN,
    TRITON,
    by_shard,
    choose_attention,
    choose_chunk_attention,
    hopper,
    parts_of,
    plain,
    with_rows,
)
from rl_jax.engine.engine import JaxEngine
from rl_jax.engine.programs import Step, decode_step, generate
from rl_jax.engine.state import DecodeState, empty_slots
from rl_jax.mesh import AXES, SERVE_RULES, make_mesh
from rl_jax.models.attention import apply_rope, rope_angles
from rl_jax.models.decoder import build_model
from rl_jax.models.features import Form
from rl_jax.settings import EngineSettings
from rl_jax.testing.tiny_model import tiny_settings

S, PAGE, N, H, K, DH = 4, 4, 3, 4, 2, 8
T = N * PAGE - 1  # tokens of a context, most
TRITON_CALL = "__gpu$xla.gpu.triton"


def draw():
    """(q, new k and v, cache, where): an empty context, a full one and a slot that is not active."""
    rng = np.random.default_rng()
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    pairs = ((S,), (S * N + 2, PAGE))
    new, cache = ((array(*shape, K, DH), array(*shape, K, DH)) for shape in pairs)
    tables = jnp.asarray(rng.permutation(S * N + 2)[: S * N].reshape(S, N), jnp.int32)
    where = (jnp.array([0, T - 1, 5, 3]), jnp.array([True, True, True, False]), tables)
    return array(S, H, DH), new, cache, where


def of_slots(cache, where):
    """k or v [S, N * PAGE, K, Dh] as each slot's table says."""
    return np.asarray(cache)[np.asarray(where[2])].reshape(S, N * PAGE, *cache.shape[2:])


def test_plain_appends_and_equals_float64():
    q, new, before, where = draw()
    out, after = plain(q, new, before, where)
    cache, kept = ([of_slots(c, where) for c in pair] for pair in (before, after))
    for s in range(3):
        n = int(where[0][s]) + 1
        k, v = (np.concatenate([c[s, : n - 1], x[s][None]]) for c, x in zip(cache, new))
        assert all((np.asarray(now[s, :n]) == x).all() for now, x in zip(kept, (k, v)))
        k, v = (np.repeat(x.astype(np.float64), H // K, axis=1) for x in (k, v))
        scores = np.exp(np.einsum("hd,thd->ht", np.asarray(q[s], np.float64), k) * DH**-0.5)
        want = np.einsum("ht,thd->hd", scores / scores.sum(-1, keepdims=True), v)
        np.testing.assert_allclose(out[s], want, atol=1e-6)
    assert all((now[3] == old[3]).all() for now, old in zip(kept, cache))
    assert all(
        (now != old).any(axis=(2, 3)).sum() == 3
        for now, old in zip(map(np.asarray, after), map(np.asarray, before))
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", [2, 64])
def test_kernel_rotates_appends_and_attends_as_plain(block):
    """Interpreted; 3 queries a group, which the kernel pads, and blocks of half a page or a page that leave a rest."""
    rng, (group, Dh) = np.random.default_rng(), (3, 16)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    product, bias = array(2, S, K, group + 2, Dh), array(K, group + 2, Dh)
    pages = S * N + 2
    cache, slots = (array(pages, PAGE, K, Dh), array(pages, PAGE, K, Dh)), draw()[3]
    cos, sin = rope_angles(slots[0][:, None], Dh, 1e4)
    kernel = partial(decode_attention, tuning=Tuning(block=block, interpret=True))
    got, kept = jax.jit(kernel)(product, bias, (cos[:, 0], sin[:, 0]), cache, slots)
    x = product.sum(axis=0) + bias
    rotated = lambda heads: apply_rope(heads[:, None], cos, sin)[:, 0]
    q, k = rotated(x[:, :, :-2].reshape(S, -1, Dh)), rotated(x[:, :, -2])
    want, right = plain(q, (k, x[:, :, -1]), cache, slots)
    np.testing.assert_allclose(got[:3], want[:3], atol=1e-5)
    for a, b in zip(kept, right):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_rows_kernels_equal_float64():
    rng = np.random.default_rng()
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    exact = lambda x: np.asarray(x, np.float64)
    x, w, gates, scale = array(64, 256), array(256, 64) / 16, array(256, 2, 64) / 16, array(64)
    parts = split_matmul(x, w, interpret=True)
    assert parts.shape == (2, 64, 64)
    np.testing.assert_allclose(parts.sum(axis=0), exact(x) @ exact(w), atol=1e-5)
    gate, up = (exact(x) @ exact(gates[:, i]) for i in range(2))
    got = gated_matmul(x, gates, interpret=True)
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, atol=1e-5)
    total, normed = add_norm(x[:, :64], parts, scale, eps=1e-6, interpret=True)
    wide = exact(x)[:, :64] + exact(x) @ exact(w)
    np.testing.assert_allclose(total, wide, atol=1e-5)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * exact(scale)
    np.testing.assert_allclose(normed, want, atol=1e-5)


def test_what_runs_depends_on_the_device_and_the_pages():
    assert choose_attention(tiny_settings(), SERVE_RULES, make_mesh({}, jax.devices()[:1])) is PLAIN
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H100")
    mesh = SimpleNamespace(devices=np.array([device]), size=1)
    settings = tiny_settings(dtype="bfloat16", head_dim=16)
    assert choose_attention(settings, SERVE_RULES, mesh, page_size=64) is TRITON
    assert choose_attention(settings, SERVE_RULES, mesh, page_size=48) is PLAIN
    wide = SimpleNamespace(devices=mesh.devices, size=2, shape=dict.fromkeys(AXES, 1) | {"data": 2})
    assert choose_attention(settings, SERVE_RULES, wide, page_size=64) is PLAIN
    assert (
        choose_attention(tiny_settings(window=8), SERVE_RULES, make_mesh({}, jax.devices()[:1]))
        is PLAIN
    )


def test_the_hopper_kernel_runs_models_that_the_other_does_not_know(caplog):
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H100")
    mesh = SimpleNamespace(devices=np.array([device]), size=1)
    shape = {"dtype": "bfloat16", "head_dim": 64, "num_heads": 8, "num_kv_heads": 2}
    windowed = tiny_settings(**shape, window=8, activation="gelu_tanh")
    choose = lambda page_size=64, settings=windowed: choose_attention(
        settings, SERVE_RULES, mesh, 64, page_size
    )
    assert choose() is HOPPER and choose(settings=tiny_settings(**shape)) is TRITON
    with caplog.at_level(logging.INFO, "rl_jax.engine.attention"):
        assert choose(16) is PLAIN
        device.compute_capability = "8.0"
        assert choose() is PLAIN
    assert "pages of a multiple of 64 tokens, they have 16" in caplog.text
    assert "needs compute capability 9.0, this is 8.0" in caplog.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 8}, "no model.window=8"),
        ({"attention_scale": 0.1}, "no model.attention_scale=0.1"),
        ({"attention_softcap": 50.0, "window": 8, "full_every": 2}, "no model.window=8, attention_softcap=50"),
    ],
)  # fmt: skip
def test_a_model_that_the_kernels_do_not_know_is_left_to_the_plain_form(changes, reason, caplog):
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H100")
    mesh = SimpleNamespace(devices=np.array([device]), size=1)
    settings = tiny_settings(dtype="bfloat16", head_dim=16, **changes)
    with caplog.at_level(logging.INFO, "rl_jax.engine.attention"):
        assert choose_attention(settings, SERVE_RULES, mesh, 64, 64) is PLAIN
        assert choose_chunk_attention(settings, SERVE_RULES, mesh, 64) is None
    assert caplog.text.count(reason) == 2


def test_a_model_whose_window_or_scale_says_nothing_has_the_kernels(caplog):
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H100")
    mesh = SimpleNamespace(devices=np.array([device]), size=1)
    settings = tiny_settings(dtype="bfloat16", head_dim=16, window=64, attention_scale=0.25)
    assert choose_attention(settings, SERVE_RULES, mesh, 64, 64) is TRITON
    assert choose_chunk_attention(settings, SERVE_RULES, mesh, 64) is not None
    with caplog.at_level(logging.INFO, "rl_jax.engine.attention"):
        found = choose_attention(
            replace(settings, activation="gelu_tanh", post_norms=True), SERVE_RULES, mesh, 64, 64
        )
    assert found == replace(TRITON, of_product=None)
    assert "kernels of layers know no model.activation=gelu_tanh, post_norms" in caplog.text


def test_plain_sees_back_as_far_as_the_window():
    q, new, cache, where = draw()
    got, kept = plain(q, new, cache, where, Form(window=3, scale=0.7, softcap=1.5))
    kept = [of_slots(c, where) for c in kept]
    for s in range(3):
        n = int(where[0][s]) + 1
        k, v = (np.repeat(np.asarray(c[s], np.float64), H // K, axis=1)[max(n - 3, 0) : n] for c in kept)  # fmt: skip
        scores = np.einsum("hd,thd->ht", np.asarray(q[s], np.float64), k) * 0.7
        scores = np.exp(1.5 * np.tanh(scores / 1.5))
        want = np.einsum("ht,thd->hd", scores / scores.sum(-1, keepdims=True), v)
        np.testing.assert_allclose(got[s], want, atol=1e-6)


def hopper_inputs(dtype=jnp.bfloat16, page=64, head_dim=64):
    """As draw, of what the Hopper kernel takes; nothing but what is live is finite."""
    rng = np.random.default_rng()
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    new = (array(S, K, head_dim), array(S, K, head_dim))
    tables = jnp.asarray(rng.permutation(S * N + 2)[: S * N].reshape(S, N), jnp.int32)
    position = jnp.array([0, N * page - 1, page + 5, 3])
    cache = [array(S * N + 2, page, K, head_dim) for _ in "kv"]
    live = np.zeros((S * N + 2, page), bool)
    for s, last in enumerate(position.tolist()):
        places = np.arange(last)
        live[np.asarray(tables)[s, places // page], places % page] = True
    cache = tuple(jnp.where(live[..., None, None], c, jnp.nan) for c in cache)
    return (
        array(S, H, head_dim),
        new,
        cache,
        (position, jnp.array([True, True, True, False]), tables),
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(paged_attention_hopper.plgpu, "InterpretGPUParams"),
    reason="this jax interprets no GPU",
)
@pytest.mark.parametrize("form", [Form(), Form(window=70, scale=0.3, softcap=2.0)])
def test_the_hopper_kernel_attends_as_the_plain_form_does(form):
    """Interpreted."""
    q, new, cache, where = hopper_inputs()
    interpret = paged_attention_hopper.plgpu.InterpretGPUParams()
    tuning = paged_attention_hopper.Tuning(2, 1, stages_weights=True, interpret=interpret)
    want, right = plain(q, new, cache, where, form)
    got, kept = hopper(q, new, cache, where, form, tuning)
    wide = lambda x: np.asarray(x, np.float32)
    np.testing.assert_allclose(wide(got[:3]), wide(want[:3]), atol=0.03)
    assert not np.asarray(got[3]).any()
    for a, b in zip(kept, right):
        np.testing.assert_array_equal(wide(a), wide(b))


def test_parts_fill_a_card_and_are_never_more_than_pages():
    assert [parts_of(p, 40) for p in (1, 8, 32, 64, 128, 264, 10**4)] == [8, 8, 8, 5, 3, 1, 1]
    assert parts_of(8, 3) == 3 and parts_of(0, 0) == 1


def lowered(step, *args) -> str:
    """The program for a GPU, from a machine without one."""
    allow = [export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
    return export.export(jax.jit(step), platforms=["cuda"], disabled_checks=allow)(*args).mlir_module()  # fmt: skip


@functools.cache
def fused_model(dtype: str, qk_norm: bool = False, num_slots: int = 64):
    """Packed, of layers that fit the kernels, and the shapes of the slots of it."""
    shape = {
        "num_layers": 1,
        "embed_size": 128,
        "mlp_size": 128,
        "num_heads": 8,
        "head_dim": 16,
        "qkv_bias": True,
        "qk_norm": qk_norm,
    }
    model = build_model(tiny_settings(**shape, dtype=dtype, param_dtype=dtype), 264)
    cache = jax.ShapeDtypeStruct((num_slots * N, PAGE, 2, 16), jnp.dtype(dtype))
    slots = jax.eval_shape(lambda: empty_slots(EngineSettings(slots=num_slots)))
    return model, DecodeState(((cache, cache),), slots)


def drawn_step(dtype: str, qk_norm: bool = False, num_slots: int = 64):
    """(the model, what a decode step of it takes): random, at ragged positions, slot 5 not active."""
    model, state = fused_model(dtype, qk_norm, num_slots)
    rng = np.random.default_rng()
    params = jax.jit(lambda key: model.pack(model.init(key)))(jax.random.key(0))
    noise = lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype)
    params = {n: x + noise(x) for n, x in params.items()}
    kv = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), state.kv)
    slots = replace(
        empty_slots(EngineSettings(slots=num_slots)),
        context_length=jnp.asarray(rng.integers(1, T, num_slots), jnp.int32),
        active=jnp.arange(num_slots) != 5,
        max_new_tokens=jnp.full(num_slots, 9),
    )
    tables = jnp.asarray(rng.permutation(num_slots * N).reshape(num_slots, N), jnp.int32)
    return model, (params, kv, slots, tables)


@pytest.mark.slow
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_step_by_the_kernels_equals_the_portable_step(qk_norm):
    """Interpreted, in float32."""
    model, args = drawn_step("float32", qk_norm)
    kernel = partial(decode_attention, tuning=Tuning(block=4, interpret=True))
    made = []
    heads = TRITON.of_heads if not qk_norm else plain  # the kernel itself has a test above
    for attention in (PLAIN, replace(TRITON, of_heads=heads, of_product=kernel, interpret=True)):
        step = partial(decode_step, model.packed, attention=attention)
        made.append(jax.jit(step)(*args))
    (right, want), (kept, got) = made
    active = np.flatnonzero(args[2].active)
    np.testing.assert_allclose(got[active], want[active], atol=1e-4)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(decode_rows_hopper.plgpu, "InterpretGPUParams"),
    reason="this jax interprets no GPU",
)
def test_a_step_of_many_rows_by_their_kernels_equals_the_portable_step():
    """Interpreted, in bfloat16, against the portable step in float32: as near as that one in bfloat16."""
    model, args = drawn_step("bfloat16", num_slots=256)
    rows = Hopper(4, interpret=decode_rows_hopper.plgpu.InterpretGPUParams())
    kernel = partial(decode_attention, tuning=Tuning(block=4, interpret=True))
    by_kernels = replace(TRITON, of_product=kernel, interpret=True, rows=rows)
    step = lambda attention: partial(decode_step, model.packed, attention=attention)
    (_, plainly), (_, got) = (jax.jit(step(a))(*args) for a in (PLAIN, by_kernels))
    exact = fused_model("float32", num_slots=256)[0].packed
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)
    _, want = jax.jit(partial(decode_step, exact, attention=PLAIN))(*wide)
    active = np.flatnonzero(args[2].active)
    off, off_plainly = (np.abs(x - want)[active].mean() for x in (got, plainly))
    assert 0 < off < 1.2 * off_plainly


def test_many_slots_of_a_hopper_gpu_have_kernels_and_weights_that_lie_as_they_read_them():
    device = SimpleNamespace(
        platform="gpu", compute_capability="9.0", device_kind="H100", core_count=132
    )
    mesh = SimpleNamespace(devices=np.array([device]), size=1)
    settings = fused_model("bfloat16")[0].settings
    assert with_rows(TRITON, settings, mesh, 256).rows == Hopper(132)
    two = SimpleNamespace(devices=mesh.devices, size=2)
    ampere = SimpleNamespace(**vars(device) | {"compute_capability": "8.0"})
    older = SimpleNamespace(devices=np.array([ampere]), size=1)
    for step, model, place, slots in (
        (HOPPER, settings, mesh, 256),  # no kernels for layers
        (TRITON, replace(settings, dtype="float32"), mesh, 256),
        (TRITON, replace(settings, mlp_size=100), mesh, 256),
        (TRITON, settings, two, 256),
        (TRITON, settings, older, 256),
        (TRITON, settings, mesh, 128),
    ):
        assert with_rows(step, model, place, slots) is step


def test_packed_weights_lie_as_the_kernels_for_many_rows_read_them(monkeypatch):
    model, _ = fused_model("bfloat16")
    of_cpu = lambda step, *_: replace(step, rows=Hopper(132))
    mesh = make_mesh({}, jax.devices()[:1])
    make = lambda: JaxEngine(model, mesh, SERVE_RULES, EngineSettings(slots=4, context=32), "d")
    usual = make()
    monkeypatch.setattr("rl_jax.engine.engine.with_rows", of_cpu)
    engine = make()
    params = model.cast(model.init(jax.random.key(0)), jnp.bfloat16)
    packed, same = engine.pack(dict(params)), usual.pack(dict(params))
    for made in (packed, engine.zero_params()):
        orders = {n: x.format.layout.major_to_minor for n, x in made.items() if x.ndim == 3}
        assert orders.pop("layers.0.mlp.gate_up") == (1, 2, 0)
        assert set(orders.values()) <= {(0, 1, 2)}
    assert all((packed[name] == same[name]).all() for name in same)


def test_each_device_attends_with_its_own_heads():
    q, new, cache, where = draw()
    sharded = by_shard(PLAIN, make_mesh({"tensor": 2}, jax.devices()[:2]), ("tensor",))
    form = Form(window=3, softcap=1.5)
    (got, kept), (want, right) = (
        jax.jit(lambda *args, step=step: step.of_heads(*args, form))(q, new, cache, where)
        for step in (sharded, PLAIN)
    )
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert all((a == b).all() for a, b in zip(kept, right))
    assert {x.sharding.spec for x in kept} == {PartitionSpec(None, None, "tensor")}


@pytest.mark.slow
def test_kernels_lower_for_a_gpu():
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    new, cache = (bf16(S, K, 16),) * 2, (bf16(S * N, 16, K, 16),) * 2
    of_slot = (jax.ShapeDtypeStruct((S,), dtype) for dtype in (jnp.int32, bool))
    args = (bf16(S, H, 16), new, cache, (*of_slot, jax.ShapeDtypeStruct((S, N), jnp.int32)))
    kind = {"device_kind": "NVIDIA H100 80GB HBM3", "num_cores": 132, "platform": "cuda"}
    known = inspect.signature(AbstractDevice).parameters  # jax 0.11 knows no platform
    model, state = fused_model("bfloat16")
    cache = (bf16(64 * N, 16, K, 16),) * 2
    tables = jax.ShapeDtypeStruct((64, N), jnp.int32)
    abstract = {n: bf16(*a.shape) for n, a in model.packed.abstract.items()}
    hopper = AbstractDevice(**{name: kind[name] for name in known if name in kind})
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=hopper)):
        assert TRITON_CALL in lowered(TRITON.of_heads, *args)
        step = partial(generate, model.packed, step=Step(TRITON, True, 2, N * 16))
        state = replace(state, kv=(cache,))
        assert lowered(step, abstract, state, tables).count(f"@{TRITON_CALL}") == 7


@pytest.mark.slow
def test_a_step_with_the_hopper_kernel_lowers_for_a_gpu():
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    shape = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "window": 32}
    settings = tiny_settings(**shape, full_every=2, dtype="bfloat16", param_dtype="bfloat16")
    model = build_model(settings, 264)
    pages = bf16(16, 64, 2, 64)
    state = DecodeState(
        ((pages, pages),) * 4, jax.eval_shape(lambda: empty_slots(EngineSettings(slots=4)))
    )
    abstract = {n: bf16(*a.shape) for n, a in model.packed.abstract.items()}
    step = partial(generate, model.packed, step=Step(HOPPER, True, 2, 256))
    text = lowered(step, abstract, state, jax.ShapeDtypeStruct((4, 4), jnp.int32))
    assert text.count("@mosaic_gpu") == 1, "four layers, with and without a window, share a kernel"
