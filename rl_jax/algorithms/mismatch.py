"""Every measure of the gap between trainer and sampler, of a whole batch on the host, in float64.

The learner's step logs the token-level ones by lag (learner/mismatch.py); these hold the sequence-level ones too.
"""

import numpy as np

from rl_jax.algorithms.ratios import MAX_LOG_RATIO


def mismatch_measures(
    train_logprobs: np.ndarray, behaviour_logprobs: np.ndarray, mask: np.ndarray
) -> dict[str, float]:
    """Means over trained tokens, and over non-empty sequences (one a row).

    With d = train - behaviour and w = e^d: k1 = mean(-d) estimates KL(behaviour || train), k2 = mean(d^2 / 2), k3 =
    mean(w - 1 - d); chi2 = mean(w^2) - 1; ess = (mean w)^2 / mean(w^2), 1 iff all weights are equal; the
    sequence's w is the clamped product. Perplexities are means over sequences of exp(-mean log-prob).

    Args:    all float[B, T] and bool[B, T]; what stands off the mask is not read.
    Returns: {} if nothing is trained.
    Source:  algorithms.md 4.1; ess predicts collapse, arXiv:2602.17616.
    """
    mask = np.asarray(mask) != 0
    live = mask.any(axis=1)
    if not live.any():
        return {}
    train = np.where(mask, np.asarray(train_logprobs, np.float64), 0.0)[live]
    behaviour = np.where(mask, np.asarray(behaviour_logprobs, np.float64), 0.0)[live]
    mask = mask[live]
    lengths = mask.sum(axis=1)
    d = (train - behaviour)[mask]
    w = np.exp(_clamp(d))
    w_sequence = np.exp(_clamp((train - behaviour).sum(axis=1)))
    log_ppl_train, log_ppl_behaviour = (
        -train.sum(axis=1) / lengths,
        -behaviour.sum(axis=1) / lengths,
    )
    log_gap = log_ppl_train - log_ppl_behaviour
    return {
        "k1": float(np.mean(-d)),
        "k2": float(np.mean(np.square(d)) / 2),
        "k3": float(np.mean(w - 1 - d)),
        "abs_mean": float(np.mean(np.abs(d))),
        "abs_max": float(np.max(np.abs(d))),
        "abs_prob": float(np.mean(np.abs(np.exp(train[mask]) - np.exp(behaviour[mask])))),
        "train_ppl": float(np.mean(np.exp(log_ppl_train))),
        "behaviour_ppl": float(np.mean(np.exp(log_ppl_behaviour))),
        "log_ppl_gap": float(np.mean(log_gap)),
        "log_ppl_gap_abs": float(np.mean(np.abs(log_gap))),
        "ppl_ratio": float(np.mean(np.exp(_clamp(log_gap)))),
        "chi2_token": float(np.mean(np.square(w)) - 1),
        "chi2_sequence": float(np.mean(np.square(w_sequence)) - 1),
        "ess_token": effective_sample_size(w),
        "ess_sequence": effective_sample_size(w_sequence),
        "mult_prob_error": float(np.mean(np.exp(np.minimum(np.abs(d), MAX_LOG_RATIO)))),
    }


def effective_sample_size(weights: np.ndarray) -> float:
    """(mean w)^2 / mean(w^2), in (0, 1]; 0 if every weight is 0."""
    weights = np.asarray(weights, np.float64)
    squares = np.mean(np.square(weights))
    return float(np.mean(weights) ** 2 / squares) if squares > 0 else 0.0


def _clamp(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO)
