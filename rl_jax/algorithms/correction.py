"""Corrections for the gap between the policy that sampled and the one that is trained: weights, rejection, veto, masks.

The log-ratio is always proximal - behaviour (train over rollout), never its inverse. `Gap` is that log-ratio in the
packed form, with the runs of its turns and sequences. Everything is detached: a correction multiplies a loss or removes
a token from its numerator and carries no gradient. A removed token stays in every denominator (loss_weights do not
change), so filtering cannot raise the effective step size. Ratios are clamped to +-20 in log space, after summation.

Order of use: rejection and veto on the raw mask, then weights, then the loss. m2po_keep and batch-normalised weights
read all tokens of a step at once; they are right only on a whole batch, never on a microbatch.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rl_jax.algorithms.ratios import clamp, difference
from rl_jax.algorithms.segments import run_max, run_mean, run_starts, run_sum

WEIGHT_LEVELS = ("token", "segment", "geometric", "sequence")
REJECT_LEVELS = ("token", "segment", "seq_sum", "seq_mean", "seq_max")


@dataclass(frozen=True)
class Gap:
    log_ratio: Float[Array, "B K"]  # proximal - behaviour, not clamped; 0 off the mask
    mask: Bool[Array, "B K"]
    sequences: Bool[Array, "B K"]  # first slot of each sequence
    turns: Bool[Array, "B K"]  # first slot of each turn


def gap(
    proximal: Float[Array, "B K"],
    behaviour: Float[Array, "B K"],
    mask: Bool[Array, "B K"],
    segment_ids: Int[Array, "B K"],
    turn_ids: Int[Array, "B K"],
) -> Gap:
    """The detached log-ratio of two policies' log-probs of the trained tokens."""
    d = jax.lax.stop_gradient(difference(proximal, behaviour, mask))
    return Gap(d, mask, run_starts(segment_ids), run_starts(segment_ids, turn_ids))


def importance_weights(
    g: Gap, *, level: str, mode: str, high: float, low: float = 0.0
) -> tuple[Float[Array, "B K"], Bool[Array, "B K"]]:
    """(weights, out of bounds), per token; 0 and False off the mask.

    Args:    level: token | segment (geometric mean over a turn) | geometric (over a sequence) | sequence (product).
             mode: truncate (into [low, high]) | mask (0 outside [low, high], the raw weight inside).
    Source:  TIS = token truncate; IcePop = token mask; MIS = sequence or geometric mask, arXiv:2512.23075.
    """
    weights = jnp.exp(clamp(_at_level(g, level, WEIGHT_LEVELS)))
    outside = ((weights > high) | (weights < low)) & g.mask
    if mode == "truncate":
        weights = jnp.clip(weights, low, high)
    elif mode == "mask":
        weights = jnp.where(outside, 0.0, weights)
    else:
        raise ValueError(f"algorithm.correction.mode={mode!r} is unknown; one of truncate, mask")
    return jnp.where(g.mask, weights, 0.0), outside


def normalised_weights(weights: Float[Array, "B K"], g: Gap, level: str) -> Float[Array, "B K"]:
    """Weights over their mean: over tokens at token level, else over sequences. Whole batches only."""
    if level == "token":
        mean = weights.sum() / jnp.maximum(g.mask.sum(), 1)
    else:
        own = run_mean(weights, g.mask, g.sequences)
        first = g.sequences & (run_sum(g.mask.astype(own.dtype), g.sequences) > 0)
        mean = jnp.where(first, own, 0.0).sum() / jnp.maximum(first.sum(), 1)
    return weights / jnp.where(mean > 0, mean, 1.0)


def passes(g: Gap, *, stat: str, level: str, high: float, low: float = 0.0) -> Bool[Array, "B K"]:
    """Tokens that rejection keeps; False off the mask.

    Args:    stat: ratio (low <= proximal / behaviour <= high, at token | segment | seq_sum (product) | seq_mean
             (geometric)) or k2 | k3 (d^2 / 2 or e^d - 1 - d, at most high, at token | seq_sum | seq_mean | seq_max).
    Source:  verl's and AReaL's rejection sampling. Differs: bounds are on train over rollout for every stat.
    """
    if stat == "ratio":
        names = {"seq_sum": "sequence", "seq_mean": "geometric"}
        if level not in ("token", "segment", *names):
            raise ValueError(
                f"algorithm.correction.reject_level={level!r} has no ratio; one of token, segment, seq_sum, seq_mean"
            )
        ratio = jnp.exp(clamp(_at_level(g, names.get(level, level), WEIGHT_LEVELS)))
        return g.mask & (ratio >= low) & (ratio <= high)
    d = g.log_ratio
    if stat == "k2":
        values = 0.5 * jnp.square(d)
    elif stat == "k3":
        values = jnp.expm1(clamp(d)) - d
    else:
        raise ValueError(
            f"algorithm.correction.reject_stat={stat!r} is unknown; one of ratio, k2, k3"
        )
    return g.mask & (_at_level(g, level, REJECT_LEVELS, jnp.where(g.mask, values, 0.0)) <= high)


