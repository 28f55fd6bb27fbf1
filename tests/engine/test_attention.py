"""A decode step's attention: against float64, what is chosen, and that the kernels lower for a GPU anywhere."""

import inspect
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kernels import cudnn_attention
from kernels.decode_attention import Tuning, decode_attention
from rl_jax.engine.attention import by_shard, choose_attention, cudnn, plain, triton
from rl_jax.mesh import SERVE_RULES, make_mesh
from rl_jax.testing.tiny_model import tiny_settings

S, T, H, K, DH = 4, 11, 4, 2, 8
TRITON_CALL = "__gpu$xla.gpu.triton"


def draw():
    """(q, new k and v, cache, position, active): an empty cache, a full one and a slot that is not active."""
    rng = np.random.default_rng()
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    new, cache = ((array(*shape, K, DH), array(*shape, K, DH)) for shape in ((S,), (S, T)))
    position = jnp.array([0, T - 1, 5, 3])
    return array(S, H, DH), new, cache, position, jnp.array([True, True, True, False])


def test_plain_appends_and_equals_float64():
    q, new, cache, position, active = draw()
    out, kept = plain(q, new, cache, position, active)
    for s in range(3):
        n = int(position[s]) + 1
        k, v = (np.concatenate([c[s, : n - 1], x[s][None]]) for c, x in zip(cache, new))
        assert all((np.asarray(now[s, :n]) == x).all() for now, x in zip(kept, (k, v)))
        k, v = (np.repeat(x.astype(np.float64), H // K, axis=1) for x in (k, v))
        scores = np.exp(np.einsum("hd,thd->ht", np.asarray(q[s], np.float64), k) * DH**-0.5)
        want = np.einsum("ht,thd->hd", scores / scores.sum(-1, keepdims=True), v)
        np.testing.assert_allclose(out[s], want, atol=1e-6)
    assert all((now[3] == old[3]).all() for now, old in zip(kept, cache))


def test_kernel_equals_plain_and_appends_the_same():
    """Interpreted, with more queries a group than the kernel pads to: blocks of 4 leave a rest."""
    rng = np.random.default_rng()
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    new, cache = ((array(*shape, 2, 16), array(*shape, 2, 16)) for shape in ((S,), (S, T)))
    args = (array(S, 32, 16), new, cache, jnp.array([0, T - 1, 5, 8]))
    active = jnp.array([True, True, False, True])
    kernel = partial(decode_attention, tuning=Tuning(block=4, interpret=True))
    (got, kept), (want, right) = (jax.jit(f)(*args, active) for f in (kernel, plain))
    np.testing.assert_allclose(got[active], want[active], atol=1e-5)
    assert all((a == b).all() for a, b in zip(kept, right))


def test_what_runs_depends_on_the_device_and_the_slots():
    cpu = make_mesh({}, jax.devices()[:1])
    assert choose_attention(tiny_settings(), 64, SERVE_RULES, cpu) == ("plain", plain)
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H100")
    mesh = SimpleNamespace(devices=np.array([device]), size=1)
    settings = tiny_settings(dtype="bfloat16", head_dim=16)
    assert choose_attention(settings, 64, SERVE_RULES, mesh) == ("triton", triton)
    assert choose_attention(settings, 16, SERVE_RULES, mesh) == ("cudnn", cudnn)


def lowered(step, *args) -> str:
    """The program for a GPU, from a machine without one."""
    calls = [*cudnn_attention.CUSTOM_CALLS, TRITON_CALL]
    allow = [export.DisabledSafetyCheck.custom_call(name) for name in calls]
    return export.export(jax.jit(step), platforms=["cuda"], disabled_checks=allow)(*args).mlir_module()  # fmt: skip


def test_kernels_lower_for_a_gpu_and_on_a_mesh():
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    new, cache = (bf16(S, K, 16), bf16(S, K, 16)), (bf16(S, T, K, 16), bf16(S, T, K, 16))
    rows = [jax.ShapeDtypeStruct((S,), dtype) for dtype in (jnp.int32, bool)]
    args = (bf16(S, H, 16), new, cache, *rows)
    mesh = make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])
    sharded = partial(by_shard, cudnn, mesh, (("data",), ("tensor",)))
    assert cudnn_attention.FORWARD in lowered(cudnn, *args)
    assert cudnn_attention.FORWARD in lowered(sharded, *args)
    kind = {"device_kind": "NVIDIA H100 80GB HBM3", "num_cores": 132, "platform": "cuda"}
    known = inspect.signature(AbstractDevice).parameters  # jax 0.11 knows no platform
    hopper = AbstractDevice(**{name: kind[name] for name in known if name in kind})
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=hopper)):
        assert TRITON_CALL in lowered(triton, *args)
