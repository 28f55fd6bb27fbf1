"""What goes to and comes from a learner's processes <-> JSON and arrays: batches, metrics, and pieces of parameters.

Invariants: what is read equals what was written, bit for bit; what is not finite stays so.
Must not: know who sends what to whom.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from rl_jax.learner.batch import Batch
from rl_jax.metrics import Metric

Arrays = tuple[np.ndarray, ...]


def batch_to_wire(batch: Batch) -> tuple[dict[str, Any], Arrays]:
    """(body, arrays) of a whole batch with its extras."""
    own = {f.name: getattr(batch, f.name) for f in fields(Batch) if f.name != "extras"}
    own = {name: array for name, array in own.items() if array is not None}
    extras = dict(batch.extras)
    return {"own": list(own), "extras": list(extras)}, (*own.values(), *extras.values())


def batch_from_wire(body: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Batch:
    """Raises: ValueError where the arrays are not those that the body names."""
    own, extras = body["own"], body["extras"]
    if len(arrays) != len(own) + len(extras):
        raise ValueError(f"{len(arrays)} arrays came for a batch of {len(own) + len(extras)}")
    named = dict(zip(own, arrays))
    return Batch(**named, extras=dict(zip(extras, arrays[len(own) :], strict=True)))


def metrics_to_wire(metrics: Mapping[str, Metric]) -> tuple[list[str], Arrays]:
    """(names, (f64[n, 4] sum, count, min, max, and bool[n, 2] whether min and max were recorded))."""
    rows = [(m.sum, m.count, m.min or 0.0, m.max or 0.0) for m in metrics.values()]
    known = [(m.min is not None, m.max is not None) for m in metrics.values()]
    shape = (len(metrics), -1)
    return list(metrics), (
        np.array(rows, np.float64).reshape(len(metrics), 4),
        np.array(known, bool).reshape(shape if metrics else (0, 2)),
    )


def metrics_from_wire(names: Sequence[str], arrays: Sequence[np.ndarray]) -> dict[str, Metric]:
    values, known = arrays
    return {
        name: Metric(total, count, low if has_low else None, high if has_high else None)
        for name, (total, count, low, high), (has_low, has_high) in zip(
            names, values.tolist(), known.tolist(), strict=True
        )
    }


def pieces_to_wire(arrays: Iterable[Any]) -> tuple[list[Any], Arrays]:
    """([[array, [[start, stop] of each dimension]] of each piece], the pieces): of jax arrays, what of them this
    process alone shall send. Every element is in one piece of one process."""
    places, pieces = [], []
    for number, array in enumerate(arrays):
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                bounds = zip(shard.index, array.shape, strict=True)
                places.append([number, [list(part.indices(size)[:2]) for part, size in bounds]])
                pieces.append(np.asarray(shard.data))
    return places, tuple(pieces)


def whole_from_wire(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], sent: Iterable[tuple[Any, Arrays]]
) -> list[np.ndarray]:
    """Arrays of these shapes and dtypes from the pieces of all processes. Raises: ValueError where they do not cover
    them."""
    whole = [np.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    covered = [0] * len(whole)
    for places, pieces in sent:
        for (number, bounds), piece in zip(places, pieces, strict=True):
            whole[number][tuple(slice(*bound) for bound in bounds)] = piece
            covered[number] += piece.size
    if odd := [i for i, num in enumerate(covered) if num != whole[i].size]:
        first = odd[0]
        raise ValueError(
            f"{covered[first]} of {whole[first].size} elements of array {first} came from the learner's processes"
        )
    return whole
