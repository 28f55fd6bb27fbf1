"""The critic's loss, per token and unreduced."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def value_loss(
    values: Float[Array, "B K"],
    old_values: Float[Array, "B K"],
    returns: Float[Array, "B K"],
    mask: Bool[Array, "B K"],
    *,
    clip: float | None = None,
) -> Float[Array, "B K"]:
    """max((V - R)^2, (clip(V, V_old -+ clip) - R)^2) / 2; plain (V - R)^2 / 2 without clip. 0 off the mask.

    Gradient 0 where the clipped branch is larger and |V - V_old| > clip.
    Source:  PPO arXiv:1707.06347, as its reference code has it.
    """
    values, returns = jnp.where(mask, values, 0.0), jnp.where(mask, returns, 0.0)
    plain = jnp.square(values - returns)
    if clip is None:
        return 0.5 * plain
    old_values = jnp.where(mask, old_values, 0.0)
    held = old_values + jnp.clip(values - old_values, -clip, clip)
    bounded = jnp.square(held - returns)
    return 0.5 * jnp.where(bounded > plain, bounded, plain)
