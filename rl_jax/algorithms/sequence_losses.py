"""Policy losses whose ratio belongs to a turn or a sequence: GSPO, GSPO-token, turn-level PPO, GMPO, Kimi, VESPO, TOPR.

A sequence's loss l_i is expressed per token: it stands on each of the sequence's trained tokens. Under the weights of
seq-mean-token-mean, 1 / (S n_i), sum(weights * loss) is then the mean of l_i over the S non-empty sequences, and the
gradient of a token is that of the sequence's formula; that aggregation is these algorithms' default. A row holds
several sequences (segment_ids), so every reduction is over runs of slots (segments.py) and packing changes nothing.
Where a correction drops tokens they are off the mask: a mean or sum is over the tokens that stay, and on these alone it
stands. The weights still count all, so that a mean gives each token that stays the gradient it had; for a sum `counted`
makes up for the slots. Log-ratios are summed first and clamped to +-20 after.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.ratios import clamp, difference
from rl_jax.algorithms.segments import run_mean, run_starts, run_sum
from rl_jax.algorithms.token_losses import TokenLoss, clipped_surrogate


def sequences(x: LossInputs) -> Bool[Array, "B K"]:
    """First slot of each sequence."""
    return run_starts(x.segment_ids)


def turns(x: LossInputs) -> Bool[Array, "B K"]:
    """First slot of each turn of each sequence, by the stored ids: a mask with fewer tokens splits no turn."""
    return run_starts(x.segment_ids, x.turn_ids)


def gspo(
    x: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """PPO clip with s_i = exp(mean of the sequence's log-ratios); the gradient flows through the mean.

    Args:    clips about 3e-4 and 4e-4: s_i is the n-th root of a product and far nearer to 1 than a token's ratio.
    Source:  GSPO arXiv:2507.18071.
    """
    return _clipped(x, _mean_ratio(x, sequences(x)), (clip_low, clip_high, dual_clip))


def turn_ppo(
    x: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """As gspo, with one ratio a turn; aggregation by default token-mean. One turn a sequence gives gspo.

    Source:  ROLL's segment ratio. Differs: turns are those of the record, not runs of the filtered mask.
    """
    return _clipped(x, _mean_ratio(x, turns(x)), (clip_low, clip_high, dual_clip))


def gspo_token(
    x: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """PPO clip with the value of s_i and the gradient of the token alone, so that advantages may differ by token.

    With one advantage a sequence the gradient equals gspo's.
    Source:  GSPO arXiv:2507.18071, section 4.3.
    """
    d = difference(x.logprobs, x.old, x.mask)
    ratio = jax.lax.stop_gradient(_mean_ratio(x, sequences(x)))
    own = jnp.exp(d - jax.lax.stop_gradient(d))  # 1, with the gradient of the token's log-prob
    return _clipped(x, ratio * own, (clip_low, clip_high, dual_clip))


def gmpo(x: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """-A exp(mean of clipped log-ratios): min(d, clip_high) where A > 0, max(d, -clip_low) elsewhere.

    Source:  GMPO arXiv:2507.20673. The clip is in log space and one-sided.
    """
    d = difference(x.logprobs, x.old, x.mask)
    advantages = jnp.where(x.mask, x.advantages, 0.0)
    positive = advantages > 0
    held = jnp.where(positive, d > clip_high, d < -clip_low)
    bounded = jnp.where(held, jnp.where(positive, clip_high, -clip_low), d)
    ratio = jnp.exp(clamp(run_mean(bounded, x.mask, sequences(x))))
    return TokenLoss(-advantages * ratio, {"ratio": ratio, "clipped": held & x.mask})


def kimi(x: LossInputs, *, tau: float = 0.1) -> TokenLoss:
    """-sum(A log p) + tau / 2 (sum of log-ratios)^2, sums over the sequence; advantages are centred, not scaled.

    Source:  Kimi k1.5 arXiv:2501.12599.
    """
    starts = sequences(x)
    advantages = jnp.where(x.mask, x.advantages, 0.0)
    pull = run_sum(advantages * jnp.where(x.mask, x.logprobs, 0.0), starts)
    moved = run_sum(difference(x.logprobs, x.old, x.mask), starts)
    loss = 0.5 * tau * jnp.square(moved) - pull
    on_each = loss
    if x.counted is not None:  # a sum stands on fewer slots than its weights count
        num, num_counted = (run_sum(m.astype(loss.dtype), starts) for m in (x.mask, x.counted))
        on_each = loss * num_counted / jnp.maximum(num, 1.0)
    return TokenLoss(jnp.where(x.mask, on_each, 0.0), {"sequence_loss": loss})


def vespo(
    x: LossInputs,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> TokenLoss:
    """-sg(phi) A log p with phi = exp(lambda + k log W - lambda W), W the sequence's product of ratios; phi(1) = 1.

    Args:    (k, lambda) where A >= 0, and where A < 0.
    Source:  VESPO arXiv:2602.10693, as TRL has it. Aggregation by default: token-mean.
    """
    log_w = clamp(run_sum(difference(x.logprobs, x.old, x.mask), sequences(x)))
    advantages = jnp.where(x.mask, x.advantages, 0.0)
    k = jnp.where(advantages >= 0, positive[0], negative[0]).astype(log_w.dtype)
    scale = jnp.where(advantages >= 0, positive[1], negative[1]).astype(log_w.dtype)
    phi = jax.lax.stop_gradient(jnp.exp(scale + k * log_w - scale * jnp.exp(log_w)))
    loss = -phi * advantages * jnp.where(x.mask, x.logprobs, 0.0)
    return TokenLoss(loss, {"phi": phi})


def topr(
    x: LossInputs, *, level: str = "sequence", pos_weight: float = 1.0, neg_weight: float = 1.0
) -> TokenLoss:
    """-sg(w) A log p: w = pos_weight where A > 0, else neg_weight clip(p / behaviour, 0, 1).

    Args:    level: sequence (product over the sequence's trained tokens) or token.
    Source:  TOPR arXiv:2503.14286; level token is ROLL's. The behaviour policy is the one that sampled, always.
    """
    d = difference(x.logprobs, x.behaviour_logprobs, x.mask)
    if level not in ("sequence", "token"):
        raise ValueError(f"algorithm.weight_level={level!r} is unknown; one of sequence, token")
    total = run_sum(d, sequences(x)) if level == "sequence" else d
    tapered = neg_weight * jnp.minimum(jnp.exp(clamp(total)), 1.0)
    advantages = jnp.where(x.mask, x.advantages, 0.0)
    weights = jnp.where(advantages > 0, pos_weight, jax.lax.stop_gradient(tapered))
    weights = jnp.where(x.mask, weights, 0.0)
    loss = -weights * advantages * jnp.where(x.mask, x.logprobs, 0.0)
    return TokenLoss(loss, {"weights": weights})


def _mean_ratio(x: LossInputs, starts: jax.Array) -> jax.Array:
    """exp(clamped mean log-ratio) of each run, on all its slots."""
    return jnp.exp(clamp(run_mean(difference(x.logprobs, x.old, x.mask), x.mask, starts)))


def _clipped(x: LossInputs, ratio: Float[Array, "B K"], bounds) -> TokenLoss:
    advantages = jnp.where(x.mask, x.advantages, 0.0)
    loss, clipped, dual = clipped_surrogate(ratio, advantages, x.mask, bounds)
    return TokenLoss(loss, {"ratio": ratio, "clipped": clipped, "dual_clipped": dual})
