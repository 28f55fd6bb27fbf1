"""Operations of the worked cases that are a loss per token -> our function.

`loss(arrays, params)` gives a TokenLoss from [B, K] arrays under the cases' names (and `segments`, `turns`); the
harness differentiates sum(weights * loss) by `variable`. A missing parameter takes the default that stands here.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rl_jax.algorithms import correction, distillation, kl
from rl_jax.algorithms import sequence_losses as sequence
from rl_jax.algorithms import token_losses as losses
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.covariance import most_covarying
from rl_jax.algorithms.entropy import entropy_loss
from rl_jax.algorithms.token_losses import TokenLoss
from rl_jax.algorithms.value import value_loss
from rl_jax.learner.logprobs import token_logprobs
from tests.algorithms.case_ops import Arrays, LossOp, Params, chosen


def inputs_of(a: Arrays) -> LossInputs:
    zeros = jnp.zeros_like(a["logp"])
    old = a.get("old_logp", a.get("prox_logp"))
    behaviour = a.get("rollout_logp", a.get("behav_logp", zeros if old is None else old))
    return LossInputs(
        logprobs=a["logp"],
        entropy=zeros,
        behaviour_logprobs=behaviour,
        advantages=a.get("advantages", zeros),
        mask=a["mask"],
        segment_ids=a["segments"],
        turn_ids=a["turns"],
        old_logprobs=old,
        teacher_logprobs=a.get("teacher_logp"),
    )


def gap_of(
    a: Arrays, proximal: str = "old_logp", behaviour: str = "rollout_logp"
) -> correction.Gap:
    return correction.gap(a[proximal], a[behaviour], a["mask"], a["segments"], a["turns"])


def weights_of(g: correction.Gap, p: Params) -> tuple[jax.Array, jax.Array]:
    weights, outside = correction.importance_weights(
        g,
        level=p.get("level", "token"),
        mode=p.get("mode", "truncate"),
        high=2.0 if p.get("high") is None else p["high"],
        low=0.0 if p.get("low") is None else p["low"],
    )
    if p.get("batch_normalize"):
        weights = correction.normalised_weights(weights, g, p.get("level", "token"))
    return weights, outside


def clips(p: Params, low: float = 0.2, high: float = 0.2) -> dict[str, Any]:
    return {
        "clip_low": p.get("clip_low", low),
        "clip_high": p.get("clip_high", high),
    }


def ppo(a: Arrays, p: Params) -> TokenLoss:
    out = losses.ppo(inputs_of(a), **clips(p), dual_clip=p.get("clip_c"))
    weights = jnp.where(a["mask"], 1.0, 0.0).astype(out.loss.dtype)
    if p.get("tis"):
        weights, _ = weights_of(gap_of(a), p["tis"])
    return TokenLoss(weights * out.loss, out.parts | {"is_weights": weights})


def decoupled(a: Arrays, p: Params) -> TokenLoss:
    mode = {"mask": "mask", "clamp": "truncate"}[p.get("cap_mode", "mask")]
    limits = {"high": p.get("cap", 5.0), "low": p.get("cap_low", 0.0)}
    weights, _ = weights_of(gap_of(a, "prox_logp", "behav_logp"), {"mode": mode, **limits})
    out = losses.ppo(inputs_of(a), **clips(p), dual_clip=p.get("clip_c"))
    return TokenLoss(weights * out.loss, out.parts | {"weights": weights})


def full_grpo(a: Arrays, p: Params) -> TokenLoss:
    policy = ppo(a, p).loss
    divergence = kl.token_kl(a["logp"], a["ref_logp"], a["mask"], p.get("kl_kind", "k3"))
    parts = {"policy": policy, "kl": divergence}
    return TokenLoss(policy + p.get("kl_coef", 0.0) * divergence, parts)


def entropy(a: Arrays, p: Params) -> TokenLoss:
    targets = jnp.zeros(a["mask"].shape, int)
    _, values = token_logprobs(a["logits"], targets, p.get("temperature", 1.0))
    return TokenLoss(entropy_loss(values, a["mask"], p.get("coef", 0.0)), {"entropy": values})


def kl_cov(a: Arrays, p: Params) -> TokenLoss:
    fixed, share = jax.lax.stop_gradient(a["logp"]), p.get("ratio", 2e-4)
    selected = most_covarying(a["advantages"], fixed, a["mask"], share, xp=jnp)
    x = replace(inputs_of(a), selected=selected.astype(a["logp"].dtype))
    return losses.kl_cov(x, **chosen(p, coef="coef"))


def kl_loss(a: Arrays, p: Params) -> TokenLoss:
    return TokenLoss(kl.token_kl(a["logp"], a["ref_logp"], a["mask"], p.get("kind", "k3")), {})


def unbiased(a: Arrays, p: Params) -> TokenLoss:
    return TokenLoss(kl.unbiased_kl(a["logp"], a["old_logp"], a["ref_logp"], a["mask"]), {})


def value(a: Arrays, p: Params) -> TokenLoss:
    old = a.get("old_values", a["values"])
    return TokenLoss(value_loss(a["values"], old, a["returns"], a["mask"], clip=p.get("clip")), {})


def kept(a: Arrays, keep: jax.Array, **parts: jax.Array) -> TokenLoss:
    """A mask as a loss of nothing: corrections are detached, so every gradient must be 0."""
    nothing = jnp.zeros(a["mask"].shape, a["rollout_logp"].dtype)
    return TokenLoss(nothing, {"keep": keep, "gone": a["mask"] & ~keep, **parts})


def reject(a: Arrays, p: Params) -> TokenLoss:
    keep = correction.passes(
        gap_of(a),
        stat=p.get("stat", "ratio"),
        level=p.get("level", "token"),
        high=jnp.inf if p.get("high") is None else p["high"],
        low=0.0 if p.get("low") is None else p["low"],
    )
    return kept(a, keep)


def veto(a: Arrays, p: Params) -> TokenLoss:
    return kept(a, correction.passes_veto(gap_of(a), threshold=p.get("threshold", 1e-4)))


def opsm(a: Arrays, p: Params) -> TokenLoss:
    keep, drift = correction.passes_opsm(gap_of(a, "logp"), a["advantages"], delta=p["delta"])
    return kept(a, keep, drift=drift)


def weights(a: Arrays, p: Params) -> TokenLoss:
    values, outside = weights_of(gap_of(a), p)
    return kept(a, a["mask"], weights=values, outside=outside)


TOKEN = {"per_token_loss": ("token", "loss")}
CLIP = {**TOKEN, "clip_frac": ("share", "clipped")}
DROP = {**TOKEN, "drop_frac": ("share", "clipped")}
SEQ = "seq-mean-token-mean"

LOSSES: dict[str, LossOp] = {
    "agg": LossOp(lambda a, p: TokenLoss(a["x"], {}), variable="x", is_raw=True),
    "kl": LossOp(kl_loss, outputs={"per_token": ("token", "loss")}),
    "kl.unbiased": LossOp(unbiased, outputs={"per_token": ("token", "loss")}),
    "loss.cispo": LossOp(
        lambda a, p: losses.cispo(
            inputs_of(a), **chosen(p, ratio_min="ratio_min", ratio_max="ratio_max")
        ),
        outputs={**CLIP, "weights": ("token", "weights")},
    ),
    "loss.decoupled_ppo": LossOp(decoupled, outputs={**CLIP, "weights": ("token", "weights")}),
    "loss.dppo": LossOp(
        lambda a, p: losses.dppo(
            inputs_of(a),
            **chosen(p, divergence="kind", div_low="div_low", div_high="div_high"),
            **chosen(p, ratio_cap="ratio_cap"),
        ),
        outputs={**DROP, "keep": ("token", "keep")},
    ),
    "loss.dppo_kl_reg": LossOp(
        lambda a, p: losses.dppo_kl_reg(
            inputs_of(a), **chosen(p, div_low="mask_low", div_high="mask_high", kl_tau="kl_tau")
        ),
        outputs=DROP,
    ),
    "loss.entropy": LossOp(
        entropy, variable="logits", outputs={"entropy": ("token", "entropy")}, selects=False
    ),
    "loss.full_grpo": LossOp(
        full_grpo, outputs={"pg_loss": ("total", "policy"), "kl": ("total", "kl")}
    ),
    "loss.gmpo": LossOp(
        lambda a, p: sequence.gmpo(inputs_of(a), **clips(p, 0.4, 0.4)),
        aggregation=SEQ,
        outputs={"seq_ratio": ("sequence", "ratio")},
    ),
    "loss.gspo": LossOp(
        lambda a, p: sequence.gspo(inputs_of(a), **clips(p, 3e-4, 4e-4), dual_clip=p.get("clip_c")),
        aggregation=SEQ,
        outputs={
            "seq_ratio": ("sequence", "ratio"),
            "seq_loss": ("sequence", "loss"),
            "clip_frac": ("total", "clipped"),  # a share of sequences
        },
    ),
    "loss.gspo_token": LossOp(
        lambda a, p: sequence.gspo_token(
            inputs_of(a), **clips(p, 3e-4, 4e-4), dual_clip=p.get("clip_c")
        ),
        aggregation=SEQ,
        outputs=CLIP,
    ),
    "loss.kimi_seq": LossOp(
        lambda a, p: sequence.kimi(inputs_of(a), **chosen(p, tau="tau")),
        aggregation=SEQ,
        outputs={"seq_loss": ("sequence", "loss")},
    ),
    "loss.kimi_token": LossOp(
        lambda a, p: losses.kimi_token(inputs_of(a), **chosen(p, tau="tau")), outputs=TOKEN
    ),
    "loss.kl_cov": LossOp(
        kl_cov,
        outputs={**TOKEN, "selected": ("token", "selected")},
    ),
    "loss.opd_pg": LossOp(
        lambda a, p: distillation.opd_pg(inputs_of(a), cap=p.get("cap", 2.0)),
        outputs={
            **TOKEN,
            "token_advantages": ("token", "token_advantages"),
            "reverse_kl": ("mean", "reverse_kl"),
        },
    ),
    "loss.ppo": LossOp(
        ppo,
        outputs={
            **CLIP,
            "dual_clip_frac": ("share", "dual_clipped"),
            "is_weights": ("token", "is_weights"),
        },
    ),
    "loss.reinforce": LossOp(lambda a, p: losses.reinforce(inputs_of(a)), outputs=TOKEN),
    "loss.sapo": LossOp(
        lambda a, p: losses.sapo(inputs_of(a), **chosen(p, tau_pos="tau_pos", tau_neg="tau_neg")),
        aggregation=SEQ,
        outputs=TOKEN,
    ),
    "loss.segment_ppo": LossOp(
        lambda a, p: sequence.turn_ppo(
            inputs_of(a), **clips(p, 3e-4, 4e-4), dual_clip=p.get("clip_c")
        ),
        outputs={**CLIP, "ratio": ("token", "ratio")},
    ),
    "loss.sft": LossOp(lambda a, p: losses.nll(inputs_of(a)), outputs=TOKEN),
    "loss.tis_pg": LossOp(
        lambda a, p: losses.truncated_is(inputs_of(a), cap=p.get("rho", 1.0)),
        outputs={**TOKEN, "weights": ("token", "weights")},
    ),
    "loss.topr": LossOp(
        lambda a, p: sequence.topr(
            inputs_of(a),
            **chosen(p, level="level", pos_weight="pos_weight", neg_weight="neg_weight"),
        ),
        outputs={**TOKEN, "weights": ("token", "weights")},
    ),
    "loss.value": LossOp(value, variable="values"),
    "loss.vespo": LossOp(
        lambda a, p: sequence.vespo(inputs_of(a)), outputs={**TOKEN, "phi": ("sequence", "phi")}
    ),
    "mask.opsm": LossOp(
        opsm,
        variable="rollout_logp",
        outputs={"keep": ("sequence", "keep"), "seq_kl": ("sequence", "drift")},
    ),
    "mismatch.reject": LossOp(
        reject,
        variable="rollout_logp",
        outputs={
            "mask": ("token", "keep"),
            "token_reject_frac": ("share", "gone"),
            "seq_reject_frac": ("sequence_share", "gone"),
        },
    ),
    "mismatch.veto": LossOp(
        veto,
        variable="rollout_logp",
        outputs={"mask": ("token", "keep"), "vetoed": ("any", "gone")},
    ),
    "mismatch.weights": LossOp(
        weights,
        variable="rollout_logp",
        outputs={"weights": ("token", "weights"), "oob_frac": ("share", "outside")},
    ),
}
