"""How far the trainer's log-probs at step start are from those the sampler reported.

With d = logprob - behaviour_logprob and w = exp(d): k1 = mean(-d) estimates KL(behaviour || policy),
k2 = mean(d^2) / 2 is biased with little noise, k3 = mean(w - 1 - d) is unbiased and never negative,
chi2 = mean(w^2) - 1 is what the variance of weighted sums grows with, ess = (mean w)^2 / mean(w^2)
is 1 iff all weights are equal. abs and k3 are split by lag (consuming version minus the token's; 9
stands for 9 and more) and by pure or mixed KV: lag 0 pure is numerics alone and is what tests gate,
the rest is staleness.
Life: 1 `mismatch_totals` sums on the device, a row a bucket; 2 `mismatch_metrics` names and divides
on the host.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rl_jax.algorithms.ratios import log_ratio
from rl_jax.metrics import Metric

MAX_LAG = 9
BUCKETS = tuple((lag, kind) for lag in range(MAX_LAG + 1) for kind in ("pure", "mixed"))
COLUMNS = ("count", "abs", "k1", "k2", "k3", "w", "w_squared")
PERCENTILES = (50, 99)


def mismatch_totals(
    logprobs: Float[Array, "*N"],
    behaviour_logprobs: Float[Array, "*N"],
    mask: Bool[Array, "*N"],
    lag: Int[Array, "*N"],
    context_mixed: Bool[Array, "*N"],
) -> dict[str, jax.Array]:
    """{"sums": f32[BUCKETS, COLUMNS] over the tokens of mask, and f32[] "abs_max", "abs_p50", "abs_p99".

    abs_p99 is the nearest rank: the smallest |d| that 99 % of the tokens do not exceed. Log-ratios
    are clamped to +-20.
    """
    d = log_ratio(logprobs, behaviour_logprobs, mask)
    w = jnp.exp(d)
    columns = [jnp.ones_like(d), jnp.abs(d), -d, d * d / 2, jnp.expm1(d) - d, w, w * w]
    bucket = 2 * jnp.clip(lag, 0, MAX_LAG) + context_mixed.astype(jnp.int32)
    member = (bucket[..., None] == jnp.arange(len(BUCKETS))) & mask[..., None]
    sums = jax.lax.dot(
        member.reshape(-1, len(BUCKETS)).T.astype(jnp.float32),
        jnp.stack(columns, axis=-1).reshape(-1, len(COLUMNS)),
        precision=jax.lax.Precision.HIGHEST,  # an accelerator's default would round the summands
    )
    count = mask.sum()
    ranked = jnp.sort(jnp.where(mask, jnp.abs(d), jnp.inf).reshape(-1))

    def percentile(percent: int) -> jax.Array:
        share = percent / 100
        rank = jnp.maximum(jnp.ceil(share * count.astype(jnp.float32)).astype(jnp.int32) - 1, 0)
        return jnp.where(count > 0, ranked[rank], 0.0)

    return {
        "sums": sums,
        "abs_max": jnp.abs(d).max(),
        **{f"abs_p{percent}": percentile(percent) for percent in PERCENTILES},
    }


def mismatch_metrics(totals: Mapping[str, np.ndarray]) -> dict[str, Metric]:
    """Named metrics of host totals; a bucket nothing fell into is absent. {} gives {}."""
    if not totals:
        return {}
    buckets = [dict(zip(COLUMNS, row.tolist())) for row in np.asarray(totals["sums"], np.float64)]
    whole = {name: sum(bucket[name] for bucket in buckets) for name in COLUMNS}
    count = whole["count"]
    if not count:
        return {}
    metrics = {
        "mismatch/abs_mean": Metric(whole["abs"], count),
        "mismatch/abs_max": Metric(float(totals["abs_max"]), 1),
        **{f"mismatch/abs_p{p}": Metric(float(totals[f"abs_p{p}"]), 1) for p in PERCENTILES},
        **{f"mismatch/{name}": Metric(whole[name], count) for name in ("k1", "k2", "k3")},
        "mismatch/chi2": Metric(whole["w_squared"] - count, count),
        "policy/ratio": Metric(whole["w"], count),
    }
    if whole["w_squared"] > 0:
        metrics["is/ess"] = Metric(whole["w"] ** 2 / (count * whole["w_squared"]), 1)
    at_lag = [0.0] * (MAX_LAG + 1)
    for (lag, kind), bucket in zip(BUCKETS, buckets):
        at_lag[lag] += bucket["count"]
        if bucket["count"]:
            for name in ("abs", "k3"):
                label = "abs_mean" if name == "abs" else name
                metrics[f"mismatch/{label}_lag{lag}_{kind}"] = Metric(bucket[name], bucket["count"])
    for lag, tokens in enumerate(at_lag):
        if tokens:
            metrics[f"staleness/share_lag{lag}"] = Metric(tokens, count)
    return metrics
