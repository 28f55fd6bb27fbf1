"""Digest of parameters: two uint32 each, equal in every sharding, computed where the parameters lie.

For a parameter of n elements, with i its global row-major index and bits_i the element's bit pattern as an unsigned
integer: a = sum(bits_i * (2i + 1)), b = sum((bits_i ^ (bits_i >> 7)) * (2i + 1)), both mod 2^32. Odd weights make every
single changed bit visible and tell permuted elements apart; integer sums mod 2^32 are exact in any order, so any
sharding, mesh and backend gives the same two numbers.

Life of a digest: 1 `start` picks the one mesh all parameters lie on; 2 one compiled program, without collectives, gives
each device's partial sums over its own shards (about one read of the weights); 3 `result` fetches u32[devices, N, 2],
compares the devices that hold the same shard, and adds one of each up. Step 3 makes a corrupt *replica* visible,
which a digest of the logical array would not.

Must not: gather a parameter, or hold one in another dtype.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by bytes an element


class ReplicasDiffer(ValueError):
    """Devices that hold the same shard of one parameter hold different bits. `name`: that parameter."""

    def __init__(self, name: str, devices: tuple[str, str]):
        super().__init__(
            f"parameter {name}: {devices[0]} and {devices[1]} hold the same shard with different bits"
        )
        self.name, self.devices = name, devices


def _fetched(array: jax.Array) -> np.ndarray:
    """All of it, on every process that has a part of it (each must ask)."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


@dataclass(frozen=True)
class PendingDigest:
    """Partial sums under way on the devices; `result` waits for them."""

    names: tuple[str, ...]
    devices: np.ndarray  # object[D], in the mesh's flat order
    owners: np.ndarray  # i64[D, N] first device that holds the same shard of the parameter
    partials: jax.Array  # u32[D, N, 2]

    def result(self) -> dict[str, np.ndarray]:
        """name -> u32[2]. Raises: ReplicasDiffer."""
        partials = _fetched(self.partials)
        of_owner = np.take_along_axis(partials, self.owners[:, :, None], axis=0)
        differs = (partials != of_owner).any(axis=2)  # [D, N]
        if differs.any():
            device, n = (int(i) for i in np.argwhere(differs)[0])
            pair = (str(self.devices[self.owners[device, n]]), str(self.devices[device]))
            raise ReplicasDiffer(self.names[n], pair)
        is_owner = self.owners == np.arange(len(self.devices))[:, None]
        sums = partials.sum(axis=0, dtype=np.uint32, where=is_owner[:, :, None])
        return dict(zip(self.names, sums, strict=True))


def digest_arrays(params: Mapping[str, jax.Array], dtype=None) -> dict[str, np.ndarray]:
    """Digest of each parameter: name -> u32[2] on the host. See `start`."""
    return start(params, dtype).result()


