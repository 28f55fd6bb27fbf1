"""Attention over pages as a Hopper kernel: one block an item and kv head, pages through TMA into a ring, wgmma.

Bound by memory: a block has one warpgroup, which asks for a page as soon as its slot of the ring is read, and several
blocks share a multiprocessor, so that loads are always under way. Queries are the 64 rows of a product whatever their
number; with few of them most rows are idle, which costs nothing here, and with a shared prefix they are those of
several sequences. Rows without a sequence compute on what shared memory held and are never stored.
Life of a block: 1 the item's header to shared memory; queries, and the first pages. 2 each page: scores, softmax with a
running maximum, product with values. 3 the result takes the queries' place in shared memory and goes out, a copy for
each sequence, with log2 of its weights' sum.
Must not: read a page that the item's span does not reach.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.paged_attention import LOG2_E, TILE, Items, Scores, fits_tile, padded

HEADER = 2  # first and end of the span, before the slots
LINE = 128  # numbers of a header's line; a copy may have 256 lines


@dataclass(frozen=True)
class Tuning:
    key_stages: int = 2  # pages of keys that a block holds or waits for
    value_stages: int = 2
    # weights go through shared memory: the interpreter takes none from registers
    stages_weights: bool = False
    interpret: Any = None  # plgpu.InterpretGPUParams() on CPU


def unfit(dtype: Any, head_dim: int, num_queries: int, page: int) -> str:
    """Why the kernel should not run; "" if it should. num_queries: of one kv head."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the kernel is for bfloat16, the dtype is {jnp.dtype(dtype).name}"
    if head_dim not in (64, 128, 256):
        return f"the kernel needs head_dim 64, 128 or 256, it is {head_dim}"
    if page % 64:
        return f"the kernel needs pages of a multiple of 64 tokens, they have {page}"
    if not fits_tile(num_queries):
        return f"{num_queries} queries a kv head do not divide a tile of {TILE}"
    return ""


# Jitted so that the layers of a program share one, which compiles once.
@partial(jax.jit, static_argnames=("scores", "tuning"))
def attend(
    q: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    items: Items,
    scores: Scores,
    tuning: Tuning = Tuning(),
) -> tuple[jax.Array, jax.Array]:
    """As attend_reference; unused parts hold anything."""
    B, K, G, Dh = q.shape
    page, rows = cache[0].shape[1], padded(G)
    R, S = TILE // rows, items.num_parts
    header = _header(items, R)
    body = _Body(page, rows, R, S, scores, (tuning.key_stages, tuning.value_stages))
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    ring = lambda stages: plgpu.SMEM((stages, page, Dh), jnp.bfloat16, transforms=tiled)
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((B * S, K, rows, Dh), jnp.bfloat16),
            jax.ShapeDtypeStruct((B * S, K, rows), jnp.float32),
        ],
        grid=(K, header.shape[0]),
        grid_names=("head", "item"),
        scratch_types=[
            plgpu.SMEM(header.shape[1:], jnp.int32),
            plgpu.SMEM((TILE, Dh), jnp.bfloat16, transforms=tiled),
            ring(tuning.key_stages),
            ring(tuning.value_stages),
            plgpu.SMEM((TILE,), jnp.float32),
            *([plgpu.SMEM((TILE, page), jnp.bfloat16, transforms=tiled)] * tuning.stages_weights),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=R),
            plgpu.Barrier(num_arrivals=1, num_barriers=tuning.key_stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=tuning.value_stages),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if tuning.interpret is None else {"interpret": tuning.interpret}),
    )
    queries = jnp.pad(q, ((0, 0), (0, 0), (0, rows - G), (0, 0)))
    out, logs = kernel(queries, *cache, header)
    return (
        out.reshape(B, S, K, rows, Dh)[:, :, :, :G],
        logs.reshape(B, S, K, rows)[..., :G],
    )


def _header(items: Items, num_rows: int) -> jax.Array:
    """i32[W, lines, LINE]: the span, the slots, the pages."""
    span, slots, pages = (jnp.asarray(x) for x in (items.span, items.slots, items.pages))
    if slots.shape[1] > num_rows:
        raise ValueError(f"items hold {slots.shape[1]} sequences, a tile only {num_rows}")
    slots = jnp.pad(slots, ((0, 0), (0, num_rows - slots.shape[1])), constant_values=-1)
    header = jnp.concatenate([span, slots, pages], axis=1)
    whole = jnp.pad(header, ((0, 0), (0, -header.shape[1] % LINE)))
    return whole.reshape(len(whole), -1, LINE)


