"""The traced programs of an engine, as pure functions; engine.py compiles them.

`extend` serves prefill and append: packed tokens of R requests go through the model as one [1, C]
row. Each layer writes its k, v to the pages that the request's table lists, then attends from
tiles: the packed queries of one request are cut into tiles of `tile` queries, and each tile reads
its own request's pages, masked by position. Per-tile reads cost C/tile copies of a history's KV
and no work between requests. `score` is the same with the log-probs of what follows each token.
Where all requests start at position 0 and the device has a kernel for that, the packed row attends to itself instead
(attention.py). `generate` makes several decode steps in one dispatch, layers written out, one KV buffer per layer;
where the device has kernels for a whole layer, the layers run by them (FusedAttend).
Padding never writes: its page is out of range and the scatter drops it (mode="drop").
Invariants: a token's KV and logits depend on its own request only, on CPU down to the bits:
- Not on the slot, the pages, the place in the chunk, the neighbours, the block size, how a context is cut into
  chunks, or `visible` (tests/engine; jax 0.10.2 and 0.12, float32 and bfloat16).
- XLA's matmul rounds alike for all row counts while contractions are short (256), and for all of at
  least 64 rows at 1,536; smaller chunks of wide models may round otherwise. Place never matters.
- A token's KV from a decode step and from `extend` differ by rounding (2e-6): prompts are always
  extended and samples always decoded, so only a rebuilt history holds the other kind.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels import decode_rows_hopper
from kernels.decode_rows import add_norm, fits, gated_matmul, split_matmul
from rl_jax.engine.attention import (
    ChunkAttention,
    StepAttention,
    read_pages,
    visible_positions,
)
from rl_jax.engine.sampling import likeliest, sample, sample_tiled
from rl_jax.engine.state import FINISH_CODES, Cache, DecodeState, SlotState
from rl_jax.models.attention import FusedAttend
from rl_jax.models.attention import attention as attend_tiles
from rl_jax.models.features import form_of
from rl_jax.models.model import Model
from rl_jax.settings import ModelSettings
from rl_jax.types import FinishReason

SCORED_ROWS = 64  # tokens whose logits are there at once


class Scores(NamedTuple):
    """How likely the next token of each of C packed ones was."""

    logprobs: jax.Array  # f32[C] at temperature 1
    ranks: jax.Array  # i32[C] 1 + how many are likelier
    nan: jax.Array  # bool[C] the logits held a NaN or an infinity
    ids: jax.Array  # i32[C, A] the likeliest, best first
    likely: jax.Array  # f32[C, A] their log-probs


def extend(
    model: Model,
    params: dict[str, jax.Array],
    kv: Cache,
    tokens: jax.Array,  # i32[C]
    segment: jax.Array,  # i32[C] -1 padding
    position: jax.Array,  # i32[C]
    lengths: jax.Array,  # i32[R]
    tables: jax.Array,  # i32[R, N] pages of each request; NO_PAGE = not there, and not written
    *,
    visible: int,  # pages a query may see; at least 1 + the page of the highest position
    tile: int,
    fresh: ChunkAttention
    | None = None,  # runs in place of tiles; every request starts at position 0
) -> Cache:
    """The cache with the k, v of the packed tokens written.

    Tokens of one segment are contiguous and in order.
    """
    packed = tokens, segment, position, lengths, tables
    # The hidden states are not used, so XLA drops the last layer's attention and mlp.
    return _extended(model, params, kv, packed, visible=visible, tile=tile, fresh=fresh)[0]


def score(
    model: Model,
    params: dict[str, jax.Array],
    kv: Cache,
    packed: tuple[jax.Array, ...],  # tokens, segment, position, lengths, tables, as of extend
    targets: jax.Array,  # i32[C] what follows each token in its context
    *,
    visible: int,
    tile: int,
    likely: int,  # tokens to tell of each place
) -> tuple[Cache, Scores]:
    """As extend, and how likely what follows each packed token is; of padding it means nothing."""
    new_kv, hidden = _extended(model, params, kv, packed, visible=visible, tile=tile, fresh=None)
    rows = math.gcd(len(targets), SCORED_ROWS)  # logits of a whole chunk may not fit

    def of_rows(x: tuple[jax.Array, jax.Array]) -> Scores:
        logits = model.logits(params, x[0]).astype(jnp.float32)  # [rows, V]
        own = jnp.take_along_axis(logits, x[1][:, None], axis=1)
        ids, logprobs = likeliest(logits, jnp.ones(rows), likely)
        top = logits.max(axis=1, keepdims=True)
        total = jnp.log(jnp.exp(logits - top).sum(axis=1))
        nan = ~jnp.isfinite(logits).all(axis=1)
        ranks = (logits > own).sum(axis=1, dtype=jnp.int32) + 1
        return Scores((own - top)[:, 0] - total, ranks, nan, ids, logprobs)

    pieces = hidden[0].reshape(-1, rows, hidden.shape[-1]), targets.reshape(-1, rows)
    scores = jax.lax.map(of_rows, pieces)
    return new_kv, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), scores)


def _extended(
    model: Model,
    params: dict[str, jax.Array],
    kv: Cache,
    packed: tuple[jax.Array, ...],
    *,
    visible: int,
    tile: int,
    fresh: ChunkAttention | None,
) -> tuple[Cache, jax.Array]:
    """(the cache of extend, hidden states [1, C, D])"""
    tokens, segment, position, lengths, tables = packed
    num_pages, page_size = kv[0][0].shape[:2]
    real = segment >= 0
    page = tables[segment, position // page_size]  # [C]
    # No two tokens have one place, those that are dropped neither: unique writes of 16 bits need no atomics.
    nowhere = num_pages + jnp.arange(segment.shape[0])
    place = jnp.where(real & (page >= 0), page, nowhere), position % page_size
    write = {"mode": "drop", "unique_indices": True}
    new_kv = list(kv)
    if fresh is None:
        sizes = (page_size, tile)
        of_cache = tiles(model.settings, segment, position, lengths, tables[:, :visible], sizes)
    else:
        of_row = fresh(segment, lengths.shape[0])

    def attend(layer, q, k, v):
        k_cache, v_cache = new_kv[layer]
        k_cache = k_cache.at[place].set(k[0], **write)
        v_cache = v_cache.at[place].set(v[0], **write)
        new_kv[layer] = (k_cache, v_cache)
        return of_cache(layer, q, k_cache, v_cache) if fresh is None else of_row(layer, q, k, v)

    hidden = model.hidden(params, tokens[None], position[None], attend)
    return tuple(new_kv), hidden


def tiles(
    settings: ModelSettings,
    segment: jax.Array,
    position: jax.Array,
    lengths: jax.Array,
    tables: jax.Array,  # i32[R, visible]
    sizes: tuple[int, int],  # tokens of a page, queries of a tile
) -> Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]:
    """(layer, q [1, C, H, Dh], the cache's k and v) -> [1, C, H, Dh], tile by tile."""
    page_size, tile = sizes
    of_tile, of_token = tile_index(segment, lengths, tile)  # [N, tile], [C]
    tile_position = position.at[of_tile].get(mode="fill", fill_value=-1)  # [N, tile]
    owner = segment.at[of_tile[:, 0]].get(mode="fill", fill_value=0)  # [N]
    tile_table = tables[jnp.maximum(owner, 0)]  # [N, visible]
    last = tile_position.max(axis=1)  # [N]
    forms = [form_of(settings, layer) for layer in range(settings.num_layers)]
    masks = {  # [N, tile, visible * page_size]
        window: visible_positions(tile_position, tables.shape[1] * page_size, window)
        for window in sorted({form.window for form in forms})
    }

    def attend(layer, q, k_cache, v_cache):
        form = forms[layer]
        q_tiles = q[0].at[of_tile].get(mode="fill", fill_value=0)  # [N, tile, H, Dh]
        k_tiles, v_tiles = read_pages((k_cache, v_cache), tile_table, last)
        out = attend_tiles(q_tiles, k_tiles, v_tiles, masks[form.window], form)
        out = out.reshape(-1, *out.shape[2:])  # [N, tile, H, Dh] -> [N * tile, H, Dh]
        return out.at[of_token].get(mode="fill", fill_value=0)[None]

    return attend


def tile_index(segment: jax.Array, lengths: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """Where packed tokens stand in tiles that never mix segments.

    Returns: (i32[N, tile] packed index of each tile place, C where none; i32[C] flat tile place of
    each packed token, N * tile for padding). N = C / tile + R covers every packing.
    """
    C, R = segment.shape[0], lengths.shape[0]
    num_tiles = -(-C // tile) + R
    first_token = jnp.cumsum(lengths) - lengths  # [R]
    tiles_each = -(-lengths // tile)
    first_tile = jnp.cumsum(tiles_each) - tiles_each  # [R]
    rank = jnp.arange(C) - first_token[segment]  # place within the segment
    place = first_tile[segment] * tile + rank
    place = jnp.where(segment >= 0, place, num_tiles * tile)
    of_tile = jnp.full((num_tiles * tile,), C, jnp.int32)
    of_tile = of_tile.at[place].set(jnp.arange(C, dtype=jnp.int32), mode="drop")
    return of_tile.reshape(num_tiles, tile), place


@dataclass(frozen=True)
class Step:
    """How a decode step is computed, besides the model."""

    attention: StepAttention
    tiled_sampling: (
        bool  # one pass over tiles of the vocabulary, as suits a GPU; else what suits a CPU
    )
    count: int  # steps of one dispatch
    context: int  # most tokens of a slot
    support: int = 0  # ids that come back of what each token was sampled from
    likely: int = 0  # tokens that come back of those likeliest in each one's place


def generate(
    model: Model,
    params: dict[str, jax.Array],
    state: DecodeState,
    tables: jax.Array,
    held: jax.Array | None = None,  # i32[S]
    *,
    step: Step,
) -> tuple[DecodeState, tuple[jax.Array | None, ...]]:
    """`step.count` decode steps of all active slots, whose pages, also of what they will write, are tables i32[S, N].
    held: of each slot the token index below which its stop tokens are not sampled; None: of all 0, another program.

    Returns: the new state and (tokens i32[S, k], logprobs f32[S, k], sampled_logprobs f32[S, k],
    valid bool[S, k], finish i8[S], slot_epoch i32[S], nan bool[S], support i32[S, k, K] or None,
    likely (i32[S, k, A], f32[S, k, A]) or None).
    """
    S = state.slots.active.shape[0]
    carry = (state.kv, state.slots, jnp.zeros(S, jnp.int8), jnp.zeros(S, bool))
    # Only `sample` gives the support.
    tiled = step.tiled_sampling and not step.support
    draw = sample_tiled if tiled else partial(sample, support=step.support)

    def one(carry, _):
        kv, slots, finish, nan = carry
        kv, logits = decode_step(model, params, kv, slots, tables, step.attention)
        s = slots
        numbers = (s.key, s.token_index, s.temperature, s.top_p, s.top_k)
        out = draw(logits, *numbers, **_bans(s, held, logits.shape[1]))
        slots, ended, valid = advance(slots, out.tokens, out.nan, context=step.context)
        nan |= s.active & out.nan
        likely = likeliest(logits, s.temperature, step.likely) if step.likely else None
        made = (*out[:3], valid, out.support, likely)
        return (kv, slots, jnp.maximum(finish, ended), nan), made

    (kv, slots, finish, nan), made = jax.lax.scan(one, carry, None, length=step.count)
    made = jax.tree.map(lambda x: x.swapaxes(0, 1), made)  # [k, S] -> [S, k]
    *per_token, ids, likely = made
    block = (*per_token, finish, state.slots.epoch, nan, ids, likely)
    return DecodeState(kv, slots), block


def _bans(slots: SlotState, held: jax.Array | None, vocab_size: int) -> dict[str, jax.Array]:
    """The draw's `banned`, where anything may be held off."""
    if held is None:
        return {}
    stops = slots.stop_token_ids  # [S, num_stop]
    holds = (slots.token_index < held)[:, None] & (stops >= 0)
    ids = jnp.where(holds, stops, vocab_size)  # out of range = no token
    none = jnp.zeros((len(stops), vocab_size), bool)
    return {"banned": none.at[jnp.arange(len(stops))[:, None], ids].set(True, mode="drop")}


def decode_step(
    model: Model,
    params: dict[str, jax.Array],
    kv: Cache,
    slots: SlotState,
    tables: jax.Array,
    attention: StepAttention,
) -> tuple[Cache, jax.Array]:
    """Run each slot's last token: the cache with its k, v (active slots only), logits f32[S, V]."""
    position = slots.context_length - 1
    where = (position, slots.active, tables)
    new_kv = list(kv)

    def attend(layer, q, k, v):
        new = (k[:, 0], v[:, 0])
        form = form_of(model.settings, layer)
        out, new_kv[layer] = attention.of_heads(q[:, 0], new, new_kv[layer], where, form)
        return out[:, None]

    def of_product(layer, product, bias, angles):
        rotation = (angles[0][:, 0], angles[1][:, 0])
        assert attention.of_product is not None
        out, new_kv[layer] = attention.of_product(product, bias, rotation, new_kv[layer], where)
        return out

    if attention.of_product is not None:
        how = {"interpret": attention.interpret, "rows": attention.rows}
        attend = FusedAttend(
            attend,
            of_product,
            product=partial(split_product, **how),
            gated=partial(gated_product, **how),
            add_norm=partial(add_norm, interpret=attention.interpret),
        )
    hidden = model.hidden(params, slots.last_token[:, None], position[:, None], attend)
    return tuple(new_kv), model.logits(params, hidden[:, 0])


Rows = decode_rows_hopper.Hopper | None


def split_product(x: jax.Array, w: jax.Array, *, interpret: bool, rows: Rows) -> jax.Array:
    """x @ w in parts, by the kernel for many rows or for few; else in one part by XLA."""
    if rows is not None:
        return decode_rows_hopper.split_matmul(x, w, rows)
    if fits(x.shape, w.shape[1]):
        return split_matmul(x, w, interpret=interpret)
    return (x @ w)[None]


def gated_product(x: jax.Array, w: jax.Array, *, interpret: bool, rows: Rows) -> jax.Array:
    """FusedAttend.gated, by the kernel for many rows, for which w lies as Join.rows_order says, or for few."""
    if rows is not None:
        return decode_rows_hopper.gated_matmul(x, jnp.transpose(w, (1, 2, 0)), rows)
    if fits(x.shape, w.shape[2]):
        return gated_matmul(x, w, interpret=interpret)
    both = jnp.einsum("sd,dcf->scf", x, w)
    return jax.nn.silu(both[:, 0]) * both[:, 1]


def advance(
    slots: SlotState, tokens: jax.Array, nan: jax.Array, *, context: int
) -> tuple[SlotState, jax.Array, jax.Array]:
    """Account for one sampled token per active slot.

    Of several reasons to end the first of eos, stop, length, context holds; non-finite logits end
    as error, without token.
    Returns: (slots, i8[S] finish code or 0, bool[S] whether the token is real).
    """
    s = slots
    valid = s.active & ~nan
    length = s.context_length + valid
    index = s.token_index + valid
    hit = tokens[:, None] == s.stop_token_ids  # [S, num_stop]; padding -1 is no token
    finish = jnp.zeros(tokens.shape, jnp.int8)
    reasons = [
        (length >= context, FinishReason.CONTEXT),
        (index >= s.max_new_tokens, FinishReason.LENGTH),
        (hit.any(axis=-1), FinishReason.STOP),
        (hit[:, 0], FinishReason.EOS),
        (nan, FinishReason.ERROR),
    ]
    for holds, reason in reasons:  # weakest first
        finish = jnp.where(holds, jnp.int8(FINISH_CODES[reason]), finish)
    finish = jnp.where(s.active, finish, jnp.int8(0))
    slots = replace(
        s,
        last_token=jnp.where(valid, tokens, s.last_token),
        context_length=length,
        token_index=index,
        active=s.active & (finish == 0),
    )
    return slots, finish, valid


def insert_pages(kv: Cache, source: Cache, pages: jax.Array) -> Cache:
    """Write page i of `source` to page pages[i]; one out of range is not written."""
    where = jnp.where(pages >= 0, pages, kv[0][0].shape[0])
    return jax.tree.map(lambda into, x: into.at[where].set(x, mode="drop"), kv, source)


def read_pages_of(kv: Cache, pages: jax.Array) -> Cache:
    """Copies of the pages i32[n], in order; of NO_PAGE some other page."""
    return jax.tree.map(lambda x: x.at[pages].get(mode="clip"), kv)


def copy_pages(kv: Cache, source: jax.Array, target: jax.Array) -> Cache:
    """Write a copy of page source[i] to page target[i]; NO_PAGE as target = no copy."""
    return insert_pages(kv, read_pages_of(kv, source), target)


def arm(slots: SlotState, rows: jax.Array, values: SlotState) -> SlotState:
    """Write each field of `values` (leading axis R) to rows i32[R]; out of range = dropped."""
    return jax.tree.map(lambda into, x: into.at[rows].set(x, mode="drop"), slots, values)


def disarm(slots: SlotState, rows: jax.Array) -> SlotState:
    """Stop the given slots; their KV stays."""
    return replace(slots, active=slots.active.at[rows].set(False, mode="drop"))
