"""Causal grouped-query attention inside the segments of packed rows, forwards and backwards, on Hopper and TPU.

    out[b, t, h] = sum_s softmax_s(q[b, t, h] . k[b, s, h // G] / sqrt(Dh)) v[b, s, h // G]

over s <= t of the same segment, G = H / K. A segment is a run of columns with the same id above 0, whole in one row and
in time order; id 0 is padding, whose outputs and gradients are 0 and whose inputs may be anything.
Kernels: "cudnn" (cudnn_attention.py: one ragged batch of sequences; work outside of the segments is skipped), "splash"
(JAX's TPU kernel with segment ids). Both save one float a query and head, and no scores.
Invariants: any number of segments is computed by one program. cuDNN takes a fixed number of sequences a call, and empty
ones cost time, so a call takes `max_segments` a row on average, and a loop whose trip count is data takes what is left.
Where no more are possible than a call takes there is no loop, and so no wait of the host for its count in each layer.
Life of a cudnn call: 1 `find_segments`, once for all layers. 2 forward per group of sequences; its log-sum-exps, padded
to [N, H, T], are gathered to [B, T, H]. 3 backward spreads them again.
Must not: query a device; hold scores; average.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels import cudnn_attention

KERNELS = ("cudnn", "splash")
SAVED = "attention"  # name, for checkpoint policies, of what forward leaves to backward
MAX_SEGMENTS = 16  # a row and call, on average: see benchmarks/README.md for what empty ones cost
LANES = 128  # of a TPU register; splash wants head_dim and row length in multiples of it


@dataclass(frozen=True)
class Split:
    """How rows lie on a mesh: over `batch` axes, heads over `heads` axes."""

    mesh: Mesh
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ragged:
    """A kernel over sequences of any length; the contract is that of cudnn_attention.py."""

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


CUDNN = Ragged(cudnn_attention.forward, cudnn_attention.backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Where the segments of rows [B, T] lie. Numbers count over all rows, in order."""

    ids: jax.Array  # i32[B, T] as given
    number: jax.Array  # i32[B, T] of the token's segment; -1 on padding
    position: jax.Array  # i32[B, T] of the token in its segment
    starts: jax.Array  # i32[most] column in the flattened rows; B * T where there is no segment
    lengths: jax.Array  # i32[most]; 0 where there is no segment
    count: jax.Array  # i32[]


def find_segments(ids: jax.Array, most: int | None = None) -> Segments:
    """most: segments of all rows together, if fewer are known than B * T; more would be lost."""
    B, T = ids.shape
    most = B * T if most is None else min(most, B * T)
    used = ids > 0
    before = jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]
    first = (used & (ids != before)).reshape(-1)
    number = jnp.cumsum(first, dtype=jnp.int32) - 1
    starts = jnp.nonzero(first, size=most, fill_value=B * T)[0].astype(jnp.int32)
    # A token without a segment counts for number B * T, which is dropped.
    owner = jnp.where(used.reshape(-1), number, B * T)
    lengths = jnp.zeros(most, jnp.int32).at[owner].add(1, mode="drop")
    position = jnp.arange(B * T, dtype=jnp.int32) - starts[jnp.maximum(number, 0)]
    return Segments(
        ids,
        jnp.where(used, number.reshape(B, T), -1),
        jnp.where(used, position.reshape(B, T), 0),
        starts,
        lengths,
        first.sum(dtype=jnp.int32),
    )


def unfit(kernel: str, platform: str, capability: str, dtype: Any, head_dim: int) -> str:
    """Why this kernel cannot run there; "" if it can. platform and capability: of a jax device ("" = it has none)."""
    dtype = jnp.dtype(dtype)
    if kernel == "splash":
        return (
            "" if platform == "tpu" else f"splash attention is for tpu, the platform is {platform}"
        )
    if platform not in ("gpu", "cuda"):
        return f"cuDNN attention is for gpu, the platform is {platform}"
    if float(capability or 0) < 9.0:
        return f"cuDNN takes packed rows from compute capability 9.0 on, this is {capability}"
    if dtype.itemsize != 2:
        return f"cuDNN attention is for bfloat16 and float16, the dtype is {dtype.name}"
    if head_dim % 8 or head_dim > 128:
        return f"cuDNN attention needs head_dim in multiples of 8 up to 128, it is {head_dim}"
    return ""


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    kernel: str | Ragged = "cudnn",
    max_segments: int = MAX_SEGMENTS,
    split: Split | None = None,
) -> jax.Array:
    """[B, T, H, Dh] in q.dtype.

    Args:    q: [B, T, H, Dh].  k, v: [B, T, K, Dh].  segments: of ids [B, T], from find_segments.
             kernel: of KERNELS.  max_segments: segments a row that one call of a ragged kernel takes, on average.
             split: of global arrays on a mesh, under jit; B and K must divide by their axes.
    Raises:  ValueError for shapes that do not fit, or an unknown kernel.
    """
    _check(q, k, v, segments, kernel)
    if split is None:
        return _attend(q, k, v, segments.ids, segments, kernel=kernel, max_segments=max_segments)
    rows, ids = P(split.batch, None, split.heads, None), P(split.batch, None)
    most = segments.starts.size  # of all shards, so of each
    attend = partial(_attend, segments=most, kernel=kernel, max_segments=max_segments)
    return jax.shard_map(
        attend, mesh=split.mesh, in_specs=(rows, rows, rows, ids), out_specs=rows, check_vma=False
    )(q, k, v, segments.ids)


