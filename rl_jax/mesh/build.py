"""jax meshes of a plan, and shardings on them. jax is imported inside: plans check without it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_jax.mesh.plan import MeshPlan
from rl_jax.mesh.rules import AXES, RulesLike, full_axes, mesh_axes

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Meshes:
    train: "jax.sharding.Mesh"
    servers: Mapping[str, "jax.sharding.Mesh"]  # by ServerPlan.name
    roles: Mapping[str, "jax.sharding.Mesh"]  # by pool, and "" for the train mesh


def build_meshes(plan: MeshPlan, devices: Sequence[Any] | None = None) -> Meshes:
    """The jax meshes of a plan that passed `check`. devices: jax.devices() unless given."""
    import jax

    devices = jax.devices() if devices is None else devices
    if plan.train is None or plan.num_devices > len(devices):
        raise ValueError(
            f"mesh {plan.name} needs {plan.num_devices} devices and a train mesh; "
            f"{len(devices)} devices are present; run MeshPlan.check first"
        )
    train = make_mesh(plan.train.axes, [devices[i] for i in plan.train.devices])
    roles = {r.pool: make_mesh(r.axes, [devices[i] for i in r.devices]) for r in plan.roles}
    return Meshes(train=train, servers=server_meshes(plan, devices), roles={"": train, **roles})


def server_meshes(plan: MeshPlan, devices: Sequence[Any]) -> "Mapping[str, jax.sharding.Mesh]":
    """Meshes.servers alone, of a plan that passed `check` and may have nothing that trains."""
    return {s.name: make_mesh(s.axes, [devices[i] for i in s.devices]) for s in plan.servers}


def make_mesh(axes: Mapping[str, int], devices: Sequence[Any]) -> "jax.sharding.Mesh":
    """One mesh with all of AXES, of Auto type; devices fill it row-major."""
    import numpy as np
    from jax.sharding import AxisType, Mesh

    sizes = tuple(full_axes(axes).values())
    grid = np.empty(len(devices), object)
    grid[:] = list(devices)
    return Mesh(grid.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_mesh(axes: Mapping[str, int]) -> "jax.sharding.AbstractMesh":
    """A mesh as make_mesh's, whose devices are another process's: for shardings and shard shapes alone."""
    from jax.sharding import AbstractMesh, AxisType

    sizes = tuple(full_axes(axes).values())
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition_spec(axes: Sequence[str | None], rules: RulesLike) -> "jax.sharding.PartitionSpec":
    """The PartitionSpec of an array whose dimensions have these logical axes."""
    from jax.sharding import PartitionSpec

    entries = mesh_axes(axes, rules)
    return PartitionSpec(*(e[0] if len(e) == 1 else (e or None) for e in entries))


def named_sharding(
    axes: Sequence[str | None], rules: RulesLike, mesh: "jax.sharding.Mesh"
) -> "jax.sharding.NamedSharding":
    """The sharding on mesh of an array whose dimensions have these logical axes."""
    from jax.sharding import NamedSharding

    return NamedSharding(mesh, partition_spec(axes, rules))


def shardings(
    logical_axes: Mapping[str, Sequence[str | None]], rules: RulesLike, mesh: "jax.sharding.Mesh"
) -> "dict[str, jax.sharding.NamedSharding]":
    """named_sharding of each named array."""
    return {name: named_sharding(axes, rules, mesh) for name, axes in logical_axes.items()}


def constrainer(
    rules: RulesLike, mesh: "jax.sharding.Mesh"
) -> "Callable[[jax.Array, tuple[str | None, ...]], jax.Array]":
    """A function for inside jit that holds an activation to the rules' layout on mesh.

    Without it XLA may answer fsdp-split weights by splitting activations over D.
    """
    import jax

    return lambda x, axes: jax.lax.with_sharding_constraint(x, named_sharding(axes, rules, mesh))
