"""Rotary positions and the one attention function that training, prefill and decode share.

Invariants: cosines and sines are computed in float32 from each token's own position (no table), and
scores, softmax and sums are float32, so a token gets the same numbers in a [B, T] training row, a
packed [1, C] chunk and a [S, 1] decode step.
Must not: hold KV, know slots or pages, or make masks from anything but positions and segments.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.linear_logprob import soft_capped
from kernels.packed_attention import MAX_SEGMENTS, Ragged, Split, find_segments, packed_attention
from rl_jax.models.features import Form
from rl_jax.models.rope import scaled
from rl_jax.settings import RopeSettings

# (layer, q [B, T, H, Dh], k [B, T, K, Dh], v [B, T, K, Dh]) -> [B, T, H, Dh]. q and k come rotated
# (and qk-normed); the caller owns masks, KV storage and what the layer's Form says.
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class FusedAttend:
    """An attend of a decode step that brings its device's kernels for all that a packed layer does, B = S, T = 1."""

    attend: Attend  # of layers with qk-norm
    # (layer, product [P, S, K, G + 2, Dh], bias [K, G + 2, Dh] or None, (cos, sin)) -> [S, H, Dh]
    of_product: Callable[[int, jax.Array, jax.Array | None, tuple], jax.Array]
    # (x [S, D], w [D, N]) -> x @ w in parts [P, S, N]
    product: Callable[[jax.Array, jax.Array], jax.Array]
    # (x [S, D], w [D, 2, F]) -> silu(x @ w[:, 0]) * (x @ w[:, 1])
    gated: Callable[[jax.Array, jax.Array], jax.Array]
    # (x [S, D], y in parts [P, S, D], scale [D], eps) -> (x + y, its RMSNorm)
    add_norm: Callable[[jax.Array, jax.Array, jax.Array, float], tuple[jax.Array, jax.Array]]

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return self.attend(layer, q, k, v)


MASKED = -1e30  # finite: an all-masked row must give exp(0), not exp(nan), before it is zeroed


def rope_angles(
    positions: Int[Array, "B T"], head_dim: int, theta: float, rope: RopeSettings = RopeSettings()
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """(cos, sin) of each token's rotation angles, float32, half = head_dim / 2.

    Source: RoFormer, arXiv:2104.09864, in the half-rotation layout of Llama's checkpoints.
    """
    half = head_dim // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    frequencies, factor = scaled(frequencies, theta, rope)
    angles = positions.astype(jnp.float32)[..., None] * frequencies  # [B, T, half]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def apply_rope(
    x: Float[Array, "B T N Dh"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T N Dh"]:
    """Rotate each head of x: dimension i pairs with i + head_dim / 2. float32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # [B, T, N, half]
    cos, sin = cos[..., None, :], sin[..., None, :]  # one angle for all heads
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attention(
    q: Float[Array, "B Tq H Dh"],
    k: Float[Array, "B Tk K Dh"],
    v: Float[Array, "B Tk K Dh"],
    mask: Bool[Array, "B Tq Tk"],
    form: Form = Form(),
) -> Float[Array, "B Tq H Dh"]:
    """Grouped-query attention; query head h reads kv head h // (H / K).

    Scores and softmax are float32. mask is True where a query may look, form.window included; a row with no True gives
    0, and neither its values nor its gradients are ever non-finite. Returned in q.dtype.
    """
    B, Tq, H, Dh = q.shape
    Tk, K = k.shape[1:3]
    G = H // K
    # Batch and kv head lead, written out: XLA:CPU multiplies such stacks of matrices 2x faster than
    # the same einsum over interleaved heads, forwards and backwards.
    queries = q.reshape(B, Tq, K, G, Dh).transpose(0, 2, 3, 1, 4).reshape(B, K, G * Tq, Dh)
    keys = k.transpose(0, 2, 3, 1)  # [B, K, Dh, Tk]
    values = v.transpose(0, 2, 1, 3)  # [B, K, Tk, Dh]
    scores = jnp.matmul(queries, keys, preferred_element_type=jnp.float32)
    visible = mask[:, None, None]  # [B, 1, 1, Tq, Tk]
    scores = scores.reshape(B, K, G, Tq, Tk) * (Dh**-0.5 if form.scale is None else form.scale)
    scores = jnp.where(visible, soft_capped(scores, form.softcap), MASKED)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - top), 0.0)  # [B, K, G, Tq, Tk]
    total = weights.sum(axis=-1)  # [B, K, G, Tq]; at least 1 where anything is visible
    stacked = weights.astype(v.dtype).reshape(B, K, G * Tq, Tk)
    mixed = jnp.matmul(stacked, values, preferred_element_type=jnp.float32)
    mixed = mixed.reshape(B, K, G, Tq, Dh) / jnp.where(total > 0, total, 1.0)[..., None]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(B, Tq, H, Dh).astype(q.dtype)


def causal_segment_mask(
    q_positions: Int[Array, "B Tq"],
    k_positions: Int[Array, "B Tk"],
    q_segments: Int[Array, "B Tq"],
    k_segments: Int[Array, "B Tk"],
    window: int = 0,
) -> Bool[Array, "B Tq Tk"]:
    """True where a query may look: same segment, a position not after its own, of these the last `window` (0 = all).

    A caller's padding must have a segment that no real token has (0 in training rows, -1 in
    chunks). Padding then sees only padding; what it computes is read by nobody.
    """
    same = q_segments[:, :, None] == k_segments[:, None, :]
    visible = same & (q_positions[:, :, None] >= k_positions[:, None, :])
    if not window:
        return visible
    return visible & (k_positions[:, None, :] > q_positions[:, :, None] - window)


def packed_attend(
    segments: Int[Array, "B T"],
    kernel: str | Ragged,
    split: Split | None = None,
    most: int | None = None,
) -> Attend:
    """Causal attention inside each segment of packed rows, by a kernel; segments are runs of columns in time order.

    Args: segments: ids above 0; 0 is padding.  most: of all rows together, where that many are one call's.
    """
    found, size = find_segments(segments, most), most or MAX_SEGMENTS

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return packed_attention(q, k, v, found, kernel=kernel, max_segments=size, split=split)

    return attend
