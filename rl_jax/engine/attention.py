"""A decode step's attention: writes each slot's new k, v to its cache row and attends over what is live of it.

What runs is chosen once, from the mesh's first device, when the engine is built, and is logged with the reasons:
`triton` (kernels/decode_attention.py) does both in one kernel and reads live positions only; `cudnn` appends apart and
reads live positions only, also with few slots; `plain` runs anywhere and reads whole rows.
Invariant: a slot that is not active writes nothing; its result means nothing.
Must not: choose while tracing.
"""

import logging
from collections.abc import Callable
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels import cudnn_attention, decode_attention
from kernels.packed_attention import unfit
from rl_jax.mesh import RulesLike, mesh_axes
from rl_jax.models.attention import attention
from rl_jax.settings import ModelSettings

LOG = logging.getLogger(__name__)

Pair = tuple[jax.Array, jax.Array]  # k and v
# (q [S, H, Dh], new k and v [S, K, Dh], cache k and v [S, T, K, Dh], position i32[S], active bool[S])
# -> (out [S, H, Dh], the cache with the new k and v at `position` of active slots)
StepAttention = Callable[[jax.Array, Pair, Pair, jax.Array, jax.Array], tuple[jax.Array, Pair]]


def choose_attention(
    settings: ModelSettings, slots: int, rules: RulesLike, mesh: Mesh
) -> tuple[str, StepAttention]:
    """(what runs, itself) on this mesh, with so many slots."""
    device = mesh.devices.flat[0]
    capability = getattr(device, "compute_capability", "")
    split = mesh_axes(("slots", "kv_heads"), rules)
    shards = prod(mesh.shape[axis] for axes in split for axis in axes) if mesh.size > 1 else 1
    programs = slots * settings.num_kv_heads // shards
    dtype, head_dim = settings.dtype, settings.head_dim
    reasons = {
        "triton": decode_attention.unfit(device.platform, dtype, head_dim, programs),
        "cudnn": unfit("cudnn", device.platform, capability, dtype, head_dim),
        "plain": "",
    }
    name = next(name for name, why in reasons.items() if not why)
    why = "; ".join(why for why in reasons.values() if why)
    LOG.info("decode attention: %s on %s (%s)", name, device.device_kind, why)
    attend = {"triton": triton, "cudnn": cudnn, "plain": plain}[name]
    if name == "plain" or mesh.size == 1:
        return name, attend
    return name, partial(by_shard, attend, mesh, split)


def by_shard(attend: StepAttention, mesh: Mesh, split, q, new, cache, position, active):
    """attend on each device's own slots and heads; split: mesh axes of slots, of kv heads."""
    slots, heads = split
    rows, query = PartitionSpec(slots, None, heads), PartitionSpec(slots, heads)
    slot = PartitionSpec(slots)
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(query, (query, query), (rows, rows), slot, slot),
        out_specs=(query, (rows, rows)),
        check_vma=False,
    )(q, new, cache, position, active)


def append(new: Pair, cache: Pair, position: jax.Array, active: jax.Array) -> Pair:
    """The cache with each active slot's new k, v [K, Dh] at its position."""
    S = position.shape[0]
    row = jnp.where(active, jnp.arange(S), S)
    k, v = (c.at[row, position].set(x, mode="drop") for c, x in zip(cache, new, strict=True))
    return k, v


def plain(q, new: Pair, cache: Pair, position: jax.Array, active: jax.Array):
    k, v = append(new, cache, position, active)
    mask = (jnp.arange(k.shape[1]) <= position[:, None])[:, None]  # [S, 1, T]
    return attention(q[:, None], k, v, mask)[:, 0], (k, v)


def cudnn(q, new: Pair, cache: Pair, position: jax.Array, active: jax.Array):
    k, v = append(new, cache, position, active)
    lengths = jnp.where(active, position + 1, 1)
    return cudnn_attention.decode(q, k, v, lengths), (k, v)


def triton(q, new: Pair, cache: Pair, position: jax.Array, active: jax.Array):
    return decode_attention.decode_attention(q, new, cache, position, active)
