"""Log-ratios and masks: the first lines of every loss.

Rule: select, then exponentiate. What stands off the mask (NaN, inf) is replaced by 0 before any arithmetic, so it
reaches neither value nor gradient; a product with the mask would not do that.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is far outside any clip and far from float32's end


def log_ratio(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """logprobs - old_logprobs, clamped to +-20, 0 where not mask; the gradient is 0 outside the clamp."""
    return clamp(difference(logprobs, old_logprobs, mask))


def difference(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """logprobs - old_logprobs, 0 where not mask; for sums, which are clamped after summation."""
    return jnp.where(mask, logprobs, 0.0) - jnp.where(mask, old_logprobs, 0.0)


def clamp(log_ratios: Float[Array, "*N"]) -> Float[Array, "*N"]:
    return jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO)
