"""Advantages that differ by token, on the host: numpy, float64, [B, T] with one sequence a row.

Observations are holes in the mask. Rule, carry-forward: a return or an advantage passes over a hole as if it were not
there, without a discount and without reading its reward or value, so inserting an observation changes nothing.
Outputs are 0 off the mask. What stands off the mask in the inputs is selected away first (NaN and inf included).
"""

from collections.abc import Sequence

import numpy as np

WHITEN_EPS = 1e-8  # inside the square root


def whiten(x: np.ndarray, mask: np.ndarray, *, shift: bool = True) -> np.ndarray:
    """(x - mean) / sqrt(var + 1e-8) over all trained tokens, ddof 1; with shift False the mean is added back.

    At most one valid value, or equal ones: 0 (the mean, without shift).
    """
    return whiten_parts([(x, mask)], shift=shift)[0]


def whiten_parts(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], *, shift: bool = True
) -> list[np.ndarray]:
    """whiten of a batch that lies in several (x, mask) parts, by global sums: first of x, then of (x - mean)^2.

    What each part contributes is (count, sum) and then one sum of squares, so ranks can do it by two all-reduces.
    E[x^2] - E[x]^2 would cancel.
    """
    masks = [np.asarray(mask) != 0 for _, mask in parts]
    values = [np.where(mask, np.asarray(x, np.float64), 0.0) for (x, _), mask in zip(parts, masks)]
    count = sum(int(mask.sum()) for mask in masks)
    if count <= 1:
        return [np.zeros_like(x) for x in values]
    mean = sum(x.sum() for x in values) / count
    squares = sum(np.square(x - mean)[mask].sum() for x, mask in zip(values, masks))
    low = min(x[mask].min() for x, mask in zip(values, masks) if mask.any())
    high = max(x[mask].max() for x, mask in zip(values, masks) if mask.any())
    scale = 0.0 if low == high else 1.0 / np.sqrt(squares / (count - 1) + WHITEN_EPS)
    offset = 0.0 if shift else mean
    return [np.where(mask, (x - mean) * scale + offset, 0.0) for x, mask in zip(values, masks)]


def discounted_returns(
    token_rewards: np.ndarray, mask: np.ndarray, gamma: float = 1.0
) -> np.ndarray:
    """G_t = r_t + gamma G of the next trained token; REINFORCE++ whitens it. Source: arXiv:2501.03262."""
    zeros = np.zeros(np.shape(mask), np.float64)
    return gae(token_rewards, zeros, mask, gamma=gamma, lam=1.0)[0]


def gae(
    token_rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    bootstrap: np.ndarray | None = None,
    *,
    gamma: float = 1.0,
    lam: float | np.ndarray = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns = advantages + values), unwhitened.

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lam A_next, next = the next trained token; after the
    last one V is bootstrap, 0 if None.

    Args:    bootstrap: float[B], for sequences cut by a limit.  lam: of all, or float[B].
    Source:  arXiv:1506.02438.
    """
    mask = np.asarray(mask) != 0
    rewards = np.where(mask, np.asarray(token_rewards, np.float64), 0.0)
    values = np.where(mask, np.asarray(values, np.float64), 0.0)
    num_rows, num_columns = mask.shape
    ahead = np.zeros(num_rows) if bootstrap is None else np.asarray(bootstrap, np.float64).copy()
    running = np.zeros(num_rows)
    advantages = np.zeros(mask.shape, np.float64)
    for t in range(num_columns - 1, -1, -1):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * ahead - values[:, t]
        running = np.where(here, delta + gamma * lam * running, running)
        ahead = np.where(here, values[:, t], ahead)
        advantages[:, t] = np.where(here, running, 0.0)
    return advantages, np.where(mask, advantages + values, 0.0)


def on_last_token(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float64[B, T]: each sequence's reward on its last trained token; nowhere if it has none."""
    mask = np.asarray(mask) != 0
    out = np.zeros(mask.shape, np.float64)
    rows = np.flatnonzero(mask.any(axis=1))
    last = mask.shape[1] - 1 - np.argmax(mask[rows, ::-1], axis=1)
    out[rows, last] = np.asarray(rewards, np.float64)[rows]
    return out


def optimal_token_baseline(
    token_rewards: np.ndarray,
    mask: np.ndarray,
    logprobs: np.ndarray,
    sum_squares: np.ndarray,
    groups: np.ndarray,
    *,
    eps: float = 1e-8,
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, weights): G - B with B_t = sum_i G_it W_it / sum_i W_it over the group at token position t.

    W_it = sum over s <= t of (1 - 2 p_is + sum_v p_v^2), the expected squared gradient so far. Where fewer than two
    members are left, B = 0.

    Args:    logprobs, sum_squares: float[B, T], log p of the token and sum_v p_v^2 at it.
    Source:  OTB arXiv:2602.07078.
    """
    mask, groups = np.asarray(mask) != 0, np.asarray(groups)
    probs = np.exp(np.where(mask, np.asarray(logprobs, np.float64), 0.0))
    energy = 1.0 - 2.0 * probs + np.where(mask, np.asarray(sum_squares, np.float64), 0.0)
    weights = np.where(mask, np.cumsum(np.where(mask, energy, 0.0), axis=1), 0.0)
    returns = discounted_returns(token_rewards, mask)
    baseline = np.zeros(mask.shape, np.float64)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        own = (returns[members] * weights[members]).sum(axis=0)
        own = own / (weights[members].sum(axis=0) + eps)
        baseline[members] = np.where(mask[members].sum(axis=0) >= 2, own, 0.0)
    return np.where(mask, returns - baseline, 0.0), weights


def process_normalised(
    step_rewards: Sequence[Sequence[float]],
    step_ends: Sequence[Sequence[int]],
    groups: np.ndarray,
    mask: np.ndarray,
    *,
    eps: float = 1e-6,
) -> np.ndarray:
    """A_t = sum of the z of the steps that end at or after t; z = (step reward - mean) / (std + eps) over the group.

    Args:    step_rewards, step_ends: ragged, per sequence: reward and last token's index of each step.
    Source:  GRPO with process supervision, DeepSeekMath arXiv:2402.03300. Equal step rewards, or one: 0.
    """
    mask, groups = np.asarray(mask) != 0, np.asarray(groups)
    advantages = np.zeros(mask.shape, np.float64)
    columns = np.arange(mask.shape[1])
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group).tolist()
        pool = np.array([r for i in members for r in step_rewards[i]], np.float64)
        if len(pool) < 2 or pool.max() == pool.min():
            continue
        mean, std = pool.mean(), pool.std(ddof=1)
        for i in members:
            for reward, end in zip(step_rewards[i], step_ends[i], strict=True):
                advantages[i] += (reward - mean) / (std + eps) * (columns <= end)
    return np.where(mask, advantages, 0.0)
