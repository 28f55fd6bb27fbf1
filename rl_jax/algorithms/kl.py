"""KL to a reference policy: estimators, in the loss or in the reward, and the controller of its coefficient.

d = log p - log p_ref. Which to use: k1 in the reward (as a loss its expected gradient is 0); in the loss k3 by habit
(its expected gradient is that of the forward KL), k2 or unbiased for the gradient of the reverse KL.
"""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rl_jax.algorithms.options import CHOICES
from rl_jax.algorithms.ratios import MAX_LOG_RATIO, difference, log_ratio

KL_KINDS = tuple(
    kind for kind in CHOICES["kl.kind"] if kind != "unbiased"
)  # it takes old_logprobs too
MAX_K3 = 10.0


def token_kl(
    logprobs: Float[Array, "B K"],
    reference: Float[Array, "B K"],
    mask: Bool[Array, "B K"],
    kind: str,
) -> Float[Array, "B K"]:
    """A KL estimate a token, 0 off the mask: k1 d; k2 d^2 / 2; k3 e^-d + d - 1; k3+ k3 with k2's gradient; abs |d|.

    k3 clamps d to +-20 and its value to +-10; the gradient is 0 where a clamp is active.
    Source:  Schulman, "Approximating KL divergence" (2020); the straight-through k3+ is verl's.
    """
    d = difference(logprobs, reference, mask)
    if kind != "k3+":
        return _estimate(jnp, d, kind)
    square = _estimate(jnp, d, "k2")
    return jax.lax.stop_gradient(_estimate(jnp, d, "k3") - square) + square


def unbiased_kl(
    logprobs: Float[Array, "B K"],
    old_logprobs: Float[Array, "B K"],
    reference: Float[Array, "B K"],
    mask: Bool[Array, "B K"],
) -> Float[Array, "B K"]:
    """(p / old) k3, gradient through both factors: (p / old) d, the importance-weighted gradient of the reverse KL.

    Source:  DeepSeek-V3.2 arXiv:2512.02556; see arXiv:2506.09477.
    """
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs, mask))
    return ratio * token_kl(logprobs, reference, mask, "k3")


def kl_token_rewards(
    logprobs: np.ndarray, reference: np.ndarray, mask: np.ndarray, *, coef: float, kind: str = "k1"
) -> np.ndarray:
    """Host, float64[B, T]: -coef * KL on each trained token, 0 elsewhere."""
    mask = np.asarray(mask) != 0
    d = np.where(mask, np.asarray(logprobs, np.float64), 0.0)
    d = d - np.where(mask, np.asarray(reference, np.float64), 0.0)
    return np.where(mask, -coef * _estimate(np, d, "k3" if kind == "k3+" else kind), 0.0)


def next_kl_coef(coef: float, kl: float, *, target: float, num_samples: int, horizon: int) -> float:
    """coef (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon).

    Args:    kl: mean of the step's sequences; num_samples: how many they are.
    Source:  adaptive KL control, arXiv:1909.08593.
    """
    error = float(np.clip(kl / target - 1.0, -0.2, 0.2))
    return coef * (1.0 + error * num_samples / horizon)


def _estimate(xp: ModuleType, d, kind: str):
    """The estimate in numpy or jax.numpy."""
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * xp.square(d)
    if kind == "abs":
        return xp.abs(d)
    if kind != "k3":
        raise ValueError(f"algorithm.kl.kind={kind!r} is unknown; one of {', '.join(KL_KINDS)}")
    d = xp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return xp.clip(xp.exp(-d) + d - 1.0, -MAX_K3, MAX_K3)
