"""How far the trainer's log-probs at step start are from those the sampler reported.

With d = logprob - behaviour_logprob of a token and w = exp(d): k1 = mean(-d) estimates KL(behaviour || policy),
k2 = mean(d^2) / 2 is biased with little noise, k3 = mean(w - 1 - d) is unbiased and never negative,
chi2 = mean(w^2) - 1 is what the variance of weighted sums grows with, ess = (mean w)^2 / mean(w^2)
is 1 iff all weights are equal. abs and k3 are split by lag (consuming version minus the token's; 9
stands for 9 and more) and by pure or mixed KV: lag 0 pure is numerics alone and is what tests gate,
the rest is staleness. Of a sequence w is the product over its tokens, its perplexity exp(-mean log-prob), and every
sequence counts once.
Life: 1 `mismatch_totals` sums on the device, a row a bucket; 2 `mismatch_metrics` names and divides
on the host.
Source: as verl measures them, without its empty rows; ess predicts collapse, arXiv:2602.17616.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rl_jax.algorithms.ratios import clamp, difference
from rl_jax.algorithms.segments import run_mean, run_starts, run_sum
from rl_jax.metrics import Metric

MAX_LAG = 9
BUCKETS = tuple((lag, kind) for lag in range(MAX_LAG + 1) for kind in ("pure", "mixed"))
COLUMNS = ("count", "abs", "k1", "k2", "k3", "w", "w_squared", "prob", "mult")
SEQUENCE = (
    "count", "w", "w_squared", "train_ppl", "rollout_ppl", "ppl_gap", "ppl_gap_abs", "ppl_ratio",
)  # fmt: skip
PERCENTILES = (50, 99)


def mismatch_totals(
    logprobs: Float[Array, "M R K"],
    behaviour_logprobs: Float[Array, "M R K"],
    mask: Bool[Array, "M R K"],
    lag: Int[Array, "M R K"],
    context_mixed: Bool[Array, "M R K"],
    segments: Int[Array, "M R K"],
) -> dict[str, jax.Array]:
    """{"sums": [BUCKETS, COLUMNS] over the tokens of mask, "sequences": [SEQUENCE], and [] "abs_max", "abs_p50", ...}.

    abs_p99 is the nearest rank: the smallest |d| that 99 % of the tokens do not exceed. Exponents
    are clamped to +-20, those of sequences after summation. segments: as LossInputs.segment_ids.
    """
    d = difference(logprobs, behaviour_logprobs, mask)
    w = jnp.exp(clamp(d))
    policy, behaviour = (jnp.where(mask, x, 0.0) for x in (logprobs, behaviour_logprobs))
    columns = [
        jnp.ones_like(d), jnp.abs(d), -d, d * d / 2, jnp.expm1(clamp(d)) - d, w, w * w,
        jnp.abs(jnp.exp(clamp(policy)) - jnp.exp(clamp(behaviour))), jnp.exp(jnp.abs(clamp(d))),
    ]  # fmt: skip
    bucket = 2 * jnp.clip(lag, 0, MAX_LAG) + context_mixed.astype(jnp.int32)
    member = (bucket[..., None] == jnp.arange(len(BUCKETS))) & mask[..., None]
    sums = jax.lax.dot(
        member.reshape(-1, len(BUCKETS)).T.astype(d.dtype),
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
        "sequences": jax.vmap(_sequence_sums)(policy, behaviour, mask, segments).sum(axis=0),
        "abs_max": jnp.abs(d).max(),
        **{f"abs_p{percent}": percentile(percent) for percent in PERCENTILES},
    }


def _sequence_sums(
    policy: Float[Array, "R K"],
    behaviour: Float[Array, "R K"],
    mask: Bool[Array, "R K"],
    segments: Int[Array, "R K"],
) -> Float[Array, " S"]:
    """SEQUENCE, over the sequences with a trained token; both log-probs are 0 off the mask."""
    starts = run_starts(segments)
    counted = starts & (run_sum(mask.astype(policy.dtype), starts) > 0)
    w = jnp.exp(clamp(run_sum(policy - behaviour, starts)))
    train, rollout = (-run_mean(x, mask, starts) for x in (policy, behaviour))
    gap = train - rollout
    columns = [
        jnp.ones_like(w), w, w * w, jnp.exp(clamp(train)), jnp.exp(clamp(rollout)), gap, jnp.abs(gap),
        jnp.exp(clamp(gap)),
    ]  # fmt: skip
    return jnp.where(counted, jnp.stack(columns), 0.0).sum(axis=(1, 2))


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
        "mismatch/abs_prob": Metric(whole["prob"], count),
        "mismatch/mult_prob_error": Metric(whole["mult"], count),
        "policy/ratio": Metric(whole["w"], count),
        **_ess("is/ess", whole),
    }
    sequences = dict(zip(SEQUENCE, np.asarray(totals["sequences"], np.float64).tolist()))
    num = sequences["count"]
    metrics |= {f"mismatch/{name}": Metric(sequences[name], num) for name in SEQUENCE[3:]}
    metrics["mismatch/chi2_sequence"] = Metric(sequences["w_squared"] - num, num)
    metrics |= _ess("is/ess_sequence", sequences)
    at_lag = [dict.fromkeys(COLUMNS, 0.0) for _ in range(MAX_LAG + 1)]
    for (lag, kind), bucket in zip(BUCKETS, buckets):
        at_lag[lag] = {name: at_lag[lag][name] + bucket[name] for name in COLUMNS}
        if bucket["count"]:
            for name in ("abs", "k3"):
                label = "abs_mean" if name == "abs" else name
                metrics[f"mismatch/{label}_lag{lag}_{kind}"] = Metric(bucket[name], bucket["count"])
    for lag, sums in enumerate(at_lag):
        if sums["count"]:
            metrics[f"staleness/share_lag{lag}"] = Metric(sums["count"], count)
            metrics |= _ess(f"is/ess_lag{lag}", sums)
    return metrics


def _ess(name: str, sums: Mapping[str, float]) -> dict[str, Metric]:
    """(mean w)^2 / mean(w^2), where the weights are not all 0."""
    if sums["w_squared"] <= 0:
        return {}
    return {name: Metric(sums["w"] ** 2 / (sums["count"] * sums["w_squared"]), 1)}
