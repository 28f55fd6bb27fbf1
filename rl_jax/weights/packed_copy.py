"""Moves one bucket of trained parameters into fresh arrays on every target, without a collective.

1. Each source device packs, for each target device, the parts of its shards that lie inside that device's shards, cast
   to the served dtype, into one flat buffer.
2. The buffers are copied device to device: a handful of large copies a bucket, exactly the target's bytes.
3. Each target device unpacks its buffers into its shards, which are assembled on the target's mesh; where all devices
   of a target unpack alike, one program does it for the mesh.
Which part comes from where is arithmetic on index ranges, so any pair of meshes works: different sizes, replicas on
either side, shared devices. No program communicates, so none can wait for another device.
Everything is dispatched and nothing waited for: packing bucket i + 1 overlaps the copies of bucket i.

Invariants: what a target gets never shares memory with the train state (the learner donates that); every element of a
target shard comes from exactly one source device; targets that want the same parts from one device share its buffer.
Must not: wait, retry or know about versions; that is sync.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from rl_jax.weights.layout import Box, boxes, intersection, shape_of, shift
from rl_jax.weights.plan import Parameter, SyncPlan, Target

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Part:
    """What one source device gives to one target device's shard of one parameter."""

    name: str
    source: int  # flat position on the train mesh
    cut: Box  # in the source device's shard
    place: Box  # in the target device's shard


@dataclass(frozen=True)
class Packing:
    """The contents of one flat buffer, in order."""

    source: int
    dtype: str
    parts: tuple[tuple[str, Box], ...]  # (parameter, cut)

    @property
    def size(self) -> int:
        return sum(math.prod(shape_of(cut)) for _, cut in self.parts)


@dataclass(frozen=True)
class Delivery:
    """What one target device gets of one bucket: buffers, and the parts in them by parameter."""

    device: jax.Device
    packings: tuple[Packing, ...]
    # Per parameter: its local shape, and per part (buffer, offset in elements, place).
    shards: tuple[tuple[tuple[int, ...], tuple[tuple[int, int, Box], ...]], ...]

    def is_like(self, other: "Delivery") -> bool:
        """Whether both devices do the same with buffers of the same sizes."""
        sizes = [[(p.dtype, p.size) for p in d.packings] for d in (self, other)]
        return self.shards == other.shards and sizes[0] == sizes[1]


class PackedCopy:
    """A transport for meshes of one process. Owns the routes; a bucket of new shapes compiles once a device."""

    def __init__(self, plan: SyncPlan, targets: Sequence[str] | None = None):
        """targets: those of the plan that will be sent to, None for all; their meshes are of this process."""
        self.plan = plan
        # Whole replicas of the train state take turns; else one source gives what all hold, and targets share buffers.
        spread = min(_num_holders(p) for p in plan.parameters.values())
        self._parts = {
            name: {n: _parts(p, target, turn, spread) for n, p in plan.parameters.items()}
            for turn, (name, target) in enumerate(plan.targets.items())
            if targets is None or name in targets
        }
        self._deliveries: dict[tuple[str, tuple[str, ...]], tuple[Delivery, ...]] = {}

    def send(
        self, params: Mapping[str, jax.Array], names: Sequence[str], targets: Sequence[str]
    ) -> dict[str, Arrays]:
        """Args:    params: the train state's, placed as planned. names: of one bucket. targets: server names.
        Returns: per target name -> array on its mesh; still being computed and copied when this returns.
        """
        names = tuple(names)
        deliveries = {t: self._deliver(t, names) for t in targets}
        wanted = dict.fromkeys(p for ds in deliveries.values() for d in ds for p in d.packings)
        packed = self._pack(params, names, list(wanted))
        routes = [(p, d.device) for ds in deliveries.values() for d in ds for p in d.packings]
        buffers = iter(
            jax.device_put(
                [packed[p] for p, _ in routes], [SingleDeviceSharding(d) for _, d in routes]
            )
        )
        return {
            t: self._unpack(
                self.plan.targets[t], names, [(d, [next(buffers) for _ in d.packings]) for d in ds]
            )
            for t, ds in deliveries.items()
        }

    def _pack(
        self, params: Mapping[str, jax.Array], names: Sequence[str], wanted: Sequence[Packing]
    ) -> dict[Packing, jax.Array]:
        """One program a source device gives all its buffers."""
        shards = {n: _by_position(params[n]) for n in names}
        by_source: dict[int, list[Packing]] = {}
        for packing in wanted:
            by_source.setdefault(packing.source, []).append(packing)
        out = {}
        for source, packings in by_source.items():
            used = list(dict.fromkeys(n for p in packings for n, _ in p.parts))
            index = {n: i for i, n in enumerate(used)}
            contents = tuple(
                (p.dtype, tuple((index[n], cut) for n, cut in p.parts)) for p in packings
            )
            made = _pack_program([shards[n][source] for n in used], contents)
            out.update(zip(packings, made, strict=True))
        return out

    def _unpack(
        self,
        target: Target,
        names: Sequence[str],
        arrived: Sequence[tuple[Delivery, list[jax.Array]]],
    ) -> Arrays:
        """The bucket's arrays on the target's mesh; assembling shards into arrays copies nothing."""
        shards = arrived[0][0].shards
        places = [target.shardings[n] for n in names]
        if len(arrived) > 1 and all(delivery.is_like(arrived[0][0]) for delivery, _ in arrived):
            # All devices unpack alike: one program for the mesh, and few arrays to assemble, which is host work.
            whole = [_side_by_side(target.mesh, parts) for parts in zip(*(b for _, b in arrived))]
            program = _mesh_unpack_program(target.mesh, tuple(places), shards)
            return dict(zip(names, program(whole), strict=True))
        made = [_unpack_program(buffers, delivery.shards) for delivery, buffers in arrived]
        return {
            n: jax.make_array_from_single_device_arrays(
                self.plan.parameters[n].shape, places[i], [device[i] for device in made]
            )
            for i, n in enumerate(names)
        }

    def _deliver(self, target: str, names: tuple[str, ...]) -> tuple[Delivery, ...]:
        """Per target device in flat order; made once a bucket."""
        key = (target, names)
        if key not in self._deliveries:
            mesh = self.plan.targets[target].mesh
            self._deliveries[key] = tuple(
                self._delivery(target, names, t, device)
                for t, device in enumerate(mesh.devices.flat)
            )
        return self._deliveries[key]

    def _delivery(self, target: str, names: Sequence[str], t: int, device: jax.Device) -> Delivery:
        contents: dict[tuple[int, str], list[tuple[str, Box]]] = {}
        filled: dict[tuple[int, str], int] = {}
        shards = []
        for n in names:
            p = self.plan.parameters[n]
            pieces = []
            for part in self._parts[target][n][t]:
                key = (part.source, p.served.name)
                contents.setdefault(key, []).append((n, part.cut))
                offset = filled.get(key, 0)
                filled[key] = offset + math.prod(shape_of(part.cut))
                pieces.append((list(contents).index(key), offset, part.place))
            local = self.plan.targets[target].shardings[n].shard_shape(p.shape)
            shards.append((tuple(local), tuple(pieces)))
        packings = tuple(Packing(s, dtype, tuple(parts)) for (s, dtype), parts in contents.items())
        return Delivery(device, packings, tuple(shards))


