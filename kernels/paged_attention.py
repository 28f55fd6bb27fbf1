"""Attention of a decode step over a paged cache: one query a sequence, keys and values in pages that it may share.

The cache of a layer is k and v, each [pages, page, kv heads, head_dim] (kernels/kv.py). What is computed is listed by
`Items`, made on the host or inside the program: an item is a run of pages and the sequences that see all of it, so that
a prefix which samples of a group share is read once for all of them, and a long context is cut into parts that run
beside each other. Every (item, sequence) gives a part: the attention over these pages alone and the logarithm of its
weights' sum; `combine` makes one result of a sequence's parts.
`attend_reference` is the definition; kernels/paged_attention_hopper.py computes the same.
Must not: allocate pages, or know why sequences share them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TILE = 64  # rows of queries of an item: those of R sequences, each padded to a multiple of 8
LOG2_E = 1.4426950408889634


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Items:
    """W items of up to R = TILE / padded(G) sequences, in up to S parts a sequence; -1 is none."""

    # i32[W, 2] first and end of the visible tokens, counted from the first page
    span: jax.Array | np.ndarray
    slots: jax.Array | np.ndarray  # i32[W, R] b S + s: part s of sequence b
    pages: jax.Array | np.ndarray  # i32[W, N] page ids; only those of the span are read
    used: jax.Array | np.ndarray  # bool[B, S] whether there is such a part

    @property
    def num_parts(self) -> int:
        return self.used.shape[1]


@dataclass(frozen=True)
class Scores:
    """What a score goes through: scale * q.k, then cap * tanh(score / cap)."""

    scale: float
    soft_cap: float | None = None


def fits_tile(num_queries: int) -> bool:
    """Whether a tile is made of whole sequences with so many queries a kv head."""
    return num_queries > 0 and TILE % _rows(num_queries) == 0


def padded(num_queries: int) -> int:
    """Rows that the queries of one kv head take of a tile."""
    if not fits_tile(num_queries):
        raise ValueError(f"{num_queries} queries a kv head are not in 1..16, 25..32 or 57..64")
    return _rows(num_queries)


def _rows(num_queries: int) -> int:
    return -(-num_queries // 8) * 8


def split_items(table: jax.Array, first: jax.Array, end: jax.Array, page: int, parts: int) -> Items:
    """Every sequence by itself, its pages in `parts` equal runs; usable inside a program.

    Args: table: i32[B, N] page ids.  first, end: i32[B] visible tokens first <= t < end; none where first >= end.
    """
    B, N = table.shape
    rows = jnp.arange(B, dtype=jnp.int32)
    begin, stop = first // page, (end + page - 1) // page
    size = (jnp.maximum(stop - begin, 0) + parts - 1) // parts  # pages of a part
    part = jnp.arange(parts, dtype=jnp.int32)
    run = begin[:, None] + part * size[:, None]  # [B, S] first page of each
    longest = -(-N // parts)
    where = jnp.minimum(run[..., None] + jnp.arange(longest), N - 1)
    pages = jnp.take_along_axis(table[:, None], where, axis=2)
    low = jnp.maximum(first[:, None] - run * page, 0)
    high = jnp.minimum(end[:, None], (run + size[:, None]) * page) - run * page
    used = high > low
    span = jnp.where(used[..., None], jnp.stack([low, high], axis=-1), 0)
    slots = jnp.where(used, rows[:, None] * parts + part, -1)
    return Items(
        span.reshape(B * parts, 2).astype(jnp.int32),
        slots.reshape(B * parts, 1).astype(jnp.int32),
        pages.reshape(B * parts, longest).astype(jnp.int32),
        used,
    )


def shared_items(
    tables: Sequence[Sequence[int]], ends: Sequence[int], page: int, rows: int, run: int
) -> Items:
    """On the host: pages that sequences begin with together are read once for up to `rows` of them.

    Args: tables: page ids of each sequence.  ends: tokens of each, at least 1.  run: most pages of an item.
    """
    groups: dict[int, list[int]] = {}
    for b, table in enumerate(tables):
        groups.setdefault(int(table[0]), []).append(b)
    made: list[tuple[list[int], int, int]] = []  # sequences, first page and end token of the item
    for members in groups.values():
        for at in range(0, len(members), rows):
            together = members[at : at + rows]
            common = _common([tables[b] for b in together], [ends[b] for b in together], page)
            made += [(together, i, min(i + run, common) * page) for i in range(0, common, run)]
            for b in together:
                made += [
                    ([b], i, min((i + run) * page, ends[b]))
                    for i in range(common, -(-ends[b] // page), run)
                ]
    return _listed(made, tables, page, rows, run)


def _common(tables: Sequence[Sequence[int]], ends: Sequence[int], page: int) -> int:
    """Whole pages that all begin with; none for one sequence alone, whose pages are all its own."""
    if len(tables) == 1:
        return 0
    whole = min(end // page for end in ends)
    same = [len(set(ids)) == 1 for ids in zip(*(table[:whole] for table in tables))]
    return next((i for i, one in enumerate(same) if not one), len(same))


def _listed(
    made: Sequence[tuple[list[int], int, int]],
    tables: Sequence[Sequence[int]],
    page: int,
    rows: int,
    run: int,
) -> Items:
    num_parts = Counter(b for members, _, _ in made for b in members)
    parts = max(num_parts.values(), default=1)
    used = np.arange(parts) < np.array([num_parts[b] for b in range(len(tables))])[:, None]
    slots = np.full((len(made), rows), -1, np.int32)
    pages, span = np.zeros((len(made), run), np.int32), np.zeros((len(made), 2), np.int32)
    taken = [0] * len(tables)  # parts of each so far
    for w, (members, first, end) in enumerate(made):
        ids = tables[members[0]][first : -(-end // page)]
        pages[w, : len(ids)] = ids
        span[w, 1] = end - first * page
        slots[w, : len(members)] = [b * parts + taken[b] for b in members]
        for b in members:
            taken[b] += 1
    return Items(span, slots, pages, used)


def attend_reference(
    q: jax.Array, cache: tuple[jax.Array, jax.Array], items: Items, scores: Scores
) -> tuple[jax.Array, jax.Array]:
    """Parts (out [B, S, K, G, Dh] in q's dtype, log2 of the weights' sum f32[B, S, K, G]); 0 and -inf where unused.

    Args: q: [B, K, G, Dh].  cache: k and v, [P, page, K, Dh].
    """
    B, K, G, Dh = q.shape
    page, S = cache[0].shape[1], items.num_parts
    span, slots, pages = (jnp.asarray(x) for x in (items.span, items.slots, items.pages))
    R = slots.shape[1]
    queries = q[jnp.maximum(slots, 0) // S].astype(jnp.float32)  # [W, R, K, G, Dh]
    k, v = (x[pages].astype(jnp.float32) for x in cache)  # [W, N, page, K, Dh]
    score = jnp.einsum("wrkgd,wntkd->wrkgnt", queries, k) * scores.scale
    if scores.soft_cap is not None:
        score = scores.soft_cap * jnp.tanh(score / scores.soft_cap)
    token = jnp.arange(pages.shape[1] * page).reshape(-1, page)
    seen = (token >= span[:, :1, None]) & (token < span[:, 1:, None])  # [W, N, page]
    score = jnp.where(seen[:, None, None, None], score * LOG2_E, -jnp.inf)
    top = jnp.maximum(score.max(axis=(-2, -1)), -1e30)
    weights = jnp.exp2(score - top[..., None, None])
    total = weights.sum(axis=(-2, -1))
    v = jnp.where(seen[..., None, None], v, 0.0)  # what was never written may be anything
    out = jnp.einsum("wrkgnt,wntkd->wrkgd", weights, v) / jnp.maximum(total, 1e-30)[..., None]
    where = jnp.where(slots < 0, B * S, slots).reshape(-1)
    parts = jnp.zeros((B * S, K, G, Dh), q.dtype)
    logs = jnp.full((B * S, K, G), -jnp.inf, jnp.float32)
    parts = parts.at[where].set(out.reshape(-1, K, G, Dh).astype(q.dtype), mode="drop")
    log = (top + jnp.log2(total)).reshape(len(span) * R, K, G)
    return (
        parts.reshape(B, S, K, G, Dh),
        logs.at[where].set(log, mode="drop").reshape(B, S, K, G),
    )


def combine(parts: jax.Array, logs: jax.Array, used: jax.Array) -> jax.Array:
    """[B, K, G, Dh] of a sequence's parts, as attend gives them; 0 for one without any. Unused ones may be anything."""
    logs = jnp.where(used[..., None, None], logs, -jnp.inf)
    top = jnp.maximum(logs.max(axis=1, keepdims=True), -1e30)
    weights = jnp.exp2(logs - top)
    wide = jnp.where(used[..., None, None, None], parts.astype(jnp.float32), 0.0)
    total = jnp.maximum(weights.sum(axis=1), 1e-30)
    return ((weights[..., None] * wide).sum(axis=1) / total[..., None]).astype(parts.dtype)


def paged_attention(
    q: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    items: Items,
    scores: Scores,
    attend=attend_reference,
) -> jax.Array:
    """[B, H, Dh] for q [B, H, Dh]: attention of each sequence's query over the pages that its items list."""
    B, H, Dh = q.shape
    K = cache[0].shape[2]
    grouped = lax.reshape(q, (B, K, H // K, Dh))
    parts, logs = attend(grouped, cache, items, scores)
    return combine(parts, logs, jnp.asarray(items.used)).reshape(B, H, Dh)
