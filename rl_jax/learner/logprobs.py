"""Log-probs and entropy of chosen tokens: [B, T, V] never exists, forwards or backwards (kernels/linear_logprob.py).

The distribution is softmax(logits / temperature), in float32, the one that was sampled from; the
same for the entropy. The head runs on what is trained only: chunks of trained tokens that hold none
are not computed. `token_logprobs` is the formula itself, over logits that are at hand.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.linear_logprob import Hopper, Split, linear_logprob


def token_logprobs(
    logits: Float[Array, "... V"],
    tokens: Int[Array, "..."],
    temperature: float = 1.0,
    keep: Bool[Array, "... V"] | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """(log-prob of tokens, entropy) under softmax(logits / temperature), natural log.

    Args:    keep: restricts the distribution to these entries (what top-p or top-k left), renormalised; the caller
             includes the tokens themselves.
    Source:  log-sum-exp with the maximum subtracted, so logits of +-1000 are safe; entropy = lse - sum(p z).
    """
    z = logits / temperature
    if keep is not None:
        z = jnp.where(keep, z, -jnp.inf)
    z = z - jax.lax.stop_gradient(z.max(axis=-1, keepdims=True))
    weights = jnp.exp(z)
    total = weights.sum(axis=-1)
    log_total = jnp.log(total)
    chosen = jnp.take_along_axis(z, tokens[..., None], axis=-1)[..., 0]
    finite = z if keep is None else jnp.where(keep, z, 0.0)  # 0 * -inf is NaN
    entropy = log_total - (weights * finite).sum(axis=-1) / total
    return chosen - log_total, entropy


def target_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    index: Int[Array, "B K"],
    tokens: Int[Array, "B K"],
    num_chunks: Int[Array, ""],
    *,
    chunk: int,
    temperature: float,
    split: Split | None = None,
    hopper: Hopper | None = None,
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """(log-probs, entropy) of tokens[b, k], which stands at column index[b, k] and is scored from the column before.

    Args:    K is a multiple of chunk.  num_chunks: chunks from here on hold nothing and give 0.
             split: how rows and vocabulary lie on the mesh; None = on one device.
             hopper: the card, where its kernels shall compute what they can.
    """
    _, K = index.shape
    assert K % chunk == 0, f"{K} slots are not whole chunks of {chunk}"
    before = jnp.maximum(index - 1, 0)  # an empty slot has column 0
    picked = jnp.take_along_axis(hidden, before[..., None], axis=1)  # [B, K, D]
    how = {"chunk": chunk, "num_chunks": num_chunks, "split": split, "hopper": hopper}
    return linear_logprob(picked, head, tokens, temperature, **how)
