"""Moving prefix KV from a prefill server's mesh to a decode server's.

Invariants: what arrives equals what was sent, whatever the two layouts. Equal layouts (the same
shard at the same place of both meshes) are copied shard to shard, asynchronously, by one
`device_put`. Others are first laid out on the source mesh so that every device holds the whole (a
collective of compiled code), then each target device gets its slice: `device_put` across unequal
layouts is 100 times slower and blocks. Nothing is donated across meshes (the CPU backend crashes).
"""

import hashlib
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def move(kv: Any, source: NamedSharding, target: NamedSharding) -> Any:
    """A pytree of arrays laid out as `source`, on the mesh and in the layout of `target`.

    Sources stay valid.
    """
    if source.mesh == target.mesh and source.spec == target.spec:
        return kv
    shape = jax.tree.leaves(kv)[0].shape
    if same_layout(source, target, shape):
        return jax.device_put(kv, target)
    whole = _replicate(NamedSharding(source.mesh, PartitionSpec()))(kv)
    return jax.tree.map(lambda array: _scatter(array, target), whole)


@lru_cache(maxsize=256)
def same_layout(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Whether shard i of the source mesh holds exactly what shard i of the target mesh must."""
    return _boxes(source, shape) == _boxes(target, shape)


def tokens_sha(tokens: np.ndarray) -> str:
    """sha256 over the tokens' little-endian i32 bytes: what a Prefix was computed from."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()


def _boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> list:
    by_device = sharding.devices_indices_map(shape)
    return [
        tuple(s.indices(size)[:2] for s, size in zip(by_device[device], shape))
        for device in sharding.mesh.devices.flat
    ]


@lru_cache(maxsize=64)
def _replicate(sharding: NamedSharding):
    return jax.jit(lambda kv: kv, out_shardings=sharding)


def _scatter(whole: jax.Array, target: NamedSharding) -> jax.Array:
    local = whole.addressable_shards[0].data  # every device of the source holds all of it
    pieces = [
        jax.device_put(local[box], device)
        for device, box in target.addressable_devices_indices_map(whole.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(whole.shape, target, pieces)
