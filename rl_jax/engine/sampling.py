"""Sampling: one token per slot from float32 logits, and its log-probs.

Invariants: a slot's token depends on its own logits, sampling numbers, seed and token index only
(Gumbel-max with the key fold_in(key(seed), token_index)), so neither the slot nor the other
requests nor the block size can change it. `logprobs` is the distribution that is trained:
log_softmax(logits / temperature), without top-p and top-k; `sampled_logprobs` is the one sampled
from. Greedy (temperature 0) uses temperature 1 for both.
Two forms of the same distribution, whose tokens differ: `sample` in several simple passes, as suits a CPU;
`sample_tiled` in one pass over the logits that keeps three numbers a tile of the vocabulary, and noise for one tile
only, since noise for every logit costs a GPU more than reading them. Tiles stay on the device that has them where the
vocabulary is split, so logits are never gathered.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

MOST_TILES = 128
LOW = np.float32(-1e30)  # finite, so that exp(LOW - LOW) is a number
NOTHING = (LOW, np.float32(0), np.int32(0))  # of no columns


class Sampled(NamedTuple):
    tokens: jax.Array  # i32[S]
    logprobs: jax.Array  # f32[S]
    sampled_logprobs: jax.Array  # f32[S]
    nan: jax.Array  # bool[S] the logits held a NaN or an infinity: the token means nothing
    support: jax.Array | None = None  # i32[S, K] most likely first, -1 padding


def sample(
    logits: Float[Array, "S V"],
    key: Int[Array, "S 2"],
    token_index: Int[Array, " S"],
    temperature: Float[Array, " S"],
    top_p: Float[Array, " S"],
    top_k: Int[Array, " S"],
    *,
    support: int = 0,
    banned: Bool[Array, "S V"] | None = None,
) -> Sampled:
    """One token per row.

    key: u32[S, 2] threefry key data. top_p >= 1 and top_k <= 0 switch a row's filter off. support: K, ids that are
    returned of what the filters left; all of them in rows with 0 < top_k <= K. 0 = none. Training
    restricts its own distribution to them, and then both sides speak of the same one.
    banned: not sampled, before any filter; not all of a row.
    """
    logits = logits.astype(jnp.float32)
    greedy = temperature <= 0
    divisor = jnp.where(greedy, 1.0, temperature)
    possible = logits if banned is None else jnp.where(banned, -jnp.inf, logits)
    scaled = possible / divisor[:, None]
    wants_filter = ((top_k > 0) | (top_p < 1)) & ~greedy
    # Sorting the vocabulary costs more than the rest together: only where some row asks for it.
    filtered = jax.lax.cond(
        wants_filter.any(), _filtered, lambda x, wants, p, k: x, scaled, wants_filter, top_p, top_k
    )
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(key, token_index, logits.shape[-1])
    tokens = _argmax(jnp.where(greedy[:, None], possible, filtered + noise))
    allowed = jnp.where(filtered == -jnp.inf, filtered, logits)
    return Sampled(
        tokens=tokens,
        logprobs=_logprob_of(logits, divisor, tokens),
        sampled_logprobs=_logprob_of(allowed, divisor, tokens),
        nan=~jnp.isfinite(logits).all(axis=-1),
        support=_largest(filtered, support) if support else None,
    )


def likeliest(
    logits: Float[Array, "S V"], temperature: Float[Array, " S"], num: int
) -> tuple[jax.Array, jax.Array]:
    """(i32[S, num] ids, f32[S, num] log-probs) of the largest logits, the largest first, as `logprobs` has them."""
    logits = logits.astype(jnp.float32)
    divisor = jnp.where(temperature <= 0, 1.0, temperature)[:, None]
    values, ids = jax.lax.top_k(logits, num)
    top = values[:, :1]
    total = jnp.exp((logits - top) / divisor).sum(axis=-1, keepdims=True)
    return ids, (values - top) / divisor - jnp.log(total)


def _largest(filtered: jax.Array, num: int) -> jax.Array:
    values, ids = jax.lax.top_k(filtered, min(num, filtered.shape[-1]))
    ids = jnp.where(values > -jnp.inf, ids, -1)
    return jnp.pad(ids, ((0, 0), (0, num - ids.shape[1])), constant_values=-1)


def sample_tiled(
    logits: Float[Array, "S V"],
    key: Int[Array, "S 2"],
    token_index: Int[Array, " S"],
    temperature: Float[Array, " S"],
    top_p: Float[Array, " S"],
    top_k: Int[Array, " S"],
    *,
    banned: Bool[Array, "S V"] | None = None,
) -> Sampled:
    """As `sample`, by other random numbers."""
    wants_filter = ((top_k > 0) | (top_p < 1)) & (temperature > 0)
    is_cut = wants_filter.any() if banned is None else wants_filter.any() | banned.any()
    filters = (wants_filter, top_p, top_k)
    # Temperatures are applied in the branches: outside, the result would be written to memory for them.
    return jax.lax.cond(
        is_cut,
        lambda: _draw_filtered(logits, key, token_index, temperature, filters, banned),
        lambda: _draw_unfiltered(logits, key, token_index, temperature),
    )


def _draw_unfiltered(logits, key, token_index, temperature) -> Sampled:
    greedy = temperature <= 0
    x = _in_tiles(logits / jnp.where(greedy, 1.0, temperature)[:, None])
    top, mass, bad = _masses(x)
    tokens, chosen = _draw(x, (top, mass), key, token_index, greedy)
    logprobs = _log_share(chosen, mass)
    return Sampled(tokens, logprobs, logprobs, bad)


def _draw_filtered(logits, key, token_index, temperature, filters, banned) -> Sampled:
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    _, mass, bad = _masses(_in_tiles(scaled))
    if banned is not None:
        scaled = jnp.where(banned, -jnp.inf, scaled)
    allowed = _in_tiles(_filtered(scaled, *filters))
    of_allowed = _masses(allowed)[:2]
    tokens, chosen = _draw(allowed, of_allowed, key, token_index, greedy)
    logprobs, sampled_logprobs = (_log_share(chosen, m) for m in (mass, of_allowed[1]))
    return Sampled(tokens, logprobs, sampled_logprobs, bad)


def _in_tiles(x: jax.Array) -> jax.Array:
    """[S, V] -> [S, tiles, V / tiles]. The outer factor, so that a split vocabulary splits the tiles."""
    return x.reshape(len(x), math.gcd(x.shape[1], MOST_TILES), -1)


def _masses(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(largest, log of the sum of exp, both f32[S, tiles]; bool[S] any not finite) of x [S, tiles, n], read once."""
    columns = (x, jnp.ones_like(x), (~jnp.isfinite(x)).astype(jnp.int32))
    top, total, bad = jax.lax.reduce(columns, NOTHING, _merge, (2,))
    return top, top + jnp.log(total), bad.max(axis=1) > 0


