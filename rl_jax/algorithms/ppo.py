"""The clipped policy-gradient surrogate, per token; shared by every algorithm that bounds a ratio.

Which "old" policy the ratio is taken against: the policy that sampled (behaviour_logprobs), unless
the algorithm asks for old_logprobs. There is one update a step, so a ratio against the policy at
step start would be exactly 1 and the clip idle; against the behaviour policy the clip bounds what
staleness does, and no separate importance weight is needed.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_jax.algorithms.algorithm import LossInputs, Sums
from rl_jax.algorithms.token_losses import ppo_clip
from rl_jax.settings import AlgorithmSettings


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