def of_all(values: Mapping[str, Sequence[int] | np.ndarray]) -> str:
    """One hex word of the digests of all parameters: name -> two uint32, in any order of names."""
    text = "".join(f"{name} {int(a)} {int(b)}\n" for name, (a, b) in sorted(values.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def start(params: Mapping[str, jax.Array], dtype=None) -> PendingDigest:
    """Dispatches the partial sums and returns at once.

    Args:    params: arrays on one mesh (or all on one device), any sharding. dtype: floating parameters are digested as
             if cast to it first (the bits a server gets), without a cast copy in memory.
    Raises:  ValueError if the parameters lie on different meshes or an element has 8 bytes.
    """
    names = tuple(params)
    arrays = tuple(params.values())
    if not arrays:
        empty = np.zeros((1, 0), np.int64)
        return PendingDigest((), np.empty(1, object), empty, jnp.zeros((1, 0, 2), jnp.uint32))
    mesh, specs = _on_one_mesh(names, arrays)
    partials = _program(mesh, specs, _name(dtype))(arrays)
    partials.copy_to_host_async()
    return PendingDigest(names, mesh.devices.reshape(-1), _owners(mesh, specs), partials)


def partial_digest(x: jax.Array, base, strides: tuple[int, ...]) -> jax.Array:
    """u32[2] of a block of a parameter; jit-compatible.

    Args:    x: the block. base: u32[], global index of its first element. strides: the whole parameter's, in elements.
    """
    if x.size == 0:
        return jnp.zeros(
            2, jnp.uint32
        )  # jaxlib 0.11.2 for CPU crashes while compiling a sum over nothing
    bits = _bits(x)
    index = jnp.asarray(base, jnp.uint32)
    for dim, stride in enumerate(strides):
        index = index + lax.broadcasted_iota(jnp.uint32, x.shape, dim) * np.uint32(stride % 2**32)
    weight = index * np.uint32(2) + np.uint32(1)
    first = jnp.sum(bits * weight, dtype=jnp.uint32)
    second = jnp.sum((bits ^ (bits >> np.uint32(7))) * weight, dtype=jnp.uint32)
    return jnp.stack([first, second])


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _bits(x: jax.Array) -> jax.Array:
    """The elements' bit patterns as u32, same shape."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize not in _BITS:
        raise ValueError(
            f"digest of dtype {x.dtype}: elements of {x.dtype.itemsize} bytes are not supported; use 1, 2 or 4"
        )
    return lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize]).astype(jnp.uint32)


@lru_cache(maxsize=256)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...], dtype: str | None):
    """jitted: arrays -> u32[devices, N, 2]. Cached so that a digest compiles once a layout."""

    def block(local, strides):
        parts = []
        for x, spec, stride in zip(local, specs, strides, strict=True):
            if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating):
                x = x.astype(dtype)
            parts.append(partial_digest(x, _base(x.shape, spec, stride), stride))
        return jnp.stack(parts)[None]  # [1, N, 2]: this device's row

    @jax.jit
    def partials(arrays):
        strides = tuple(strides_of(x.shape) for x in arrays)
        return jax.shard_map(
            partial(block, strides=strides),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,
        )(arrays)

    return partials


def _base(local_shape, spec: PartitionSpec, strides) -> jax.Array:
    """u32[]: global index of this device's first element."""
    base = jnp.uint32(0)
    for dim, axes in enumerate(spec):
        if axes is not None and axes != ():
            start = lax.axis_index(axes).astype(jnp.uint32) * np.uint32(local_shape[dim])
            base = base + start * np.uint32(strides[dim] % 2**32)
    return base


@lru_cache(maxsize=256)
def _owners(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> np.ndarray:
    """i64[D, N]: for each device (flat mesh order) and parameter, the first device that holds the same shard."""
    coordinates = np.stack(np.unravel_index(np.arange(mesh.size), mesh.devices.shape), axis=1)
    out = np.empty((mesh.size, len(specs)), np.int64)
    for n, spec in enumerate(specs):
        used = {
            axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())
        }
        split = [axis in used for axis in mesh.axis_names]
        first: dict[tuple, int] = {}
        out[:, n] = [first.setdefault(tuple(c[split]), d) for d, c in enumerate(coordinates)]
    return out


def _on_one_mesh(names, arrays) -> tuple[Mesh, tuple[PartitionSpec, ...]]:
    """The mesh the arrays lie on and each one's spec there."""
    shardings = [x.sharding for x in arrays]
    mesh: Mesh | None = getattr(shardings[0], "mesh", None)
    if mesh is not None and all(getattr(s, "mesh", None) is mesh for s in shardings):
        return mesh, tuple(s.spec for s in shardings)
    devices = {d for s in shardings for d in s.device_set}
    if len(devices) == 1:
        only = Mesh(np.array(list(devices)), ("device",))
        return only, tuple(PartitionSpec() for _ in arrays)
    for name, s in zip(names, shardings, strict=True):
        if mesh is None or getattr(s, "mesh", None) != mesh:
            raise ValueError(
                f"digest: parameter {name} lies on {s}, parameter {names[0]} on {shardings[0]}; "
                "all must lie on one mesh"
            )
    assert mesh is not None, "some sharding is not on a mesh, yet none was refused"
    return mesh, tuple(s.spec for s in shardings)


def _name(dtype) -> str | None:
    return None if dtype is None else jnp.dtype(dtype).name