def _draw(x, masses, key, token_index, greedy) -> tuple[jax.Array, jax.Array]:
    """(tokens i32[S], their x): a tile by its mass, then a token of it; two draws by Gumbel-max, exact together."""
    top, mass = masses
    noisy = mass + _noise(key, token_index, 0, mass.shape[1])
    tile = _argmax(jnp.where(greedy[:, None], top, noisy))
    own = jnp.take_along_axis(x, tile[:, None, None], axis=1)[:, 0]  # [S, n]
    noisy = own + _noise(key, token_index, 1, own.shape[1])
    place = _argmax(jnp.where(greedy[:, None], own, noisy))
    return tile * own.shape[1] + place, jnp.take_along_axis(own, place[:, None], axis=1)[:, 0]


def _noise(key: jax.Array, token_index: jax.Array, draw: int, size: int) -> jax.Array:
    """f32[S, size] Gumbel noise of one of a token's draws."""
    return jax.vmap(_gumbel, in_axes=(0, 0, None, None))(key, token_index, size, draw)


def _merge(a: tuple, b: tuple) -> tuple:
    """Two parts of the vocabulary together: (top, sum of exp(x - top), bad)."""
    (top_a, total_a, bad_a), (top_b, total_b, bad_b) = a, b
    top = jnp.maximum(top_a, top_b)
    total = total_a * jnp.exp(top_a - top) + total_b * jnp.exp(top_b - top)
    return top, total, jnp.maximum(bad_a, bad_b)


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


def _gumbel(
    key_data: jax.Array, token_index: jax.Array, size: int, draw: int | None = None
) -> jax.Array:
    key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
    key = jax.random.fold_in(key, token_index)
    if draw is not None:
        key = jax.random.fold_in(key, draw)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _logprob_of(logits: jax.Array, temperature: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probs of tokens under softmax(logits / temperature), never above 0: the largest logit is taken away before
    the division, which a compiler may round in two ways where it does it twice."""
    top = logits.max(axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    total = jnp.exp((logits - top[:, None]) / temperature[:, None]).sum(axis=-1)
    return (chosen - top) / temperature - jnp.log(total)


def _log_share(chosen: jax.Array, parts: jax.Array) -> jax.Array:
    """chosen f32[S] - log(sum(exp(parts f32[S, n]))), of which it is a part: never above 0."""
    top = parts.max(axis=-1)
    share = (chosen - top) - jnp.log(jnp.exp(parts - top[:, None]).sum(axis=-1))
    return jnp.minimum(share, 0.0)  # a logit that is read twice may have been rounded in two ways


def _argmax(x: jax.Array) -> jax.Array:
    """i32[S], the lowest id of the largest value; 3 times faster on CPU than jnp.argmax. NaN rows
    mean nothing.
    """
    V = x.shape[-1]
    at_top = x == x.max(axis=-1, keepdims=True)
    return jnp.minimum(jnp.where(at_top, jnp.arange(V, dtype=jnp.int32), V).min(axis=-1), V - 1)
