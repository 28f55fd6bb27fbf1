"""The layout on the source mesh from which a target's shards are plain per-device copies.

`jax.device_put` between unequal layouts is about a hundred times slower than a collective followed by copies, so a
target's layout is first made on the source mesh's own devices: a mesh of the same devices in the same flat order, whose
trailing axes are the leading part of the target's, behind an axis of replicas where the source has more devices.
With S source and T target devices and n = gcd(S, T): n shards on the source in S / n replicas; each holds T / n
neighbouring target shards, which are sliced out on the source device, so exactly the target's bytes cross.

Invariant: the rule above only proposes. `pieces` checks every (parameter, target device) by its index ranges and
`source_layout` replicates a parameter for which the proposal does not hold; a wrong copy is impossible by construction.
Must not: touch arrays; this is arithmetic on shardings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.mesh import as_tuple

REPLICAS = "replicas"

Box = tuple[tuple[int, int], ...]  # per dimension [start, stop) of a shard in the whole array


@dataclass(frozen=True)
class Piece:
    """What one target device gets of one parameter."""

    source: int  # flat position on the source mesh
    cut: Box | None  # the part of the source device's shard, in its own indices; None = all of it


@dataclass(frozen=True)
class SourceLayout:
    """A target's layout expressed on the source mesh's devices."""

    mesh: Mesh  # the source's devices in its flat order
    parts: int  # shards; S / parts replicas of each

    def sharding(self, target: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
        """Of a parameter that the target holds as `target`; replicated where the parts do not nest."""
        kept = set(self.mesh.axis_names) - {REPLICAS}
        entries = [_keep(entry, kept) for entry in target.spec]
        proposal = NamedSharding(self.mesh, PartitionSpec(*entries))
        return proposal if _nests(proposal, target, shape, self.parts) else self.replicated()

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def source_layout(source: Mesh, target: Mesh) -> SourceLayout:
    """The finest layout of the target's leading axes that the source's devices can hold evenly."""
    axes = dict(target.shape)
    for parts in range(math.gcd(source.size, target.size), 0, -1):
        if source.size % parts or target.size % parts:
            continue
        sizes = _leading(axes, parts)
        if sizes is not None:
            grid = source.devices.reshape(-1).reshape(source.size // parts, *sizes.values())
            return SourceLayout(Mesh(grid, (REPLICAS, *sizes)), parts)
    raise AssertionError("parts = 1 always fits")


def pieces(
    source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], parts: int, turn: int
) -> tuple[Piece, ...]:
    """For each target device in flat order, where its shard comes from. `turn` spreads targets over replicas.

    A target device that is itself a source device holding the shard takes its own.
    """
    source_boxes, target_boxes = boxes(source, shape), boxes(target, shape)
    position = {device: s for s, device in enumerate(source.mesh.devices.flat)}
    share, replicas = target.mesh.size // parts, source.mesh.size // parts
    out = []
    for t, device in enumerate(target.mesh.devices.flat):
        home = ((turn + t % share) % replicas) * parts + t // share
        own = position.get(device)
        at = own if own is not None and contains(source_boxes[own], target_boxes[t]) else home
        if not contains(source_boxes[at], target_boxes[t]):
            raise AssertionError(
                f"target shard {target_boxes[t]} is not inside source shard {source_boxes[at]}"
            )
        out.append(Piece(at, _cut(source_boxes[at], target_boxes[t])))
    return tuple(out)


def boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Box]:
    """Each device's shard, in the mesh's flat order."""
    indices = sharding.devices_indices_map(shape)
    return [
        tuple(
            (s.start or 0, size if s.stop is None else s.stop)
            for s, size in zip(indices[device], shape, strict=True)
        )
        for device in sharding.mesh.devices.flat
    ]


def same_layout(a: NamedSharding, b: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Whether shard i of a is shard i of b for every flat position i."""
    return a.mesh.size == b.mesh.size and boxes(a, shape) == boxes(b, shape)


def contains(outer: Box, inner: Box) -> bool:
    return all(o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    """What lies in both; None if nothing does."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def shift(box: Box, outer: Box) -> Box:
    """box in the indices of the shard `outer`."""
    return tuple((b[0] - o[0], b[1] - o[0]) for b, o in zip(box, outer, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _nests(
    source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], parts: int
) -> bool:
    """Whether the source's part p holds the p-th run of neighbouring target shards."""
    source_boxes, target_boxes = boxes(source, shape), boxes(target, shape)
    share = target.mesh.size // parts
    return all(contains(source_boxes[t // share], box) for t, box in enumerate(target_boxes))


def _cut(outer: Box, inner: Box) -> Box | None:
    return None if outer == inner else shift(inner, outer)


def _leading(axes: dict[str, int], parts: int) -> dict[str, int] | None:
    """The leading axes whose sizes multiply to parts, the last one cut if need be; None if they do not."""
    sizes: dict[str, int] = {}
    for name, size in axes.items():
        cut = math.gcd(size, parts)
        if cut > 1:
            sizes[name] = cut
        parts //= cut
        if parts == 1:
            return sizes
        if cut != size:
            return None
    return None


def _keep(entry: str | Sequence[str] | None, kept: set[str]):
    """One dimension's spec entry with only the axes the source layout has."""
    names = tuple(n for n in as_tuple(entry) if n in kept)
    return names[0] if len(names) == 1 else (names or None)
