"""Policy losses whose ratio is one token's: PPO clip, REINFORCE, truncated IS, CISPO, SAPO, Kimi, DPPO, KL-Cov, SFT.

Every function takes LossInputs with old_logprobs filled (policy.py decides which policy that is) and returns
TokenLoss: the loss of each trained token, unreduced, 0 elsewhere, and what else the formula has per token. Nothing is
reduced here: loss = sum(loss_weights * token loss), and the weights (aggregate.py) hold the aggregation, so that
rows, microbatches and devices cannot change it. Only logprobs carries a gradient; advantages, weights and masks are
constants. Log-ratios are clamped to +-20 before exp.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.ratios import difference, log_ratio


class TokenLoss(NamedTuple):
    loss: Float[Array, "B K"]  # minimised; 0 where not mask
    parts: dict[str, Array]  # [B, K] by name: ratio, weights, clipped (bool), keep (bool), ...


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
    bounds = (clip_low, clip_high, dual_clip)
    return clipped_surrogate(ratio, jnp.where(mask, advantages, 0.0), mask, bounds)


def clipped_surrogate(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    bounds: tuple[float, float, float | None],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"], Bool[Array, "B T"]]:
    """ppo_clip for any ratio (a token's, a turn's or a sequence's); bounds = (clip_low, clip_high, dual_clip).

    Both inputs are already selected: finite everywhere, advantages 0 where not mask.
    """
    clip_low, clip_high, dual_clip = bounds
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


def ppo(
    x: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """ppo_clip as a TokenLoss. Aggregation by default: token-mean."""
    loss, clipped, dual = ppo_clip(
        x.logprobs, x.old, x.advantages, x.mask,
        clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip,
    )  # fmt: skip
    return TokenLoss(loss, {"clipped": clipped, "dual_clipped": dual})


def reinforce(x: LossInputs) -> TokenLoss:
    """-A log p. Source: Williams 1992; no ratio, no clip."""
    return TokenLoss(*_weighted(x, jnp.ones_like(x.logprobs)))


def truncated_is(x: LossInputs, *, cap: float) -> TokenLoss:
    """-sg(min(p / behaviour, cap)) A log p: every token keeps its gradient, its weight is bounded above.

    Args:    cap: 1 is ROLL's tis, 2..10 AIPO's; a large one is the exact importance weight.
    Source:  AIPO (LlamaRL) arXiv:2505.24034.
    """
    ratio = jnp.exp(log_ratio(x.logprobs, x.behaviour_logprobs, x.mask))
    return TokenLoss(*_weighted(x, jnp.minimum(ratio, cap)))


def cispo(x: LossInputs, *, ratio_min: float = 0.0, ratio_max: float = 5.0) -> TokenLoss:
    """-sg(clip(r, ratio_min, ratio_max)) A log p: the weight is clipped and not the gradient.

    Source:  MiniMax-M1 arXiv:2506.13585; ratio_max about 5 as ScaleRL arXiv:2510.13786. Differs: the bounds are
             absolute, not 1 -+ epsilon.
    """
    ratio = jnp.exp(log_ratio(x.logprobs, x.old, x.mask))
    loss, parts = _weighted(x, jnp.clip(ratio, ratio_min, ratio_max))
    above = (ratio > ratio_max) & x.mask
    clipped = above | ((ratio < ratio_min) & x.mask)
    return TokenLoss(loss, parts | {"clipped": clipped, "clipped_high": above})


def sapo(x: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a smooth gate in place of the clip.

    Gradient -A 4 s (1 - s) r, which is -A at r = 1. Aggregation by default: seq-mean-token-mean.
    Source:  SAPO arXiv:2511.20347.
    """
    ratio = jnp.exp(log_ratio(x.logprobs, x.old, x.mask))
    advantages = jnp.where(x.mask, x.advantages, 0.0)
    tau = jnp.where(advantages > 0, tau_pos, tau_neg).astype(ratio.dtype)
    loss = -advantages * (4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0))
    return TokenLoss(loss, {"ratio": ratio})


def kimi_token(x: LossInputs, *, tau: float = 0.1) -> TokenLoss:
    """-A log p + tau / 2 (log p - log old)^2: policy gradient with a square pull to the old policy, no clip.

    Source:  the token form of Kimi k1.5 arXiv:2501.12599 (ROLL kimi15, verl dro).
    """
    loss, parts = _weighted(x, jnp.ones_like(x.logprobs))
    d = difference(x.logprobs, x.old, x.mask)
    return TokenLoss(loss + 0.5 * tau * jnp.square(d), parts)