@dataclass(frozen=True)
class _Body:
    page: int
    rows: int  # of a tile that one sequence takes
    num_rows: int  # sequences of a tile
    parts: int
    scores: Scores
    stages: tuple[int, int]  # of keys, of values

    def __call__(self, q, k, v, items, out, logs, header, queries, keys, values, tops, *more):
        *staged, told, asked, has_key, has_value = more
        head, item = lax.axis_index("head"), lax.axis_index("item")
        plgpu.copy_gmem_to_smem(items.at[item], header, told)
        plgpu.barrier_wait(told)
        first, end = header[0, 0], header[0, 1]
        steps = lax.div(end + (self.page - 1), jnp.int32(self.page))

        def load(array, ring, barrier, step):
            slot = lax.rem(step, jnp.int32(ring.shape[0]))
            at = HEADER + self.num_rows + step
            where = header[lax.div(at, jnp.int32(LINE)), lax.rem(at, jnp.int32(LINE))]
            plgpu.copy_gmem_to_smem(array.at[where, :, head], ring.at[slot], barrier.at[slot])

        for row in range(self.num_rows):
            sequence = lax.div(lax.max(header[0, HEADER + row], 0), jnp.int32(self.parts))
            place = queries.at[pl.ds(row * self.rows, self.rows)]
            plgpu.copy_gmem_to_smem(q.at[sequence, head], place, asked)

        for i in range(max(self.stages)):
            early = jnp.int32(i)
            if i < self.stages[0]:
                pl.when(early < steps)(lambda early=early: load(k, keys, has_key, early))
            if i < self.stages[1]:
                pl.when(early < steps)(lambda early=early: load(v, values, has_value, early))
        plgpu.barrier_wait(asked)

        def step(i, carry):
            slot = lax.rem(i, jnp.int32(self.stages[0]))
            plgpu.barrier_wait(has_key.at[slot])
            score = self._scores(queries, keys.at[slot], i, first, end)
            next_key, next_value = (i + stages for stages in self.stages)
            plgpu.commit_smem()  # all four warps have read it: none lags a whole phase of a barrier
            pl.when(next_key < steps)(lambda: load(k, keys, has_key, next_key))
            slot = lax.rem(i, jnp.int32(self.stages[1]))
            carry, weights = self._softmax(score, carry)
            plgpu.barrier_wait(has_value.at[slot])
            is_cut = (i == steps - 1) & (end < steps * self.page)
            pl.when(is_cut)(lambda: self._clear(values.at[slot], end - i * self.page))
            if staged:
                staged[0][...] = weights
                plgpu.commit_smem()
                weights = staged[0]
            carry = self._add(carry, weights, values.at[slot])
            plgpu.commit_smem()
            pl.when(next_value < steps)(lambda: load(v, values, has_value, next_value))
            return carry

        total, top, mass = lax.fori_loop(0, steps, step, self._start(queries.shape))
        queries[...] = (total / lax.broadcast_in_dim(mass, total.shape, (0,))).astype(jnp.bfloat16)
        tops[...] = top + jnp.log(mass) * LOG2_E
        plgpu.commit_smem()
        for row in range(self.num_rows):
            slot, mine = header[0, HEADER + row], pl.ds(row * self.rows, self.rows)

            @pl.when(slot >= 0)
            def _(slot=slot, mine=mine):
                plgpu.copy_smem_to_gmem(queries.at[mine], out.at[slot, head])
                plgpu.copy_smem_to_gmem(tops.at[mine], logs.at[slot, head])

        plgpu.wait_smem_to_gmem(0)

    def _start(self, shape):
        by_row = plgpu.Layout.WGMMA.reduce(1)
        full = lambda size, value, layout: plgpu.layout_cast(
            jnp.full(size, value, jnp.float32), layout
        )
        return (
            full(shape, 0.0, plgpu.Layout.WGMMA),
            full(shape[:1], -jnp.inf, by_row),
            full(shape[:1], 0.0, by_row),
        )

    def _scores(self, queries, keys, step, first, end):
        """f32[TILE, page] in units of log2, -inf outside the span."""

        def product(total):
            plgpu.wgmma(total, queries, keys.transpose((1, 0)))
            return total[...]

        shape = (TILE, self.page)
        score = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32)) * self.scores.scale
        if (cap := self.scores.soft_cap) is not None:
            score = cap * jnp.tanh(score / cap)
        token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        token = token + step * self.page
        return jnp.where((token >= first) & (token < end), score * LOG2_E, -jnp.inf)

    def _softmax(self, score, carry):
        total, top, mass = carry
        higher = jnp.maximum(top, score.max(axis=1))
        shrink = jnp.exp2(top - higher)
        weights = jnp.exp2(score - lax.broadcast_in_dim(higher, score.shape, (0,)))
        total = total * lax.broadcast_in_dim(shrink, total.shape, (0,))
        return (total, higher, mass * shrink + weights.sum(axis=1)), weights.astype(jnp.bfloat16)

    def _clear(self, values, num_live):
        """0 in the rows from num_live on: a weight of 0 does not undo what is not finite, and nobody wrote them."""
        row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
        held = plgpu.layout_cast(values[...], plgpu.Layout.WGMMA)
        values[...] = jnp.where(row < num_live, held, jnp.zeros_like(held))
        plgpu.commit_smem()

    def _add(self, carry, weights, values):
        def product(sums):
            plgpu.wgmma(sums, weights, values)
            return sums[...]

        total, top, mass = carry
        return total + pl.run_scoped(product, plgpu.ACC(total.shape, jnp.float32)), top, mass
