"""Log-probs and entropy of chosen tokens, chunk by chunk: [B, T, V] never exists, forwards or backwards.

The distribution is softmax(logits / temperature), in float32, the one that was sampled from; the
same for the entropy. A chunk's logits are computed, reduced to two numbers a token and dropped; the
backward pass computes them again. Chunks without a trained token are skipped by a branch, so the
head costs what is trained. The result does not depend on the size of a chunk beyond the order of
float32 sums in the gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
    index: Int[Array, "B K"],
    tokens: Int[Array, "B K"],
    num_chunks: Int[Array, ""],
    to_logits: Callable[[jax.Array], jax.Array],
    *,
    chunk: int,
    temperature: float,
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """(log-probs, entropy) of tokens[b, k], which stands at column index[b, k] and is scored from the column before.

    Args:    K is a multiple of chunk.  num_chunks: chunks from here on hold nothing and give 0.
             to_logits: [..., D] -> f32[..., V].
    """
    B, K = index.shape
    assert K % chunk == 0, f"{K} slots are not whole chunks of {chunk}"

    def split(x: jax.Array) -> jax.Array:  # [B, K] -> [K / chunk, B, chunk]
        return x.reshape(B, K // chunk, chunk).swapaxes(0, 1)

    @jax.checkpoint
    def score(hidden: jax.Array, columns: jax.Array, targets: jax.Array):
        before = jnp.maximum(columns - 1, 0)  # an empty slot has column 0
        picked = jnp.take_along_axis(hidden, before[..., None], axis=1)  # [B, chunk, D]
        return token_logprobs(to_logits(picked), targets, temperature)

    def step(_, xs):
        number, columns, targets = xs
        empty = jnp.zeros(columns.shape, jnp.float32)
        out = jax.lax.cond(
            number < num_chunks,
            lambda: score(hidden, columns, targets),
            lambda: (empty, empty),
        )
        return None, out

    xs = (jnp.arange(K // chunk), split(index), split(tokens))
    _, (logprobs, entropy) = jax.lax.scan(step, None, xs)
    return logprobs.swapaxes(0, 1).reshape(B, K), entropy.swapaxes(0, 1).reshape(B, K)
