"""Declared weights and the norm: what every model family is made of.

A weight is declared once: shape, logical axes and initial distribution stand together in one
`weight(...)` call; abstract shapes, shardings and initialisation derive from it (model.py).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

LOGICAL_AXES = (
    "logical_axes"  # own metadata names: flax's sharding metadata would place arrays itself
)
INIT_STD = "init_std"
INIT_MEAN = "init_mean"
MATMUL = "matmul"  # name of every weight's product, for checkpoint policies


def weight(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: jnp.dtype,
    *,
    std: float = 0.0,
    mean: float = 0.0,
) -> nnx.Param:
    """A parameter that starts as normal(mean, std); axes names what each dimension means."""
    assert len(shape) == len(axes), f"shape {shape} and logical axes {axes} differ in length"
    metadata: dict[str, Any] = {LOGICAL_AXES: axes, INIT_STD: std, INIT_MEAN: mean}
    return nnx.Param(jnp.zeros(shape, dtype), **metadata)


def linear(
    subscripts: str, x: Float[Array, "..."], w: nnx.Param, bias: nnx.Param | None = None
) -> jax.Array:
    """einsum(subscripts, x, w) [+ bias] in x.dtype; MATMUL to checkpoint policies.

    XLA accumulates 16-bit products in float32 and rounds once. Asking for a float32 result and rounding it here would
    give the same numbers, but its gradient multiplies float32 copies of both sides: half the rate, twice the bytes.
    """
    out = jnp.einsum(subscripts, x, w[...].astype(x.dtype))
    if bias is not None:
        out = (out.astype(jnp.float32) + bias[...].astype(jnp.float32)).astype(x.dtype)
    return checkpoint_name(out, MATMUL)


def lookup(table: Float[Array, "V D"], tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Rows of the table; an id outside reads the nearest row. Gradients of a row's uses are summed in float32."""
    if table.dtype == jnp.float32:
        return jnp.take(table, tokens, axis=0, mode="clip")
    return _lookup_16_bit(table, tokens)


@jax.custom_vjp
def _lookup_16_bit(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take(table, tokens, axis=0, mode="clip")


def _pull_lookup(saved: tuple[jax.Array, jax.Array], of_rows: jax.Array):
    # Thousands of uses of one token: a sum in bfloat16 would stop growing at 256 times an addend.
    table, tokens = saved
    rows = jnp.zeros(table.shape, jnp.float32)
    rows = rows.at[tokens].add(of_rows.astype(jnp.float32), mode="clip")
    return rows.astype(table.dtype), None


_lookup_16_bit.defvjp(
    lambda table, tokens: (_lookup_16_bit(table, tokens), (table, tokens)), _pull_lookup
)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32, returned in x.dtype; offset: times 1 + scale.

    Source: arXiv:1910.07467.
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, offset: bool = False):
        self.eps, self.offset = eps, offset
        self.scale = weight((size,), ("norm",), dtype, mean=0.0 if offset else 1.0)

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(mean_square + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (normed * (1.0 + scale if self.offset else scale)).astype(x.dtype)
