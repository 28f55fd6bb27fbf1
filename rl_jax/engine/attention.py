"""Attention of the engine: of a decode step, and of a chunk whose requests all start at position 0.

A decode step writes each slot's new k, v to the page that its table lists and attends over what is live: `triton`
(kernels/decode_attention.py) does both in one kernel and reads live positions only; `hopper` (kernels/
paged_attention_hopper.py) leaves the writing to XLA, cuts a slot's pages into parts that run beside each other, and
knows every form of attention; `plain` runs anywhere, for every model, and gathers all pages of the tables it is given.
On a Hopper GPU `hopper` runs the models whose attention `triton` does not know.
A chunk of fresh requests looks at nothing but itself: it is a packed row for a kernel of kernels/packed_attention.py,
which reads no cache and holds no scores. Without one, and where a request goes on, programs.extend reads the cache.
What runs is chosen once, from the mesh's first device, when the engine is built, and is logged with the reasons.
Invariant: a slot that is not active writes nothing; its result means nothing.
Must not: choose while tracing.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels import decode_attention, decode_rows_hopper
from kernels import paged_attention_hopper as hopper_kernel
from kernels.packed_attention import KERNELS, Split, unfit
from kernels.paged_attention import Scores, paged_attention, split_items
from rl_jax.mesh import RulesLike, mesh_axes
from rl_jax.models.attention import Attend, attention, packed_attend
from rl_jax.models.features import Form, attention_unfit, layers_unfit
from rl_jax.settings import ModelSettings

LOG = logging.getLogger(__name__)

Pair = tuple[jax.Array, jax.Array]  # k and v
# Of slots: position i32[S] of the new k, v, active bool[S], and the page tables i32[S, N].
Where = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class StepAttention:
    """What runs. Both give (out [S, H, Dh], the cache with the new k, v)."""

    name: str
    # (q [S, H, Dh], new k and v [S, K, Dh], cache k and v [P, page, K, Dh], slots, the layer's form, which `triton`
    # does not read: it is chosen for no model where it says anything)
    of_heads: Callable[[jax.Array, Pair, Pair, Where, Form], tuple[jax.Array, Pair]]
    # One device only, where it brings kernels for the whole layer (models.attention.FusedAttend):
    # (product [P, S, K, G + 2, Dh] in parts, bias [K, G + 2, Dh] or None, (cos, sin) f32[S, Dh / 2], cache, slots)
    of_product: Callable[..., tuple[jax.Array, Pair]] | None = None
    interpret: bool = False  # those kernels, on CPU, for tests
    rows: decode_rows_hopper.Hopper | None = None  # the products of such layers by its kernels


def choose_attention(
    settings: ModelSettings, rules: RulesLike, mesh: Mesh, context: int = 0, page_size: int = 0
) -> StepAttention:
    """The best for this mesh, and contexts of at most so many tokens (0 = not known) in pages of page_size."""
    device = mesh.devices.flat[0]
    slots, pages, heads = mesh_axes(("slots", "pages", "kv_heads"), rules)
    split = mesh.size > 1 and prod(mesh.shape[axis] for axis in {*slots, *pages}) > 1
    apart = "a slot's pages may lie on other devices of its data axis" if split else ""
    no_triton = (
        decode_attention.unfit(device.platform, settings.dtype, settings.head_dim, page_size)
        or attention_unfit(settings, context)
        or apart
    )
    no_hopper = _hopper_unfit(settings, device, page_size) or apart
    reasons = {TRITON: no_triton, HOPPER: no_hopper, PLAIN: ""}
    best = next(attention for attention, why in reasons.items() if not why)
    why = [why for why in reasons.values() if why]
    if best.of_product is not None and (odd_layers := layers_unfit(settings)):
        best = replace(best, of_product=None)
        why.append(odd_layers)
    LOG.info(
        "decode attention: %s on %s (%s)",
        best.name,
        device.device_kind,
        "; ".join(dict.fromkeys(why)),
    )
    return best if best is PLAIN or mesh.size == 1 else by_shard(best, mesh, heads)


def with_rows(
    step: StepAttention, settings: ModelSettings, mesh: Mesh, slots: int
) -> StepAttention:
    """step with the kernels for the products of many slots, where it has such layers and the device those kernels."""
    device: Any = mesh.devices.flat[0]
    if step.of_product is None or mesh.size > 1 or settings.dtype != "bfloat16":
        return step
    if _no_hopper_gpu(device):
        return step
    rows = decode_rows_hopper.Hopper(device.core_count)
    s = settings
    heads = (s.num_heads, s.num_heads + 2 * s.num_kv_heads)
    sizes = [s.embed_size, s.mlp_size, *(num * s.head_dim for num in heads)]
    if not all(rows.takes(slots, size) for size in sizes):
        return step
    LOG.info("products of %d slots: Hopper kernels", slots)
    return replace(step, rows=rows)


def _no_hopper_gpu(device: jax.Device) -> str:
    """Why the device is none; "" if it is one."""
    if device.platform not in ("gpu", "cuda"):
        return f"the kernel is for gpu, the platform is {device.platform}"
    if device.compute_capability != "9.0":
        return f"the kernel needs compute capability 9.0, this is {device.compute_capability}"
    return ""


def _hopper_unfit(settings: ModelSettings, device: jax.Device, page_size: int) -> str:
    """Why `hopper` should not run there; "" if it should."""
    if why := _no_hopper_gpu(device):
        return why
    queries = settings.num_heads // settings.num_kv_heads
    return hopper_kernel.unfit(settings.dtype, settings.head_dim, queries, page_size or 1)


# (i32[C] segment of each packed token, -1 padding; how many there are at most) -> the attention of the row [1, C]
ChunkAttention = Callable[[jax.Array, int], Attend]


def choose_chunk_attention(
    settings: ModelSettings, rules: RulesLike, mesh: Mesh, context: int = 0
) -> ChunkAttention | None:
    """The kernel for fresh chunks on this mesh, None where there is none. context: as of choose_attention."""
    device = mesh.devices.flat[0]
    capability = getattr(device, "compute_capability", "")
    heads, kv_heads = mesh_axes(("heads", "kv_heads"), rules)
    if heads != kv_heads:
        return None  # kv heads are whole on every device
    split = None if mesh.size == 1 else Split(mesh, (), kv_heads)
    fits = [
        kernel
        for kernel in KERNELS
        if not unfit(kernel, device.platform, capability, settings.dtype, settings.head_dim)
    ]
    if fits and (odd := attention_unfit(settings, context)):
        LOG.info("attention of fresh chunks: from the cache (%s)", odd)
        return None
    if not fits:
        return None
    LOG.info("attention of fresh chunks: %s on %s", fits[0], device.device_kind)
    return lambda segment, most: packed_attend(segment[None] + 1, fits[0], split, most)


def by_shard(step: StepAttention, mesh: Mesh, heads) -> StepAttention:
    """step on each device's own heads; heads: the mesh axes that split them."""
    rows, cache = PartitionSpec(None, heads), PartitionSpec(None, None, heads)
    whole = PartitionSpec()

    def of_heads(q, new, kept, where, form):
        sharded = jax.shard_map(
            lambda q, new, kept, where: step.of_heads(q, new, kept, where, form),
            mesh=mesh,
            in_specs=(rows, (rows, rows), (cache, cache), (whole, whole, whole)),
            out_specs=(rows, (cache, cache)),
            check_vma=False,
        )
        return sharded(q, new, kept, where)

    return StepAttention(step.name, of_heads)


