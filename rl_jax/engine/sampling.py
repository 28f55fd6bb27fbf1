"""Sampling: one token per slot from float32 logits, and its log-probs.

Invariants: a slot's token depends on its own logits, sampling numbers, seed and token index only
(Gumbel-max with the key fold_in(key(seed), token_index)), so neither the slot nor the other
requests nor the block size can change it. `logprobs` is the distribution that is trained:
log_softmax(logits / temperature), without top-p and top-k; `sampled_logprobs` is the one sampled
from. Greedy (temperature 0) uses temperature 1 for both.
Two forms with the same tokens: `sample` in several simple passes, as suits a CPU; `sample_tiled` in one pass that reads
the logits once, makes the noise on the way and keeps six numbers a tile of the vocabulary. Tiles stay on the device
that has them where the vocabulary is split, so logits are never gathered.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

MOST_TILES = 128
LOW = np.float32(-1e30)  # finite, so that exp(LOW - LOW) is a number
NOTHING = (LOW, np.int32(2**31 - 1), LOW, LOW, np.float32(0), np.int32(0))  # of no columns


class Sampled(NamedTuple):
    tokens: jax.Array  # i32[S]
    logprobs: jax.Array  # f32[S]
    sampled_logprobs: jax.Array  # f32[S]
    nan: jax.Array  # bool[S] the logits held a NaN or an infinity: the token means nothing


def sample(
    logits: Float[Array, "S V"],
    key: Int[Array, "S 2"],
    token_index: Int[Array, " S"],
    temperature: Float[Array, " S"],
    top_p: Float[Array, " S"],
    top_k: Int[Array, " S"],
) -> Sampled:
    """One token per row.

    key: u32[S, 2] threefry key data. top_p >= 1 and top_k <= 0 switch a row's filter off.
    """
    logits = logits.astype(jnp.float32)
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    wants_filter = ((top_k > 0) | (top_p < 1)) & ~greedy
    # Sorting the vocabulary costs more than the rest together: only where some row asks for it.
    filtered = jax.lax.cond(
        wants_filter.any(), _filtered, lambda x, wants, p, k: x, scaled, wants_filter, top_p, top_k
    )
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(key, token_index, logits.shape[-1])
    tokens = _argmax(jnp.where(greedy[:, None], logits, filtered + noise))
    return Sampled(
        tokens=tokens,
        logprobs=_logprob_of(scaled, tokens),
        sampled_logprobs=_logprob_of(filtered, tokens),
        nan=~jnp.isfinite(logits).all(axis=-1),
    )


def sample_tiled(
    logits: Float[Array, "S V"],
    key: Int[Array, "S 2"],
    token_index: Int[Array, " S"],
    temperature: Float[Array, " S"],
    top_p: Float[Array, " S"],
    top_k: Int[Array, " S"],
) -> Sampled:
    """As `sample`: the same tokens, log-probs equal but for rounding. Rows with a filter take all rows to `sample`."""
    wants_filter = ((top_k > 0) | (top_p < 1)) & (temperature > 0)
    return jax.lax.cond(
        wants_filter.any(), sample, _sample_unfiltered,
        logits, key, token_index, temperature, top_p, top_k,
    )  # fmt: skip


def _sample_unfiltered(logits, key, token_index, temperature, top_p, top_k) -> Sampled:
    S, V = logits.shape
    greedy = (temperature <= 0)[:, None]
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature[:, None])
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(key, token_index, V)
    ids = jnp.broadcast_to(jnp.arange(V, dtype=jnp.int32), (S, V))
    bad = (~jnp.isfinite(logits)).astype(jnp.int32)
    chosen_by = jnp.where(greedy, logits, scaled + noise)
    columns = (chosen_by, ids, scaled, scaled, jnp.ones_like(scaled), bad)
    tiles = math.gcd(V, MOST_TILES)  # the outer factor, so that a split vocabulary splits the tiles
    columns = tuple(x.reshape(S, tiles, V // tiles) for x in columns)
    for _ in range(2):  # within tiles, then over them
        columns = jax.lax.reduce(columns, NOTHING, _merge, (columns[0].ndim - 1,))
    _, tokens, chosen, top, total, bad = columns
    logprobs = chosen - top - jnp.log(total)
    return Sampled(jnp.minimum(tokens, V - 1), logprobs, logprobs, bad > 0)


def _merge(a: tuple, b: tuple) -> tuple:
    """Two parts of the vocabulary together: (best value, its id, its logit, top, sum of exp(x - top), bad)."""
    (best_a, id_a, chosen_a, top_a, total_a, bad_a) = a
    (best_b, id_b, chosen_b, top_b, total_b, bad_b) = b
    first = (best_a > best_b) | ((best_a == best_b) & (id_a < id_b))
    pick = lambda x, y: jnp.where(first, x, y)
    top = jnp.maximum(top_a, top_b)
    total = total_a * jnp.exp(top_a - top) + total_b * jnp.exp(top_b - top)
    best = (pick(best_a, best_b), pick(id_a, id_b), pick(chosen_a, chosen_b))
    return (*best, top, total, jnp.maximum(bad_a, bad_b))


def _filtered(
    scaled: jax.Array, wants_filter: jax.Array, top_p: jax.Array, top_k: jax.Array
) -> jax.Array:
    removed = wants_filter[:, None] & ~allowed_tokens(scaled, top_p, top_k)
    return jnp.where(removed, -jnp.inf, scaled)


def allowed_tokens(
    scaled: Float[Array, "S V"], top_p: Float[Array, " S"], top_k: Int[Array, " S"]
) -> Bool[Array, "S V"]:
    """The top_k most likely tokens, and of those the fewest whose renormalised mass reaches top_p.

    At least one stays. Ties go to the lower id, so exactly top_k tokens stay.
    """
    order = jnp.argsort(-scaled, axis=-1, stable=True)  # [S, V] ids, most likely first
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    V = scaled.shape[-1]
    rank = jnp.arange(V)
    kept = rank < jnp.where(top_k > 0, top_k, V)[:, None]
    mass = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass  # mass of the tokens ahead of each
    kept &= (before < jnp.where(top_p < 1, top_p, jnp.inf)[:, None]) | (rank == 0)
    return jnp.zeros_like(kept).at[jnp.arange(len(order))[:, None], order].set(kept)


def _gumbel(key_data: jax.Array, token_index: jax.Array, vocab_size: int) -> jax.Array:
    key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, token_index), (vocab_size,), jnp.float32)


def _logprob_of(scaled: jax.Array, tokens: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)


def _argmax(x: jax.Array) -> jax.Array:
    """i32[S], the lowest id of the largest value; 3 times faster on CPU than jnp.argmax. NaN rows
    mean nothing.
    """
    V = x.shape[-1]
    at_top = x == x.max(axis=-1, keepdims=True)
    return jnp.minimum(jnp.where(at_top, jnp.arange(V, dtype=jnp.int32), V).min(axis=-1), V - 1)
