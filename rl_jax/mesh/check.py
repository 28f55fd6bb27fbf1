"""Everything that can be wrong with a MeshPlan: one line each, with the numbers and the remedy."""

from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import TYPE_CHECKING

from rl_jax.mesh.rules import AXES, KINDS, LOGICAL_AXES, TOGETHER, Rules, cut, ranges
from rl_jax.settings import PoolSettings

if TYPE_CHECKING:
    from rl_jax.mesh.plan import MeshPlan, ServerPlan, TrainPlan

Sizes = Mapping[str, tuple[str, int]]  # logical axis -> (its setting, its size; 0 = unknown)


def plan_errors(plan: "MeshPlan", num_devices: int, sizes: Sizes, trains: bool = True) -> list[str]:
    """All errors of the plan on num_devices devices, for dimensions of these sizes. trains: one pool must."""
    errors = _pool_errors(plan.pools, trains) + _device_errors(plan, num_devices)
    errors += _rule_errors("train", plan.rules_train) + _rule_errors("serve", plan.rules_serve)
    if any(size < 1 for pool in plan.pools for size in (pool.replicas, *pool.axes.values())):
        return errors  # there are no meshes to look at
    for server in plan.servers:
        errors += mesh_errors(server, sizes, "serve")
    if plan.train is not None:
        errors += mesh_errors(plan.train, sizes)
    return list(dict.fromkeys(errors))  # replicas of one pool say the same


def mesh_errors(mesh: "TrainPlan | ServerPlan", sizes: Sizes, side: str = "train") -> list[str]:
    """What keeps dimensions of these sizes from lying on one mesh. Roles are checked by it, each with its own model."""
    where = (mesh.pool, side, mesh.axes, mesh.rules)
    return _divide_errors(*where, sizes) + _unused_errors(*where)


def _pool_errors(pools: Sequence[PoolSettings], needs_train: bool) -> list[str]:
    """What is wrong with single pools, and which kinds are missing."""
    errors = [error for pool in pools for error in _one_pool_errors(pool)]
    names = [pool.name for pool in pools]
    for name in sorted({n for n in names if names.count(n) > 1}):
        errors.append(f"mesh: {names.count(name)} pools are named {name!r}; rename all but one")
    trains = [pool.name for pool in pools if pool.kind in ("train", "colocated")]
    if len(trains) > 1 or (needs_train and not trains):
        errors.append(
            f"mesh: {len(trains)} pools train ({', '.join(trains) or 'none'}) but one must; "
            "have exactly one pool of kind train or colocated"
        )
    if not any(pool.kind in ("decode", "colocated") for pool in pools):
        errors.append("mesh: no pool decodes; add one of kind decode or colocated")
    return errors


def _one_pool_errors(pool: PoolSettings) -> list[str]:
    where, errors = f"mesh pool {pool.name}", []
    num_devices = pool.devices if isinstance(pool.devices, int) else len(pool.devices)
    if pool.kind not in KINDS:
        errors.append(f"{where}: kind={pool.kind!r} is unknown; use one of {', '.join(KINDS)}")
    if pool.kv_heads not in ("replicate", "error"):
        errors.append(f"{where}: kv_heads={pool.kv_heads!r} is unknown; use replicate or error")
    for axis, size in pool.axes.items():
        if axis not in AXES:
            errors.append(f"{where}: axis {axis!r} is unknown; use one of {', '.join(AXES)}")
        elif size < 1:
            errors.append(f"{where}: axis {axis}={size} must be at least 1")
    if num_devices < 1 or pool.replicas < 1:
        errors.append(
            f"{where}: devices={num_devices} and replicas={pool.replicas} must be at least 1"
        )
    elif pool.kind in ("train", "role") and pool.replicas != 1:
        errors.append(
            f"{where}: replicas={pool.replicas} but there is one {pool.kind} mesh; "
            f"set replicas=1 and axes data={pool.replicas}"
        )
    elif num_devices != (needed := pool.replicas * (product := prod(pool.axes.values()))):
        errors.append(
            f"{where}: {pool.replicas} replica(s) x axes {cut(pool.axes)} ({product}) need "
            f"{needed} device(s) but it has {num_devices}; set devices={needed} or change the axes"
        )
    return errors


