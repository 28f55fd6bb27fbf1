"""Which tokens of a batch make the entropy fall: those whose advantage and log-prob covary most. Host, whole batch.

cov_t = (A_t - mean A)(log p_t - mean log p), over all trained tokens, p the policy at step start: likely tokens that
did well, or unlikely ones that did badly. KL-Cov holds a share of them back, Clip-Cov leaves a share of them out. Both
read every token of a step at once, so they choose here, before rows are cut. Source: arXiv:2505.22617.
"""

import hashlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np


def covariances(advantages, logprobs, mask, xp: ModuleType = np) -> Any:
    """[S, T] of [S, T] arrays, 0 off the mask; xp: numpy or jax.numpy."""
    num_tokens = xp.maximum(mask.sum(), 1)
    a, p = (xp.where(mask, x, 0.0) for x in (advantages, logprobs))
    return xp.where(mask, (a - a.sum() / num_tokens) * (p - p.sum() / num_tokens), 0.0)


def most_covarying(advantages, logprobs, mask, share: float, xp: ModuleType = np) -> Any:
    """bool[S, T]: the share of the trained tokens, at least one, with the largest covariance."""
    covariance = covariances(advantages, logprobs, mask, xp)
    order = xp.argsort(xp.where(mask, -covariance, xp.inf).reshape(-1), stable=True)
    rank = xp.argsort(order).reshape(mask.shape)
    return mask & (rank < xp.maximum(xp.floor(share * mask.sum()), 1))


def drawn_covarying(
    covariance: np.ndarray,
    open_: np.ndarray,
    num: int,
    names: Sequence[str],
    low: float,
    high: float,
) -> np.ndarray:
    """bool[S, T]: `num` tokens drawn of those that are open and whose covariance lies in (low, high).

    Which ones depends on the sequences' names and the tokens' places alone: a batch that comes in another order, or
    again after a resume, loses the same tokens.
    """
    candidates = np.asarray(open_) & (covariance > low) & (covariance < high)
    lots = np.ones(candidates.shape)
    for row in np.flatnonzero(candidates.any(axis=1)).tolist():
        seed = int.from_bytes(hashlib.blake2b(names[row].encode(), digest_size=8).digest())
        lots[row] = np.random.default_rng(seed).random(candidates.shape[1])
    lots = np.where(candidates, lots, 2.0)
    place = np.argsort(lots, axis=None, kind="stable")[: min(num, int(candidates.sum()))]
    drawn = np.zeros(candidates.size, bool)
    drawn[place] = True
    return drawn.reshape(candidates.shape)
