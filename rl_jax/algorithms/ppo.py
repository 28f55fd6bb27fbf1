"""The clipped policy-gradient surrogate, per token; shared by every algorithm that bounds a ratio.

Which "old" policy the ratio is taken against: the policy that sampled (behaviour_logprobs), unless
the algorithm asks for old_logprobs. There is one update a step, so a ratio against the policy at
step start would be exactly 1 and the clip idle; against the behaviour policy the clip bounds what
staleness does, and no separate importance weight is needed.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_jax.algorithms.algorithm import LossInputs, Sums
from rl_jax.settings import AlgorithmSettings

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is far outside any clip and far from float32's end


def log_ratio(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """logprobs - old_logprobs, clamped to +-20, 0 where not mask; the gradient is 0 outside the clamp.

    Both inputs are selected before they meet, so what stands off the mask (inf, NaN) reaches neither
    value nor gradient.
    """
    difference = jnp.where(mask, logprobs, 0.0) - jnp.where(mask, old_logprobs, 0.0)
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"], Bool[Array, "B T"]]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logprobs - old_logprobs); 0 where not mask.

    Args:    dual_clip: where A < 0 the loss is at most -A * dual_clip; must exceed 1; None = off.
    Returns: (loss, clipped: the clipped branch is strictly larger, dual: the dual bound holds), all [B, T].
    Source:  PPO arXiv:1707.06347 eq. 7; clip_high > clip_low is DAPO's clip-higher arXiv:2503.14476; dual clip
             arXiv:1912.09729. Differs: the log-ratio is clamped to +-20.
    """
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs, mask))
    advantages = jnp.where(mask, advantages, 0.0)
    plain = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    clipped = bounded > plain
    # where, not maximum: at a tie (every token on policy) maximum would mix the two branches' gradients.
    loss = jnp.where(clipped, bounded, plain)
    dual = jnp.zeros_like(mask)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        dual = (advantages < 0) & (loss > ceiling)
        loss = jnp.where(dual, ceiling, loss)
    return loss, clipped & mask, dual & mask


def clipped_policy_loss(
    x: LossInputs, settings: AlgorithmSettings
) -> tuple[Float[Array, "B K"], Sums]:
    """The PPO clip with an entropy bonus: loss - entropy_coef * entropy, per token, and policy/clip_frac."""
    old = x.behaviour_logprobs if x.old_logprobs is None else x.old_logprobs
    loss, clipped, _ = ppo_clip(
        x.logprobs,
        old,
        x.advantages,
        x.mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    num_tokens = x.mask.sum().astype(jnp.float32)
    sums: Sums = {"policy/clip_frac": (clipped.sum().astype(jnp.float32), num_tokens)}
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * jnp.where(x.mask, x.entropy, 0.0)
    return loss, sums
