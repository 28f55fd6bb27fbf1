"""Attention of a decode step over a contiguous cache, with the new k and v appended in place: one Triton kernel.

A program owns one slot's one kv head: it writes the new k, v to the cache, starts the softmax from them (they are in
registers, so that the write is waited for by nobody) and streams the live positions before them through shared memory.
Nothing beyond a slot's length is read; a slot that is not active reads and writes nothing.
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
MIN_PROGRAMS = 96  # fewer leave most multiprocessors without work
LOG2_E = 1.4426950408889634

Pair = tuple[jax.Array, jax.Array]  # k and v


@dataclass(frozen=True)
class Tuning:
    block: int = 64  # positions of a load
    num_warps: int = 4
    num_stages: int = 3  # loads under way
    interpret: bool = False  # on CPU, for tests


def unfit(platform: str, dtype: Any, head_dim: int, programs: int) -> str:
    """Why the kernel should not run there; "" if it should. programs: slots times kv heads of one device."""
    if plgpu is None:
        return "this jax has no Pallas Triton"
    if platform not in ("gpu", "cuda"):
        return f"the kernel is for gpu, the platform is {platform}"
    if jnp.dtype(dtype).itemsize != 2:
        return f"the kernel is for bfloat16 and float16, the dtype is {jnp.dtype(dtype).name}"
    if head_dim < 16 or head_dim & (head_dim - 1):
        return f"the kernel needs head_dim to be a power of 2 from 16 on, it is {head_dim}"
    if programs < MIN_PROGRAMS:
        return f"{programs} slots times kv heads are fewer than {MIN_PROGRAMS}"
    return ""


def decode_attention(
    q: jax.Array,
    new: Pair,
    cache: Pair,
    position: jax.Array,
    active: jax.Array,
    tuning: Tuning = Tuning(),
) -> tuple[jax.Array, Pair]:
    """(out [S, H, Dh], the cache, in place, with the new k and v at `position` of active slots).

    Args: q: [S, H, Dh].  new: k, v [S, K, Dh].  cache: k, v [S, T, K, Dh].  position: i32[S], of the new k, v.
          active: bool[S]; the result of the others is their new v.
    """
    S, H, Dh = q.shape
    K = cache[0].shape[2]
    rows = max(MIN_ROWS, pl.next_power_of_2(H // K))
    live = jnp.where(active, position, -1).astype(jnp.int32)
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *cache)]
    call = pl.pallas_call(
        lambda *refs: _body(refs, (H // K, rows), tuning.block),
        out_shape=like,
        grid=(S, K),
        input_output_aliases={4: 1, 5: 2},
        interpret=tuning.interpret,
        name="decode_attention",
        compiler_params=plgpu.CompilerParams(
            num_warps=tuning.num_warps, num_stages=tuning.num_stages
        ),
    )
    out, k, v = call(live, q, *new, *cache)
    return out, (k, v)


def _body(refs: tuple, sizes: tuple[int, int], block: int) -> None:
    live, q, new_k, new_v, k_cache, v_cache, out, k_out, v_out = refs
    slot, head = pl.program_id(0), pl.program_id(1)
    group, rows = sizes
    Dh = q.shape[-1]
    position = live[slot]
    own = jnp.arange(rows) < group
    own = lax.broadcast_in_dim(own, (rows, Dh), (0,))
    queries = plgpu.load(q.at[slot, pl.ds(head * group, rows)], mask=own, other=0.0)
    k, v = new_k[slot, head], new_v[slot, head]

    @pl.when(position >= 0)
    def _():
        k_out[slot, position, head] = k
        v_out[slot, position, head] = v

    scale = Dh**-0.5 * LOG2_E
    top = jnp.sum(queries.astype(jnp.float32) * k.astype(jnp.float32)[None], axis=1) * scale
    mixed = jnp.broadcast_to(v.astype(jnp.float32)[None], (rows, Dh))
    carry = (top, jnp.ones_like(top), mixed)

    def part(start, carry, mask):
        top, total, mixed = carry
        where = (slot, pl.ds(start, block), head)
        wide = None if mask is None else lax.broadcast_in_dim(mask, (block, Dh), (0,))
        other = None if mask is None else 0.0
        keys = plgpu.load(k_cache.at[where], mask=wide, other=other)
        scores = plgpu.dot(queries, keys.T) * scale
        if mask is not None:
            scores = jnp.where(mask[None], scores, -1e30)
        best = jnp.maximum(top, scores.max(axis=1))
        weights, kept = jnp.exp2(scores - best[:, None]), jnp.exp2(top - best)
        values = plgpu.load(v_cache.at[where], mask=wide, other=other)
        mixed = mixed * kept[:, None] + plgpu.dot(weights.astype(values.dtype), values)
        return best, total * kept + weights.sum(axis=1), mixed

    before = jnp.maximum(position, 0)
    whole = lax.div(before, block)
    carry = lax.fori_loop(0, whole, lambda i, c: part(i * block, c, None), carry)
    rest = before - whole * block
    last = lambda i, c: part(whole * block, c, jnp.arange(block) < rest)
    _, total, mixed = lax.fori_loop(0, jnp.minimum(rest, 1), last, carry)
    result = (mixed / total[:, None]).astype(out.dtype)
    plgpu.store(out.at[slot, pl.ds(head * group, rows)], result, mask=own)
