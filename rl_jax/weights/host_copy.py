"""Moves one bucket of trained parameters to servers of other processes: once to the host, whatever their number.

HostCopy casts the bucket to the served dtype where it lies and starts its copy to the host; every target gets the same
arrays, which its proxy brings to its process (remote/carriers.py). ByPlace gives each target what suits it: those of
this process what one of TRANSPORTS gives.
Invariants: what is sent never shares memory with the train state (the learner donates that); a bucket of new shapes
compiles once.
Must not: wait, know how a process is reached, or what a target's layout is (the process lays out what it gets).
"""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rl_jax.weights.packed_copy import Arrays, PackedCopy
from rl_jax.weights.plan import SyncPlan
from rl_jax.weights.reshard_copy import ReshardCopy


class HostCopy:
    """A transport for targets whose mesh is another process's."""

    def __init__(self, plan: SyncPlan, is_fetched: bool = True):
        """is_fetched: whether the host needs the arrays, so that their copies to it start at once."""
        self.plan, self._is_fetched = plan, is_fetched

    def send(
        self, params: Mapping[str, jax.Array], names: Sequence[str], targets: Sequence[str]
    ) -> dict[str, Arrays]:
        """As PackedCopy.send, but the arrays lie on the train mesh, on their way to the host if it needs them, and are
        shared."""
        dtypes = tuple(self.plan.parameters[name].served.name for name in names)
        cast = dict(zip(names, cast_copies([params[name] for name in names], dtypes), strict=True))
        for array in cast.values() if self._is_fetched else ():
            array.copy_to_host_async()
        return {target: dict(cast) for target in targets}


TRANSPORTS = {"packed": PackedCopy, "reshard": ReshardCopy}
DEFAULT = "packed"


class ByPlace:
    """The transport of a plan whatever its targets are."""

    def __init__(self, plan: SyncPlan, transport: str = DEFAULT):
        """transport: of settings.WeightSettings; what is none of TRANSPORTS is of processes, and DEFAULT here."""
        self._is_here = {name: isinstance(t.mesh, Mesh) for name, t in plan.targets.items()}
        here = [name for name, is_here in self._is_here.items() if is_here]
        self._here = TRANSPORTS[transport if transport in TRANSPORTS else DEFAULT](plan, here)
        self._elsewhere = HostCopy(plan, is_fetched=transport != "transfer")

    def send(
        self, params: Mapping[str, jax.Array], names: Sequence[str], targets: Sequence[str]
    ) -> dict[str, Arrays]:
        """As PackedCopy.send."""
        here = [name for name in targets if self._is_here[name]]
        there = [name for name in targets if not self._is_here[name]]
        sent = self._here.send(params, names, here) if here else {}
        return sent | (self._elsewhere.send(params, names, there) if there else {})


@partial(jax.jit, static_argnums=1)
def cast_copies(arrays: list[jax.Array], dtypes: tuple[str, ...]) -> list[jax.Array]:
    """The arrays in these dtypes where they lie; never the arrays themselves."""
    # Without the copy jit would hand an array of that dtype back as it came, and the learner donates it.
    return [jnp.copy(array.astype(dtype)) for array, dtype in zip(arrays, dtypes)]