def dppo(
    x: LossInputs,
    *,
    divergence: str = "tv",
    div_low: float = 0.2,
    div_high: float = 0.2,
    ratio_cap: float = 20.0,
) -> TokenLoss:
    """-sg(min(r, ratio_cap)) A log p on the tokens that have not moved away too far; the others give nothing.

    Dropped: A > 0 and p above old by more than div_high, or A <= 0 and p below old by more than div_low, measured as
    tv (difference of probabilities) or kl (KL(old || p) of the two Bernoulli distributions).
    Source:  DPPO arXiv:2602.04879.
    """
    keep = near_old(x, x.old, divergence, div_low, div_high)
    ratio = jnp.exp(log_ratio(x.logprobs, x.old, x.mask))
    loss, parts = _weighted(x, jnp.where(keep, jnp.minimum(ratio, ratio_cap), 0.0))
    return TokenLoss(loss, parts | {"keep": keep, "clipped": ~keep & x.mask})


def dppo_kl_reg(
    x: LossInputs, *, div_low: float = 0.2, div_high: float = 0.2, kl_tau: float = 1e-3
) -> TokenLoss:
    """-keep A r + kl_tau d^2 against the behaviour policy; the square pulls on dropped tokens too.

    Gradient through r. Source: prime-rl's default loss; keep as DPPO's tv.
    """
    behaviour = x.behaviour_logprobs
    keep = near_old(x, behaviour, "tv", div_low, div_high)
    ratio = jnp.exp(log_ratio(x.logprobs, behaviour, x.mask))
    d = difference(x.logprobs, behaviour, x.mask)
    advantages = jnp.where(keep & x.mask, x.advantages, 0.0)
    loss = -advantages * ratio + kl_tau * jnp.square(d)
    return TokenLoss(loss, {"keep": keep, "clipped": ~keep & x.mask})


def near_old(
    x: LossInputs, old_logprobs: Float[Array, "B K"], divergence: str, low: float, high: float
) -> Bool[Array, "B K"]:
    """False where a token moved away from old_logprobs further than its bound; False off the mask. No gradient."""
    new = jax.lax.stop_gradient(jnp.where(x.mask, x.logprobs, 0.0))
    old = jnp.where(x.mask, old_logprobs, 0.0)
    p_new, p_old = jnp.exp(new), jnp.exp(old)
    if divergence == "tv":
        up, down = p_new - p_old > high, p_old - p_new > low
    elif divergence == "kl":
        tiny = jnp.finfo(new.dtype).tiny  # a probability of exactly 1 leaves no mass for the rest
        rest_new, rest_old = (jnp.maximum(-jnp.expm1(z), tiny) for z in (new, old))
        kl = p_old * (old - new) + rest_old * (jnp.log(rest_old) - jnp.log(rest_new))
        up, down = (p_new > p_old) & (kl > high), (p_new < p_old) & (kl > low)
    else:
        raise ValueError(f"algorithm.divergence={divergence!r} is unknown; one of tv, kl")
    positive = jnp.where(x.mask, x.advantages, 0.0) > 0
    return x.mask & ~jnp.where(positive, up, down)


def kl_cov(x: LossInputs, *, coef: float = 1.0) -> TokenLoss:
    """-A r, plus coef |log r| on the selected tokens: those whose advantage and log-prob covary most (covariance.py).

    Raises: ValueError without x.selected.
    Source:  arXiv:2505.22617 (KL-Cov).
    """
    if x.selected is None:
        raise ValueError(
            "kl_cov needs to be told the selected tokens: covariance.py finds them in the batch"
        )
    selected = x.mask & (x.selected > 0)
    advantages = jnp.where(x.mask, x.advantages, 0.0)
    pull = jnp.where(selected, jnp.abs(difference(x.logprobs, x.old, x.mask)), 0.0)
    loss = -advantages * jnp.exp(log_ratio(x.logprobs, x.old, x.mask)) + coef * pull
    return TokenLoss(loss, {"selected": selected})


def nll(x: LossInputs) -> TokenLoss:
    """-log p of each trained token (SFT)."""
    return TokenLoss(-jnp.where(x.mask, x.logprobs, 0.0), {})


def _weighted(x: LossInputs, weights: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-sg(weights) A log p, and the weights."""
    weights = jnp.where(x.mask, jax.lax.stop_gradient(weights), 0.0)
    advantages = jnp.where(x.mask, x.advantages, 0.0)
    return -weights * advantages * jnp.where(x.mask, x.logprobs, 0.0), {"weights": weights}