def passes_veto(g: Gap, *, threshold: float) -> Bool[Array, "B K"]:
    """False on every token of a sequence in which some token's proximal / behaviour is below the threshold."""
    bad = g.mask & (jnp.exp(clamp(g.log_ratio)) < threshold)
    return g.mask & (run_max(bad.astype(jnp.float32), g.sequences) == 0)


def passes_opsm(
    g: Gap, advantages: Float[Array, "B K"], *, delta: float
) -> tuple[Bool[Array, "B K"], Float[Array, "B K"]]:
    """(keep, mean log(behaviour / proximal) of the sequence): drops negative sequences that drifted by over delta.

    A sequence is negative if its advantages sum to less than 0.
    Source:  off-policy sequence masking, DeepSeek-V3.2 arXiv:2512.02556; measured against the behaviour policy.
    """
    drift = -run_mean(g.log_ratio, g.mask, g.sequences)
    negative = run_sum(jnp.where(g.mask, advantages, 0.0), g.sequences) < 0
    return ~(negative & (drift > delta)), drift


def m2po_keep(
    old_logprobs: np.ndarray,
    behaviour_logprobs: np.ndarray,
    mask: np.ndarray,
    threshold: float = 0.04,
) -> np.ndarray:
    """Host, whole batch: drops the largest (log old - log behaviour)^2 until the mean of the rest is below threshold.

    Returns: bool[B, T], False off the mask; at least one token of the batch stays.
    Source:  M2PO arXiv:2510.01161.
    """
    mask = np.asarray(mask) != 0
    keep = np.zeros(mask.shape, bool)
    if not mask.any():
        return keep
    d = (
        np.asarray(old_logprobs, np.float64)[mask]
        - np.asarray(behaviour_logprobs, np.float64)[mask]
    )
    order = np.argsort(np.square(d), kind="stable")
    means = np.cumsum(np.square(d)[order]) / np.arange(1, len(d) + 1)
    below = np.flatnonzero(means < threshold)
    num_kept = max(int(below[-1]) + 1 if len(below) else 0, 1)
    kept = np.zeros(len(d), bool)
    kept[order[:num_kept]] = True
    keep[mask] = kept
    return keep


def loglinear_proximal(
    logprobs: Float[Array, "B K"], behaviour_logprobs: Float[Array, "B K"], lag: Int[Array, "B K"]
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """(proximal log-probs, alpha): behaviour + alpha (policy - behaviour), without a forward of its own.

    Args:    lag: consuming version minus the token's; alpha = clip((lag - 1) / lag, 0, 1), 0 where lag <= 0.
    Source:  A-3PO arXiv:2512.06547. Detached.
    """
    fixed = jax.lax.stop_gradient(logprobs)
    steps = lag.astype(fixed.dtype)
    alpha = jnp.where(lag > 0, jnp.clip((steps - 1) / jnp.maximum(steps, 1), 0.0, 1.0), 0.0)
    return behaviour_logprobs + alpha * (fixed - behaviour_logprobs), alpha


def _at_level(g: Gap, level: str, levels: tuple[str, ...], values=None) -> jax.Array:
    """log_ratio (or other values of tokens) at the level of a token, a turn or a sequence, on every slot."""
    values = g.log_ratio if values is None else values
    if level == "token":
        return values
    if level == "segment":
        return run_mean(values, g.mask, g.turns)
    if level in ("geometric", "seq_mean"):
        return run_mean(values, g.mask, g.sequences)
    if level in ("sequence", "seq_sum"):
        return run_sum(values, g.sequences)
    if level == "seq_max":
        return run_max(values, g.sequences)
    raise ValueError(f"level={level!r} is unknown; one of {', '.join(levels)}")