def _device_errors(plan: "MeshPlan", num_devices: int) -> list[str]:
    """Devices that are not there, or that two pools claim."""
    errors, owner = [], {}
    if plan.num_devices > num_devices:
        errors.append(
            f"mesh {plan.name}: needs {plan.num_devices} devices but {num_devices} are present; "
            "use a smaller mesh config, or on CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={plan.num_devices}"
        )
    for pool, devices in zip(plan.pools, plan.placed):
        where = f"mesh pool {pool.name}"
        outside = [d for d in devices if not 0 <= d < num_devices]
        if outside:
            errors.append(
                f"{where}: device(s) {ranges(outside)} are outside 0..{num_devices - 1}; "
                "use indices of present devices, or a count"
            )
        if len(set(devices)) < len(devices):
            errors.append(f"{where}: devices {ranges(devices)} name a device twice; name it once")
        for other in sorted({owner[d] for d in devices if owner.get(d, pool.name) != pool.name}):
            shared = [d for d in devices if owner.get(d) == other]
            errors.append(
                f"{where}: device(s) {ranges(shared)} also belong to pool {other}; give each pool "
                "its own, or make one pool of kind colocated"
            )
        owner |= {d: pool.name for d in devices if d not in owner}
    return errors


def _rule_errors(side: str, rules: Rules) -> list[str]:
    """Names nobody knows, and mesh axes that would be used twice in one array."""
    errors, table = [], dict(rules)
    for logical, axes in rules:
        if logical not in LOGICAL_AXES:
            known = ", ".join(LOGICAL_AXES)
            errors.append(f"mesh rules_{side}: logical axis {logical!r} is unknown; use {known}")
        errors += [
            f"mesh rules_{side}: {logical} -> {axis!r} is no mesh axis; use {', '.join(AXES)}"
            for axis in axes
            if axis not in AXES
        ]
    for group in TOGETHER:
        used = [axis for logical in group for axis in table.get(logical, ())]
        for axis in sorted({a for a in used if used.count(a) > 1}):
            by = " and ".join(name for name in group if axis in table.get(name, ()))
            errors.append(
                f"mesh rules_{side}: {axis} splits one array twice, by its axes {by}; "
                "change one of these rules"
            )
    return errors


def _divide_errors(
    pool: str,
    side: str,
    axes: Mapping[str, int],
    rules: Rules,
    sizes: Sizes,
) -> list[str]:
    """Dimensions that a rule does not divide."""
    errors = []
    for logical, mesh_axes in rules:
        name, size = sizes.get(logical, ("", 0))
        split = prod(axes.get(axis, 1) for axis in mesh_axes)
        if not size or size % split == 0:
            continue
        fits = gcd(size, split)
        remedy = f"make the split {fits} or {name} a multiple of {split}"
        if logical == "kv_heads":
            remedy += ", or set kv_heads: replicate on the pool"
        errors.append(
            f"mesh pool {pool}: {'*'.join(mesh_axes)}={split} does not divide {name}={size} "
            f"(rules_{side}: {logical}); {remedy}"
        )
    return errors


def _unused_errors(pool: str, side: str, axes: Mapping[str, int], rules: Rules) -> list[str]:
    """Mesh axes that split nothing: their devices would repeat the same work."""
    used = {axis for _, mesh_axes in rules for axis in mesh_axes}
    return [
        f"mesh pool {pool}: {axis}={size} splits nothing, as no rule of rules_{side} names it: "
        f"its devices would repeat one another; set {axis}=1, use replicas, or add a rule"
        for axis, size in axes.items()
        if size > 1 and axis not in used
    ]
