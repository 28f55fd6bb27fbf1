"""Declared weights and the norm: what every model family is made of.

A weight is declared once: shape, logical axes and initial distribution stand together in one
`weight(...)` call; abstract shapes, shardings and initialisation derive from it (model.py).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

LOGICAL_AXES = (
    "logical_axes"  # own metadata names: flax's sharding metadata would place arrays itself
)
INIT_STD = "init_std"
INIT_MEAN = "init_mean"


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
    """einsum(subscripts, x, w) [+ bias] in x.dtype, accumulated in float32."""
    out = jnp.einsum(subscripts, x, w[...].astype(x.dtype), preferred_element_type=jnp.float32)
    if bias is not None:
        out = out + bias[...].astype(jnp.float32)
    return out.astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32, returned in x.dtype.

    Source: arXiv:1910.07467.
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.scale = weight((size,), ("norm",), dtype, mean=1.0)

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(mean_square + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)
