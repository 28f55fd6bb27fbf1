"""The decode step's products for many rows: interpreted, against float64; lowered for a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.decode_rows_hopper import Hopper, gated_matmul, split_matmul

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this jax interprets no GPU"
)


def draw(*shape):
    rng = np.random.default_rng()
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def exact(x):
    return np.asarray(x, np.float64)


def rounded(x):
    return exact(jnp.asarray(x, jnp.bfloat16))


def on_cpu(num_sms, **changes):
    return Hopper(num_sms, interpret=plgpu.InterpretGPUParams(), **changes)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "num_sms", "columns"),
    [(128, 2, 0), (256, 4, 0), (256, 8, 0), (256, 2, 40)],  # 2 blocks of columns; 4; 5, of which two overlap
)  # fmt: skip
def test_gated_product_equals_float64_rounded_as_the_portable_way(rows, num_sms, columns):
    D, F = 192, 200
    x, w = draw(rows, D), draw(2, F, D) / D**0.5
    got = exact(gated_matmul(x, w, on_cpu(num_sms, columns=columns)))
    gate, up = (rounded(exact(x) @ exact(w[i]).T) for i in range(2))
    want = rounded(gate / (1 + np.exp(-gate))) * up
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)
    assert np.abs(got - want).mean() < 2e-3


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "changes", "parts"),
    [(128, {}, None), (256, {}, None), (256, {"columns": 64, "parts": 3}, 3), (256, {"columns": 128, "parts": 2}, 2)],
)  # fmt: skip
def test_parts_of_a_product_sum_to_float64(rows, changes, parts):
    x, w = draw(rows, 320), draw(320, 128)  # 5 loads: parts of unlike length
    got = split_matmul(x, w, on_cpu(8, **changes))
    assert got.dtype == jnp.float32 and got.shape[1:] == (rows, 128)
    assert parts in (None, got.shape[0])
    np.testing.assert_allclose(exact(got).sum(axis=0), exact(x) @ exact(w), atol=1e-4)


@interpreted
@pytest.mark.slow
def test_a_row_depends_on_no_other_row():
    x, w, down = draw(256, 128), draw(2, 64, 128), draw(128, 64)
    others = jnp.where((jnp.arange(256) == 77)[:, None], x, draw(256, 128))
    for product in (partial(gated_matmul, w=w), partial(split_matmul, w=down)):
        whole, alone = (product(x=rows, hopper=on_cpu(4)) for rows in (x, others))
        assert (whole[..., 77, :] == alone[..., 77, :]).all()
        assert (whole[..., 78, :] != alone[..., 78, :]).any()


@pytest.mark.slow
def test_products_of_a_large_model_lower_for_cuda_from_a_cpu():
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    shapes = [(1536, 8960), (3584, 18944), (896, 4864)]  # Qwen2.5's D and F
    for D, F in shapes:
        assert Hopper(132).takes(256, D) and Hopper(132).takes(256, F)

        def both(x, gates, down):
            h = gated_matmul(x, gates, Hopper(132))
            return split_matmul(h, down, Hopper(132)).sum(axis=0)

        exported = jax.export.export(jax.jit(both), platforms=["cuda"])(
            bf16(256, D), bf16(2, F, D), bf16(F, D)
        )
        assert exported.mlir_module().count("mosaic_gpu") >= 2
        assert exported.out_avals[0].shape == (256, D)


def test_what_they_are_for():
    assert Hopper(132).takes(256, 1536)
    assert not Hopper(132).takes(128, 1536)  # the kernels for few rows are as fast
    assert not Hopper(132).takes(192, 1536)
    assert not Hopper(132).takes(256, 100)