def packed_attention_ref(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """The same in plain jnp, holding [B, K, G, T, T] scores; float64 if an input is."""
    B, T, H, Dh = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    used = (ids > 0)[..., None, None]
    q, k, v = (jnp.where(used, x, 0).astype(wide) for x in (q, k, v))
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, k.shape[2], -1, Dh), k) * Dh**-0.5
    visible = (ids[:, :, None] == ids[:, None, :]) & jnp.tri(T, dtype=bool)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf))
    return jnp.where(used, jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(q.shape), 0)


def _check(q, k, v, segments: Segments, kernel: str | Ragged) -> None:
    (B, T, H, Dh), K = q.shape, k.shape[2]
    if k.shape != (B, T, K, Dh) or v.shape != k.shape or H % K:
        raise ValueError(f"q {q.shape} does not fit k {k.shape} and v {v.shape}: [B, T, heads, Dh]")
    if segments.ids.shape != (B, T):
        raise ValueError(f"segments are of rows {segments.ids.shape}, q has {(B, T)}")
    if not isinstance(kernel, Ragged) and kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is unknown; one of {', '.join(KERNELS)}")


def _attend(q, k, v, ids, segments: Segments | int, *, kernel, max_segments: int) -> jax.Array:
    """On one device. segments: of ids, or how many there are at most."""
    used = (ids > 0)[..., None, None]
    q, k, v = (jnp.where(used, x, 0) for x in (q, k, v))  # a NaN in padding must reach no sum
    if kernel == "splash":
        return jnp.where(used, _splash(q, k, v, ids), 0)
    ragged = CUDNN if kernel == "cudnn" else kernel
    segments = find_segments(ids, segments) if isinstance(segments, int) else segments
    return _ragged_attention(
        ragged, max(max_segments, 2), q, k, v, segments
    )  # one is no ragged call


# --- a ragged kernel, group of sequences by group --------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ragged_attention(ragged: Ragged, max_segments: int, q, k, v, segments: Segments):
    return _forward(ragged, max_segments, q, k, v, segments)[0]


def _forward(ragged: Ragged, max_segments: int, q, k, v, segments: Segments):
    size = q.shape[0] * max_segments

    def add(group, kept):
        lengths, starts, inside = _group(segments, group, size)
        out, stats = ragged.forward(q, k, v, lengths, starts)
        # [N, H, T] by position -> [B, T, H] by column
        index = jnp.where(inside, segments.number - group * size, 0)
        return _where(inside, (out, stats[index, :, segments.position]), kept)

    empty = jnp.zeros_like(q), jnp.zeros(q.shape[:3], jnp.float32)
    out, lse = _over_groups(add, empty, segments, size)
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return out, (q, k, v, out, lse, segments)


def _backward(ragged: Ragged, max_segments: int, saved, of_out):
    q, k, v, out, lse, segments = saved
    B, T, H, _ = q.shape
    size = B * max_segments
    by_column = lse.reshape(B * T, H)

    def add(group, kept):
        lengths, starts, inside = _group(segments, group, size)
        columns = starts[:, None] + jnp.arange(T)  # [N, T]
        stats = by_column.at[columns].get(mode="fill", fill_value=0).swapaxes(1, 2)  # [N, H, T]
        found = ragged.backward(q, k, v, (out, stats), of_out, (lengths, starts))
        return _where(inside, found, kept)

    empty = jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    return *_over_groups(add, empty, segments, size), None


_ragged_attention.defvjp(_forward, _backward)


def _over_groups(add: Callable, empty: tuple, segments: Segments, size: int) -> tuple:
    """add over groups of `size` sequences: the first is there in any case, the others only if the data has them."""
    first = add(0, empty)
    most = -(-segments.starts.size // size)
    if most == 1:
        return first
    used = jnp.clip(-(-segments.count // size), 1, most)
    return lax.fori_loop(1, used, add, first)


def _group(segments: Segments, group, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(lengths [size], starts [size], tokens [B, T] that are theirs) of sequences group * size onwards."""
    pad = (0, -segments.starts.size % size)
    at = group * size
    lengths = lax.dynamic_slice_in_dim(jnp.pad(segments.lengths, pad), at, size)
    starts = lax.dynamic_slice_in_dim(
        jnp.pad(segments.starts, pad, constant_values=segments.ids.size), at, size
    )
    inside = (segments.number >= at) & (segments.number < at + size)
    return lengths, starts, inside


def _where(inside: jax.Array, new: tuple, old: tuple) -> tuple:
    return tuple(
        jnp.where(inside.reshape(inside.shape + (1,) * (a.ndim - 2)), a, b)
        for a, b in zip(new, old, strict=True)
    )


# --- TPU -------------------------------------------------------------------------------------------------------------


def _splash(q, k, v, ids: jax.Array, interpret: bool = False) -> jax.Array:
    """Heads and rows padded to whole registers: zeros of head_dim add nothing, padded columns are a segment apart."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    B, T, H, Dh = q.shape
    rows, width = -T % LANES, -Dh % LANES
    q = q * Dh**-0.5
    q, k, v = (
        jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, width))).swapaxes(1, 2) for x in (q, k, v)
    )
    ids = jnp.pad(ids, ((0, 0), (0, rows)))
    block = next(b for b in (512, 256, 128) if (T + rows) % b == 0)
    sizes = splash.BlockSizes(*[block] * 8)
    mask = splash.MultiHeadMask([splash.CausalMask((T + rows, T + rows))] * H)
    attend = splash.make_splash_mha(
        mask,
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        residual_checkpoint_name=SAVED,
        interpret=interpret,
    )
    out = jax.vmap(lambda q, k, v, s: attend(q, k, v, splash.SegmentIds(s, s)))(q, k, v, ids)
    return out.swapaxes(1, 2)[:, :T, :, :Dh].astype(q.dtype)
