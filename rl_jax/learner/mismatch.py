"""How far the trainer's log-probs at step start are from those the sampler reported.

With d = logprob - behaviour_logprob and w = exp(d): k1 = mean(-d) estimates KL(behaviour ||
policy), k3 = mean(w - 1 - d) does so with less noise and is never negative, ess = (mean w)^2 /
mean(w^2) is 1 iff all weights are equal. Each is split by lag (consuming version minus the token's;
3 stands for 3 and more) and by pure or mixed KV: lag 0 pure is numerics alone and is what tests
gate, the rest is staleness.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rl_jax.algorithms.algorithm import Sums
from rl_jax.algorithms.ppo import log_ratio
from rl_jax.metrics import Metric

MAX_LAG = 3


def mismatch_sums(
    logprobs: Float[Array, "*N"],
    behaviour_logprobs: Float[Array, "*N"],
    mask: Bool[Array, "*N"],
    lag: Int[Array, "*N"],
    context_mixed: Bool[Array, "*N"],
) -> Sums:
    """(sum, count) pairs over all tokens of mask; a bucket nothing fell into has count 0.

    abs_max and abs_p99 (nearest rank: the smallest |d| that 99 % of the tokens do not exceed) have
    count 1 if anything was measured. Log-ratios are clamped to +-20.
    """
    d = log_ratio(logprobs, behaviour_logprobs, mask)
    w = jnp.exp(d)
    distance = jnp.abs(d)
    k3 = jnp.expm1(d) - d
    count = mask.sum().astype(jnp.float32)
    any_token = (count > 0).astype(jnp.float32)

    def over(selected, values):
        return jnp.where(selected, values, 0.0).sum()

    ranked = jnp.sort(jnp.where(mask, distance, jnp.inf).reshape(-1))
    rank = jnp.maximum(jnp.ceil(0.99 * count).astype(jnp.int32) - 1, 0)
    sums = {
        "mismatch/abs_mean": (over(mask, distance), count),
        "mismatch/abs_max": (jnp.where(mask, distance, 0.0).max(), any_token),
        "mismatch/abs_p99": (jnp.where(count > 0, ranked[rank], 0.0), any_token),
        "mismatch/k1": (over(mask, -d), count),
        "mismatch/k3": (over(mask, k3), count),
        "policy/ratio": (over(mask, w), count),
        "is/weight_squared": (over(mask, w * w), count),
    }
    for step in range(MAX_LAG + 1):
        for kind, mixed in (("pure", False), ("mixed", True)):
            of = mask & (jnp.minimum(lag, MAX_LAG) == step) & (context_mixed == mixed)
            size = of.sum().astype(jnp.float32)
            sums[f"mismatch/abs_mean_lag{step}_{kind}"] = (over(of, distance), size)
            sums[f"mismatch/k3_lag{step}_{kind}"] = (over(of, k3), size)
    return sums


def with_ess(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Host side: is/ess in place of the sum of squared weights it is made of."""
    metrics = dict(metrics)
    squared = metrics.pop("is/weight_squared", None)
    if squared is not None and squared.count and np.isfinite(squared.sum) and squared.sum > 0:
        ess = metrics["policy/ratio"].sum ** 2 / (squared.sum * squared.count)
        metrics["is/ess"] = Metric(ess, 1)
    return metrics
