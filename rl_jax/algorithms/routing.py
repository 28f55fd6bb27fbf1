"""Routing replay of mixture-of-experts models: recorded expert ids, weights from the trainer's own logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def replayed_gate(
    logits: Float[Array, "S E"],
    replay_ids: Int[Array, "S k"],
    *,
    scoring: str = "softmax",
    norm_topk: bool = True,
    scale: float = 1.0,
    select_bias: Float[Array, " E"] | None = None,
) -> tuple[Float[Array, "S E"], Int[Array, "S k"]]:
    """(gate weights, 0 on unselected experts; the ids used). A row whose first id is negative routes by itself.

    The weights come from the logits at the replayed ids, so the router still learns; the ids carry no gradient. Own
    routing takes the largest scores, ties to the lower id. select_bias acts on that choice only, never on a weight.

    Args:    scoring: softmax | sigmoid.  norm_topk: divide by the sum over the selected.
    Source:  routing replay R3 arXiv:2510.11370; keep-routing, DeepSeek-V3.2 arXiv:2512.02556.
    """
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring={scoring!r} is unknown; one of softmax, sigmoid")
    scores = jax.nn.softmax(logits) if scoring == "softmax" else jax.nn.sigmoid(logits)
    ranked = jax.lax.stop_gradient(scores if select_bias is None else scores + select_bias)
    own = jnp.argsort(-ranked, axis=-1, stable=True)[:, : replay_ids.shape[1]]
    ids = jnp.where(replay_ids[:, :1] < 0, own, replay_ids)
    chosen = (ids[..., None] == jnp.arange(logits.shape[-1])).any(axis=1)
    weights = jnp.where(chosen, scores, 0.0)
    if norm_topk and scoring == "softmax":  # p_e / sum of the selected p, which may all underflow
        weights = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf))
    elif norm_topk:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights * scale, ids
