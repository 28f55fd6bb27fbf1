"""Moves one bucket of parameters that train in other processes to every server: fetched to the driver's host once.

Elsewhere stands for the params: shapes, dtypes and shardings of arrays whose devices are not ours, and what gives their
bits. FetchCopy sends them: to a server of this process onto its devices, to others as host arrays, which their proxies
send on.
Invariants: as of host_copy.py. Nothing here shares memory with what trains.
Must not: wait for a server, or know what fetches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rl_jax.types import Digest
from rl_jax.weights.packed_copy import Arrays
from rl_jax.weights.plan import SyncPlan

# (names, shapes, served dtypes) -> the whole arrays
Fetch = Callable[[Sequence[str], Sequence[Sequence[int]], Sequence[np.dtype]], Sequence[np.ndarray]]


class Elsewhere(Mapping[str, jax.ShapeDtypeStruct]):
    """The params of another process's train mesh."""

    def __init__(
        self,
        abstract: Mapping[str, jax.ShapeDtypeStruct],
        fetch: Fetch,
        digest: Callable[[str], Digest],
    ):
        """abstract: with shardings on an abstract mesh. digest: of a served dtype. Both may raise SourceLost."""
        self._abstract, self.fetch, self.digest = dict(abstract), fetch, digest

    def __getitem__(self, name: str) -> jax.ShapeDtypeStruct:
        return self._abstract[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._abstract)

    def __len__(self) -> int:
        return len(self._abstract)


class FetchCopy:
    """A transport for params that are an Elsewhere."""

    def __init__(self, plan: SyncPlan):
        self.plan = plan

    def send(
        self, params: Elsewhere, names: Sequence[str], targets: Sequence[str]
    ) -> dict[str, Arrays]:
        """As PackedCopy.send. Raises: what fetching raises."""
        planned = [self.plan.parameters[name] for name in names]
        whole = params.fetch(names, [p.shape for p in planned], [p.served for p in planned])
        arrays: dict[str, Any] = dict(zip(names, whole, strict=True))
        out = {}
        for name in targets:
            target = self.plan.targets[name]
            if isinstance(target.mesh, Mesh):
                out[name] = jax.device_put(arrays, {n: target.shardings[n] for n in names})
            else:
                out[name] = dict(arrays)
        return out
