"""Attention of a decode step over a paged cache: bias, rope, append in place and softmax in one Triton kernel.

A program owns one slot's one kv head: it takes the head's queries, key and value from the layer's product, writes the
new k, v to its page, starts the softmax from them (they are in registers, so that the write is waited for by nobody)
and streams the live positions before them, page by page, through shared memory. Nothing beyond a slot's length is
read; a slot that is not active reads and writes nothing. Scores are computed transposed, positions by queries, so that
the streamed side is the tall one of each product, as wgmma takes it from shared memory.
Triton is the dull way to a kernel that is bound by memory; Pallas deprecates it, and with it gone `unfit` says so.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # a JAX without it
    plgpu: Any = None

MIN_ROWS = 16  # of a product on tensor cores; a kv head's queries are padded to it
LOG2_E = 1.4426950408889634

Pair = tuple[jax.Array, jax.Array]  # k and v


@dataclass(frozen=True)
class Tuning:
    block: int = 64  # positions of a load, at most; a divisor of the page size is taken
    num_warps: int = 4
    num_stages: int = 5  # loads under way: of page ids, and of the pages that they name
    interpret: bool = False  # on CPU, for tests


def unfit(platform: str, dtype: Any, head_dim: int, page_size: int) -> str:
    """Why the kernel should not run there; "" if it should."""
    if plgpu is None:
        return "this jax has no Pallas Triton"
    if platform not in ("gpu", "cuda"):
        return f"the kernel is for gpu, the platform is {platform}"
    if jnp.dtype(dtype).itemsize != 2:
        return f"the kernel is for bfloat16 and float16, the dtype is {jnp.dtype(dtype).name}"
    if head_dim < 16 or head_dim & (head_dim - 1):
        return f"the kernel needs head_dim to be a power of 2 from 16 on, it is {head_dim}"
    if page_size % MIN_ROWS or page_size & (page_size - 1):
        return f"the kernel needs pages of {MIN_ROWS}, 32, 64, ... tokens, they have {page_size}"
    return ""


def decode_attention(
    product: jax.Array,
    bias: jax.Array | None,
    rotation: tuple[jax.Array, jax.Array],
    cache: Pair,
    where: tuple[jax.Array, jax.Array, jax.Array],
    tuning: Tuning | None = None,
) -> tuple[jax.Array, Pair]:
    """(out [S, H, Dh], the cache, in place, with the new k and v at the position of active slots).

    Args: product: [P, S, K, G + 2, Dh], a kv head's queries, its key, its value, in parts that are summed and rounded.
          bias: [K, G + 2, Dh], added and rounded.
          rotation: f32[S, Dh / 2] cosines and sines of queries and keys.  cache: k, v [P, page, K, Dh].
          where: position i32[S] of the new k, v, active bool[S] (the result of the others is their new v), and the page
          tables i32[S, N], which list a page for every position up to the new one.
    """
    _, S, K, rows, Dh = product.shape
    if tuning is None:  # few programs: one has a multiprocessor, and its memory, for itself
        tuning = Tuning(num_stages=6 if S * K <= 2 * 132 else 5)
    position, active, tables = where
    live = jnp.where(active, position, -1).astype(jnp.int32)
    cos, sin = rotation
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    inputs = [live, tables, product, *([] if bias is None else [bias]), cos, sin, *cache]
    out = jax.ShapeDtypeStruct((S, K * (rows - 2), Dh), cache[0].dtype)
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache]
    call = pl.pallas_call(
        lambda *refs: _body(refs, bias is not None, tuning),
        out_shape=[out, *like],
        grid=(K, S),  # heads of a slot side by side: they read the same pages of memory
        input_output_aliases={len(inputs) - 2: 1, len(inputs) - 1: 2},
        interpret=tuning.interpret,
        name="decode_attention",
        compiler_params=plgpu.CompilerParams(
            num_warps=tuning.num_warps, num_stages=tuning.num_stages
        ),
    )
    out, k, v = call(*inputs)
    return out, (k, v)


def _body(refs: tuple, has_bias: bool, tuning: Tuning) -> None:
    live, tables, product, *bias, cos, sin, k_cache, v_cache, out, k_out, v_out = refs
    assert len(bias) == has_bias
    slot, head = pl.program_id(1), pl.program_id(0)
    group, Dh = product.shape[3] - 2, product.shape[4]
    page_size = k_cache.shape[1]
    rows, block = max(MIN_ROWS, pl.next_power_of_2(group)), min(tuning.block, page_size)
    position = live[slot]
    new = _Rows(product, bias, (cos[slot], sin[slot]), (slot, head), out.dtype)
    queries = new.rotated(rows, group)
    k, v = new.rotated(None, group), new.load(None, group + 1)

    @pl.when(position >= 0)
    def _():
        page, place = tables[slot, lax.div(position, page_size)], lax.rem(position, page_size)
        k_out[page, place, head] = k
        v_out[page, place, head] = v

    scale = Dh**-0.5 * LOG2_E
    top = jnp.sum(queries.astype(jnp.float32) * k.astype(jnp.float32)[None], axis=1) * scale
    mixed = jnp.broadcast_to(v.astype(jnp.float32)[:, None], (Dh, rows))
    stream = _Stream(k_cache, v_cache, tables, (slot, head), queries.T, block)
    carry = (top, jnp.ones_like(top), mixed)
    before = jnp.maximum(position, 0)
    whole = lax.div(before, block)
    carry = lax.fori_loop(0, whole, lambda i, c: stream.part(i * block, c, scale), carry)
    rest = before - whole * block
    last = lambda i, c: stream.part(whole * block, c, scale, jnp.arange(block) < rest)
    _, total, mixed = lax.fori_loop(0, jnp.minimum(rest, 1), last, carry)
    result = (mixed / total[None]).astype(out.dtype)  # [Dh, rows]
    own = lax.broadcasted_iota(jnp.int32, (Dh, rows), 1)
    place = out.at[slot, head * group + own, lax.broadcasted_iota(jnp.int32, (Dh, rows), 0)]
    plgpu.store(place, result, mask=own < group)


@dataclass(frozen=True)
class _Rows:
    """Rows of one kv head's product in registers, with their bias."""

    product: Any
    bias: list
    rotation: tuple[jax.Array, jax.Array]  # f32[Dh] cosines, sines with the sign of their half
    place: tuple  # (slot, kv head)
    dtype: Any

    def load(self, rows: int | None, index: int, partner: bool = False) -> jax.Array:
        """Row `index` [Dh], or the first `index` of `rows` rows [rows, Dh], the others 0; partner: halves swapped."""
        Dh = self.product.shape[-1]
        shape = (Dh,) if rows is None else (rows, Dh)
        column = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        if partner:
            column = jnp.where(column < Dh // 2, column + Dh // 2, column - Dh // 2)
        row = index if rows is None else lax.broadcasted_iota(jnp.int32, shape, 0)
        how = {} if rows is None else {"mask": row < index, "other": 0.0}
        parts = [self.product.at[p, *self.place, row, column] for p in range(self.product.shape[0])]
        x = sum(plgpu.load(part, **how).astype(jnp.float32) for part in parts).astype(self.dtype)
        for bias in self.bias:
            add = plgpu.load(bias.at[self.place[1], row, column], **how)
            x = (x.astype(jnp.float32) + add.astype(jnp.float32)).astype(x.dtype)
        return x

    def rotated(self, rows: int | None, index: int) -> jax.Array:
        x, partner = (self.load(rows, index, p).astype(jnp.float32) for p in (False, True))
        cos, sin = self.rotation if rows is None else (r[None] for r in self.rotation)
        return (x * cos + partner * sin).astype(self.dtype)


@dataclass(frozen=True)
class _Stream:
    """Online softmax over blocks of one slot's one kv head."""

    k: Any
    v: Any
    tables: Any
    place: tuple  # (slot, kv head)
    queries: jax.Array  # [Dh, rows]
    block: int

    def part(self, start, carry, scale: float, mask=None):
        """The carry (top [rows], total [rows], mixed [Dh, rows]) with the positions [start, start + block)."""
        top, total, mixed = carry
        page_size = self.k.shape[1]
        page = self.tables[self.place[0], lax.div(start, page_size)]
        where = (page, pl.ds(lax.rem(start, page_size), self.block), self.place[1])
        how = {}
        if mask is not None:
            wide = lax.broadcast_in_dim(mask, (self.block, self.k.shape[-1]), (0,))
            how = {"mask": wide, "other": 0.0}
        keys = plgpu.load(self.k.at[where], **how)
        scores = plgpu.dot(keys, self.queries) * scale  # [block, rows]
        if mask is not None:
            scores = jnp.where(mask[:, None], scores, -1e30)
        best = jnp.maximum(top, scores.max(axis=0))
        weights, kept = jnp.exp2(scores - best[None]), jnp.exp2(top - best)
        values = plgpu.load(self.v.at[where], **how)
        mixed = mixed * kept[None] + plgpu.dot(values.T, weights.astype(values.dtype))
        return best, total * kept + weights.sum(axis=0), mixed
