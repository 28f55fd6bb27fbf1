"""The entropy bonus: -coef * entropy, per token and unreduced, and the coefficient that adapts to a target."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def entropy_loss(
    entropy: Float[Array, "B K"], mask: Bool[Array, "B K"], coef: float | Float[Array, "B K"]
) -> Float[Array, "B K"]:
    """-coef * entropy where mask, else 0; entropy in nats, of the distribution that is trained (same temperature)."""
    return -coef * jnp.where(mask, entropy, 0.0)


def applied_entropy_coef(coef: float, entropy: float, *, target: float) -> float:
    """The coefficient acts only while the entropy is at or below its target.

    Source:  Skywork-OR1 arXiv:2505.22312, of the step's own entropy; a run gives it that of the step before, since the
             step's own is known when its gradient is (policy.py).
    """
    return coef if entropy <= target else 0.0


def next_entropy_coef(
    coef: float, entropy: float, *, target: float, delta: float, low: float, high: float
) -> float:
    """coef + delta at or below the target, coef - delta above it, kept in [low, high].

    Source:  Skywork-OR1 arXiv:2505.22312.
    """
    return min(max(coef + (delta if entropy <= target else -delta), low), high)
