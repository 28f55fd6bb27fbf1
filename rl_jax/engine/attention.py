"""Attention of the engine: of a decode step, and of a chunk whose requests all start at position 0.

A decode step writes each slot's new k, v to its cache row and attends over what is live of it: `triton`
(kernels/decode_attention.py) does both in one kernel and reads live positions only; `cudnn` appends apart and reads
live positions only, also with few slots; `plain` runs anywhere, for every model, and reads whole rows.
A chunk of fresh requests looks at nothing but itself: it is a packed row for a kernel of kernels/packed_attention.py,
which reads no cache and holds no scores. Without one, and where a request goes on, programs.extend reads the cache.
What runs is chosen once, from the mesh's first device, when the engine is built, and is logged with the reasons.
Invariant: a slot that is not active writes nothing; its result means nothing.
Must not: choose while tracing.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels import cudnn_attention, decode_attention
from kernels.packed_attention import KERNELS, Split, unfit
from rl_jax.mesh import RulesLike, mesh_axes
from rl_jax.models.attention import Attend, attention, packed_attend
from rl_jax.models.features import Form, attention_unfit, layers_unfit
from rl_jax.settings import ModelSettings

LOG = logging.getLogger(__name__)

Pair = tuple[jax.Array, jax.Array]  # k and v


@dataclass(frozen=True)
class StepAttention:
    """What runs. Both give (out [S, H, Dh], the cache with the new k, v); slots: (position i32[S], active bool[S])."""

    name: str
    # (q [S, H, Dh], new k and v [S, K, Dh], cache k and v [S, T, K, Dh], slots, the layer's form, which only `plain`
    # reads: the kernels are not chosen for models where it says anything)
    of_heads: Callable[[jax.Array, Pair, Pair, Pair, Form], tuple[jax.Array, Pair]]
    # One device only, where it brings kernels for the whole layer (models.attention.FusedAttend):
    # (product [P, S, K, G + 2, Dh] in parts, bias [K, G + 2, Dh] or None, (cos, sin) f32[S, Dh / 2], cache, slots)
    of_product: Callable[..., tuple[jax.Array, Pair]] | None = None
    interpret: bool = False  # those kernels, on CPU, for tests


def choose_attention(
    settings: ModelSettings, slots: int, rules: RulesLike, mesh: Mesh, context: int = 0
) -> StepAttention:
    """The best for this mesh, so many slots, and contexts of at most so many tokens (0 = not known)."""
    device = mesh.devices.flat[0]
    capability = getattr(device, "compute_capability", "")
    split = mesh_axes(("slots", "kv_heads"), rules)
    shards = prod(mesh.shape[axis] for axes in split for axis in axes) if mesh.size > 1 else 1
    programs = slots * settings.num_kv_heads // shards
    dtype, head_dim = settings.dtype, settings.head_dim
    odd = attention_unfit(settings, context)
    reasons = {
        TRITON: decode_attention.unfit(device.platform, dtype, head_dim, programs) or odd,
        CUDNN: unfit("cudnn", device.platform, capability, dtype, head_dim) or odd,
        PLAIN: "",
    }
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
    return best if best is PLAIN or mesh.size == 1 else by_shard(best, mesh, *split)


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


def by_shard(step: StepAttention, mesh: Mesh, slots, heads) -> StepAttention:
    """step on each device's own slots and heads; slots, heads: the mesh axes that split them."""
    rows, cache = PartitionSpec(slots, heads), PartitionSpec(slots, None, heads)
    slot = PartitionSpec(slots)
    sharded = jax.shard_map(
        lambda q, new, cache, slots: step.of_heads(q, new, cache, slots, Form()),
        mesh=mesh,
        in_specs=(rows, (rows, rows), (cache, cache), (slot, slot)),
        out_specs=(rows, (cache, cache)),
        check_vma=False,
    )
    return StepAttention(step.name, lambda *arrays_and_form: sharded(*arrays_and_form[:4]))


def append(new: Pair, cache: Pair, slots: Pair) -> Pair:
    """The cache with each active slot's new k, v [K, Dh] at its position."""
    position, active = slots
    S = position.shape[0]
    row = jnp.where(active, jnp.arange(S), S)
    k, v = (c.at[row, position].set(x, mode="drop") for c, x in zip(cache, new, strict=True))
    return k, v


def plain(
    q: jax.Array, new: Pair, cache: Pair, slots: Pair, form: Form = Form()
) -> tuple[jax.Array, Pair]:
    k, v = append(new, cache, slots)
    mask = visible_positions(slots[0], k.shape[1], form.window)[:, None]  # [S, 1, T]
    return attention(q[:, None], k, v, mask, form)[:, 0], (k, v)


def visible_positions(position: jax.Array, length: int, window: int) -> jax.Array:
    """bool[..., length]: cache places that a query at `position` i32[...] sees: all up to it, or the last `window`."""
    places, position = jnp.arange(length), position[..., None]
    mask = places <= position
    return mask & (places > position - window) if 0 < window < length else mask


def cudnn(
    q: jax.Array, new: Pair, cache: Pair, slots: Pair, _: Form = Form()
) -> tuple[jax.Array, Pair]:
    k, v = append(new, cache, slots)
    lengths = jnp.where(slots[1], slots[0] + 1, 1)
    return cudnn_attention.decode(q, k, v, lengths), (k, v)


def triton(
    q: jax.Array, new: Pair, cache: Pair, slots: Pair, _: Form = Form()
) -> tuple[jax.Array, Pair]:
    """Heads that are normed and rotated already: as a product with nothing left to do."""
    S, K, Dh = new[0].shape
    product = jnp.concatenate([q.reshape(S, K, -1, Dh), *(x[:, :, None] for x in new)], axis=2)
    ones, zeros = jnp.ones((S, Dh // 2), jnp.float32), jnp.zeros((S, Dh // 2), jnp.float32)
    return decode_attention.decode_attention(product[None], None, (ones, zeros), cache, slots)


PLAIN, CUDNN = StepAttention("plain", plain), StepAttention("cudnn", cudnn)
TRITON = StepAttention("triton", triton, decode_attention.decode_attention)
