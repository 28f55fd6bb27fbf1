"""Log-probs and entropy of chosen tokens: [B, T, V] never exists, forwards or backwards (kernels/linear_logprob.py).

The distribution is softmax(logits / temperature), in float32, of soft-capped logits where the model caps them: the one
that was sampled from; the same for the entropy. The head runs on what is trained only: chunks of trained tokens that
hold none are not computed. `token_logprobs` is the formula itself, over logits that are at hand.
Tokens sampled by top-k or top-p came from a few ids, which are replayed: the distribution is then
the softmax over those ids alone, so that at equal weights it is the sampler's, and no token gets a
gradient that could not have been sampled. Only their columns of the head are read.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.linear_logprob import Hopper, Split, linear_logprob, soft_capped

MAX_GATHERED = 1 << 26  # numbers of the head's columns that are copied at once: 256 MiB


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
    softcap: float = 0.0,
    split: Split | None = None,
    hopper: Hopper | None = None,
    support: Int[Array, "B K S"] | None = None,
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """(log-probs, entropy) of tokens[b, k], which stands at column index[b, k] and is scored from the column before.

    Args:    K is a multiple of chunk.  num_chunks: chunks from here on hold nothing and give 0.
             split: how rows and vocabulary lie on the mesh; None = on one device.
             hopper: the card, where its kernels shall compute what they can.
             support: ids to restrict the distribution to, the token among them, -1 padding; None = all.
    """
    _, K = index.shape
    assert K % chunk == 0, f"{K} slots are not whole chunks of {chunk}"
    before = jnp.maximum(index - 1, 0)  # an empty slot has column 0
    picked = jnp.take_along_axis(hidden, before[..., None], axis=1)  # [B, K, D]
    if support is not None:
        how = {"chunk": chunk, "temperature": temperature, "softcap": softcap}
        return support_logprobs(picked, head, tokens, support, num_chunks, **how)
    how = {"chunk": chunk, "num_chunks": num_chunks, "split": split, "hopper": hopper}
    return linear_logprob(picked, head, tokens, temperature, softcap=softcap, **how)


def support_logprobs(
    hidden: Float[Array, "B K D"],
    head: Float[Array, "D V"],
    tokens: Int[Array, "B K"],
    support: Int[Array, "B K S"],
    num_chunks: Int[Array, ""],
    *,
    chunk: int,
    temperature: float,
    softcap: float = 0.0,
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """(log-probs, entropy) under softmax(logits / temperature) over the ids of `support`, chunk by chunk.

    Source:  Keep Sampling Mask, DeepSeek-V3.2 arXiv:2512.02556.
    """
    B, K, D = hidden.shape
    while B * chunk * support.shape[-1] * D > MAX_GATHERED and chunk % 2 == 0:
        chunk, num_chunks = chunk // 2, 2 * num_chunks
    # Float32, so that its gradient adds up over the chunks without rounding to the compute dtype.
    columns = head.T.astype(jnp.float32)  # [V, D]

    def one(hidden, tokens, ids, columns):
        # The first id is the likeliest: it is there, unless the slot is empty.
        keep = (ids >= 0).at[..., 0].set(True)
        rows = jnp.take(columns, jnp.maximum(ids, 0), axis=0)  # [B, chunk, S, D]
        logits = jnp.einsum(
            "bcd,bcsd->bcs", hidden.astype(jnp.float32), rows, precision=jax.lax.Precision.HIGHEST
        )
        place = jnp.argmax(ids == tokens[..., None], axis=-1)
        return token_logprobs(soft_capped(logits, softcap), place, temperature, keep)

    # The branch is inside: else some JAX versions keep a copy of the head for each chunk.
    @partial(jax.checkpoint, prevent_cse=False)
    def guarded(i, *arrays):
        empty = jnp.zeros(arrays[1].shape, jnp.float32)
        return jax.lax.cond(i < num_chunks, one, lambda *_: (empty, empty), *arrays)

    def step(_, x):
        return None, guarded(*x, columns)

    def chunks(x):  # [B, K, ...] -> [K / chunk, B, chunk, ...]
        return x.reshape(B, K // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)

    xs = (jnp.arange(K // chunk), *map(chunks, (hidden, tokens, support)))
    _, out = jax.lax.scan(step, None, xs)
    logprobs, entropy = (x.swapaxes(0, 1).reshape(B, K) for x in out)
    return logprobs, entropy