def _num_holders(p: Parameter) -> int:
    """Devices that hold each shard of p on the train mesh."""
    all_boxes = boxes(p.source, p.shape)
    return len(all_boxes) // len(set(all_boxes))


def _parts(p: Parameter, target: Target, turn: int, spread: int) -> tuple[tuple[Part, ...], ...]:
    """Per target device, the parts that tile its shard of p. Of a shard's holders, `spread` take turns."""
    holders: dict[Box, list[int]] = {}
    for s, box in enumerate(boxes(p.source, p.shape)):
        holders.setdefault(box, []).append(s)
    sources = list(p.source.mesh.devices.flat)
    out = []
    for t, (device, want) in enumerate(
        zip(target.mesh.devices.flat, boxes(target.shardings[p.name], p.shape), strict=True)
    ):
        parts = []
        for box, at in holders.items():
            common = intersection(box, want)
            if common is None:
                continue
            own = [s for s in at if sources[s] == device]
            source = own[0] if own else at[(turn + t) % spread]
            parts.append(Part(p.name, source, shift(common, box), shift(common, want)))
        size = sum(math.prod(shape_of(part.place)) for part in parts)
        assert size == math.prod(shape_of(want)), f"{p.name}: parts do not tile shard {want}"
        out.append(tuple(parts))
    return tuple(out)


@partial(jax.jit, static_argnums=1)
def _pack_program(arrays, contents):
    """Per content (dtype, parts): the parts, cast, flat and one after the other."""
    flat = [
        [_cut(arrays[i], box).astype(dtype).reshape(-1) for i, box in parts]
        for dtype, parts in contents
    ]
    # Without the copy jit would hand a lone whole vector back as it came, and the learner donates it.
    return [jnp.copy(jnp.concatenate(parts)) for parts in flat]


@partial(jax.jit, static_argnums=1)
def _unpack_program(buffers, shards):
    """Per shard (shape, parts): the parts cut from the buffers and put together."""
    return [
        _join([(place, _take(buffers[b], at, place)) for b, at, place in parts], 0)
        for _, parts in shards
    ]


@lru_cache(maxsize=256)
def _mesh_unpack_program(mesh: Mesh, places: tuple[NamedSharding, ...], shards):
    """_unpack_program on every device of a mesh at once, on its own part of each buffer."""
    return jax.jit(
        jax.shard_map(
            lambda buffers: _unpack_program(buffers, shards),
            mesh=mesh,
            in_specs=PartitionSpec(mesh.axis_names),
            out_specs=[place.spec for place in places],
            check_vma=False,
        ),
        out_shardings=list(places),
    )


def _side_by_side(mesh: Mesh, buffers: Sequence[jax.Array]) -> jax.Array:
    """One array whose shard on each device of the mesh is that device's flat buffer."""
    shape = (len(buffers) * buffers[0].size,)
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_single_device_arrays(shape, place, list(buffers))


def _cut(x: jax.Array, box: Box) -> jax.Array:
    return x[tuple(slice(*r) for r in box)]


def _take(buffer: jax.Array, at: int, place: Box) -> jax.Array:
    shape = shape_of(place)
    return buffer[at : at + math.prod(shape)].reshape(shape)


def _join(parts: Sequence[tuple[Box, jax.Array]], dim: int) -> jax.Array:
    """Blocks of a grid, put together along dim and those after it."""
    if len(parts) == 1:
        return parts[0][1]
    rows: dict[tuple[int, int], list] = {}
    for box, x in sorted(parts, key=lambda part: part[0]):
        rows.setdefault(box[dim], []).append((box, x))
    joined = [_join(row, dim + 1) for row in rows.values()]
    return joined[0] if len(joined) == 1 else jnp.concatenate(joined, axis=dim)


def _by_position(x: jax.Array) -> list[jax.Array]:
    """The single-device shards in the mesh's flat order."""
    if (
        not x.is_fully_replicated
    ):  # addressable_data is a tenth of the host work of addressable_shards
        return [x.addressable_data(i) for i in range(x.sharding.num_devices)]
    by_device = {s.device: s.data for s in x.addressable_shards}
    return [by_device[d] for d in x.sharding.mesh.devices.flat]