def append(new: Pair, cache: Pair, where: Where) -> Pair:
    """The cache with each active slot's new k, v [K, Dh] at its position."""
    position, active, tables = where
    num_pages, page_size = cache[0].shape[:2]
    column = jnp.minimum(position // page_size, tables.shape[1] - 1)
    page = jnp.take_along_axis(tables, column[:, None], axis=1)[:, 0]
    page = jnp.where(active & (page >= 0), page, num_pages)
    k, v = (
        c.at[page, position % page_size].set(x, mode="drop")
        for c, x in zip(cache, new, strict=True)
    )
    return k, v


def read_pages(cache: Pair, tables: jax.Array, last: jax.Array) -> Pair:
    """k and v [B, N * page, K, Dh] of the contexts whose pages are tables i32[B, N]; values after last i32[B] are 0.

    A page is given on with what it held, and a weight of 0 does not undo a value that is not finite.
    """
    k, v = (c.at[tables].get(mode="clip").reshape(tables.shape[0], -1, *c.shape[2:]) for c in cache)
    live = jnp.arange(v.shape[1]) <= last[:, None]
    return k, jnp.where(live[..., None, None], v, 0)


def plain(
    q: jax.Array, new: Pair, cache: Pair, where: Where, form: Form = Form()
) -> tuple[jax.Array, Pair]:
    cache = append(new, cache, where)
    k, v = read_pages(cache, where[2], where[0])
    mask = visible_positions(where[0], k.shape[1], form.window)[:, None]  # [S, 1, T]
    return attention(q[:, None], k, v, mask, form)[:, 0], cache


def visible_positions(position: jax.Array, length: int, window: int) -> jax.Array:
    """bool[..., length]: cache places that a query at `position` i32[...] sees: all up to it, or the last `window`."""
    places, position = jnp.arange(length), position[..., None]
    mask = places <= position
    return mask & (places > position - window) if 0 < window < length else mask


def triton(
    q: jax.Array, new: Pair, cache: Pair, where: Where, _: Form = Form()
) -> tuple[jax.Array, Pair]:
    """Heads that are normed and rotated already: as a product with nothing left to do."""
    S, K, Dh = new[0].shape
    product = jnp.concatenate([q.reshape(S, K, -1, Dh), *(x[:, :, None] for x in new)], axis=2)
    ones, zeros = jnp.ones((S, Dh // 2), jnp.float32), jnp.zeros((S, Dh // 2), jnp.float32)
    return decode_attention.decode_attention(product[None], None, (ones, zeros), cache, where)


def hopper(
    q: jax.Array,
    new: Pair,
    cache: Pair,
    where: Where,
    form: Form = Form(),
    tuning: hopper_kernel.Tuning = hopper_kernel.Tuning(2, 1),
) -> tuple[jax.Array, Pair]:
    """The result of a slot that is not active is 0."""
    cache = append(new, cache, where)
    position, active, tables = where
    end = jnp.where(active, position + 1, 0)
    first = jnp.maximum(end - form.window, 0) if form.window else jnp.zeros_like(end)
    page_size, num_kv_heads = cache[0].shape[1:3]
    parts = parts_of(q.shape[0] * num_kv_heads, tables.shape[1])
    scale = q.shape[2] ** -0.5 if form.scale is None else form.scale
    out = paged_attention(
        q,
        cache,
        split_items(tables, first, end, page_size, parts),
        Scores(scale, form.softcap or None),
        partial(hopper_kernel.attend, tuning=tuning),
    )
    return out, cache


def parts_of(programs: int, num_pages: int) -> int:
    """So many that a card has two programs a multiprocessor, but no more than pages of a context, or 8."""
    return min(max(-(-FULL // max(programs, 1)), 1), max(num_pages, 1), 8)


PLAIN = StepAttention("plain", plain)
TRITON = StepAttention("triton", triton, decode_attention.decode_attention)
HOPPER = StepAttention("hopper", hopper)
FULL = 2 * 132  # programs of attention that keep a Hopper GPU busy
