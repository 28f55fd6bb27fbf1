"""SyncPlan: everything about a sync that is known before the first step, checked once.

Owns: names, shapes, dtypes, shardings on both sides, the byte-sized buckets, and per target where each of its shards
comes from. A plan that builds can be carried out: every error is found here, all at once, with the parameter's name.
Invariants: every parameter is in exactly one bucket, in the model's order; a bucket holds at least one parameter and at
most `bucket_bytes`, unless one parameter alone is larger; floating parameters are served in `dtype`, others as trained.
Must not: touch arrays.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from rl_jax.settings import WeightSettings
from rl_jax.weights.layout import Piece, SourceLayout, pieces, same_layout, source_layout

Axes = Mapping[str, tuple[str | None, ...]]


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    trained: jnp.dtype  # dtype on the train mesh
    served: jnp.dtype
    source: NamedSharding

    @property
    def num_bytes(self) -> int:
        """As served, one copy."""
        return math.prod(self.shape) * self.served.itemsize


@dataclass(frozen=True)
class Bucket:
    index: int
    names: tuple[str, ...]
    num_bytes: int  # as served, one copy


@dataclass(frozen=True)
class Staging:
    """One layout on the source mesh; targets with equal layouts share it."""

    layout: SourceLayout
    shardings: Mapping[str, NamedSharding]  # of every parameter
    as_is: frozenset[
        str
    ]  # parameters the train state already holds so, in the served dtype: nothing to compute


@dataclass(frozen=True)
class Route:
    """How one target is reached."""

    target: str
    staging: int  # index into SyncPlan.stagings
    shardings: Mapping[str, NamedSharding]  # on the target's mesh
    whole: frozenset[str]  # parameters copied as one array: shard i to shard i, disjoint devices
    pieces: Mapping[str, tuple[Piece, ...]]  # of the others, per target device
    num_bytes: int  # that arrive, over all of the target's devices


@dataclass(frozen=True)
class SyncPlan:
    parameters: Mapping[str, Parameter]
    buckets: tuple[Bucket, ...]
    stagings: tuple[Staging, ...]
    routes: Mapping[str, Route]  # by target name
    train_mesh: Mesh
    dtype: jnp.dtype  # of served floating parameters

    @classmethod
    def build(
        cls,
        abstract: Mapping[str, jax.ShapeDtypeStruct],
        logical_axes: Axes,
        train_mesh: Mesh,
        train_shardings: Mapping[str, NamedSharding],
        targets: Sequence[Any],
        dtype: Any,
        settings: WeightSettings,
    ) -> "SyncPlan":
        """Args: abstract, logical_axes: of the trained model. targets: SyncTargets (name, mesh, param_shardings).
        dtype: of served floating weights. Raises: ValueError listing everything that is wrong."""
        errors = _errors(abstract, logical_axes, train_mesh, train_shardings, targets, settings)
        if errors:
            raise ValueError("weight sync cannot be planned:\n" + "\n".join(errors))
        parameters = {
            name: Parameter(
                name,
                tuple(a.shape),
                jnp.dtype(a.dtype),
                _served(a.dtype, dtype),
                train_shardings[name],
            )
            for name, a in abstract.items()
        }
        stagings, routes = _routes(parameters, train_mesh, targets)
        buckets = _buckets(parameters, settings.bucket_bytes)
        return cls(parameters, buckets, stagings, routes, train_mesh, jnp.dtype(dtype))

    @property
    def num_bytes(self) -> int:
        """Of one served copy."""
        return sum(p.num_bytes for p in self.parameters.values())

    def describe(self) -> str:
        """One line a target, for the log at start."""
        head = f"weights: {len(self.parameters)} parameters, {self.num_bytes / 1e6:.1f} MB, {len(self.buckets)} buckets"
        lines = [
            f"  {r.target}: layout {r.staging}, {r.num_bytes / 1e6:.1f} MB over {len(_devices(r))} devices,"
            f" {len(r.whole)} parameters shard to shard, {len(r.pieces)} by pieces"
            for r in self.routes.values()
        ]
        return "\n".join([head, *lines])


def _devices(route: Route) -> set:
    return {d for s in route.shardings.values() for d in s.device_set}


def _served(trained: Any, dtype: Any) -> jnp.dtype:
    return jnp.dtype(dtype) if jnp.issubdtype(trained, jnp.floating) else jnp.dtype(trained)


def _buckets(parameters: Mapping[str, Parameter], bucket_bytes: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    names: list[str] = []
    size = 0
    for p in parameters.values():
        if names and size + p.num_bytes > bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(names), size))
            names, size = [], 0
        names.append(p.name)
        size += p.num_bytes
    return (*buckets, Bucket(len(buckets), tuple(names), size))


def _routes(
    parameters: Mapping[str, Parameter], train_mesh: Mesh, targets: Sequence[Any]
) -> tuple[tuple[Staging, ...], dict[str, Route]]:
    """Stagings shared by targets whose shards lie alike, and each target's route out of its staging."""
    stagings: dict[tuple, Staging] = {}
    turns: dict[tuple, int] = {}  # targets of a staging so far: the next takes the next replica
    routes = {}
    for target in targets:
        layout = source_layout(train_mesh, target.mesh)
        shardings = {
            name: layout.sharding(target.param_shardings[name], p.shape)
            for name, p in parameters.items()
        }
        apart = not set(layout.mesh.devices.flat) & set(target.mesh.devices.flat)
        key = (layout.mesh, tuple(shardings.items()), apart)
        turn = turns.setdefault(key, 0)
        turns[key] += 1
        if key not in stagings:
            # A server on train devices keeps what is staged: it must own a copy, for the learner donates its state.
            as_is = _as_is(parameters, shardings) if apart else frozenset()
            stagings[key] = Staging(layout, shardings, as_is)
        staging = list(stagings).index(key)
        routes[target.name] = _route(parameters, target, staging, stagings[key], apart, turn)
    return tuple(stagings.values()), routes


def _as_is(
    parameters: Mapping[str, Parameter], shardings: Mapping[str, NamedSharding]
) -> frozenset[str]:
    return frozenset(
        name
        for name, p in parameters.items()
        if p.served == p.trained and same_layout(p.source, shardings[name], p.shape)
    )


def _route(
    parameters: Mapping[str, Parameter],
    target: Any,
    index: int,
    staging: Staging,
    apart: bool,
    turn: int,
) -> Route:
    whole, cut, num_bytes = set(), {}, 0
    for name, p in parameters.items():
        here, there = staging.shardings[name], target.param_shardings[name]
        num_bytes += math.prod(there.shard_shape(p.shape)) * p.served.itemsize * target.mesh.size
        if apart and same_layout(here, there, p.shape):
            whole.add(name)
        else:
            cut[name] = pieces(here, there, p.shape, staging.layout.parts, turn)
    return Route(target.name, index, dict(target.param_shardings), frozenset(whole), cut, num_bytes)


def _errors(abstract, logical_axes, train_mesh, train_shardings, targets, settings) -> list[str]:
    errors = []
    if settings.bucket_bytes < 1:
        errors.append(f"weights.bucket_bytes={settings.bucket_bytes} must be at least 1")
    if not abstract:
        errors.append("the model has no parameters")
    names = [t.name for t in targets]
    if len(set(names)) < len(names):
        errors.append(
            f"server names repeat: {', '.join(sorted(names))}; every server needs a name of its own"
        )
    if not any(t.kind == "decode" for t in targets):
        errors.append(f"no decode server among {names}; add a decode or colocated pool to the mesh")
    errors += _side_errors("train mesh", abstract, logical_axes, train_mesh, train_shardings)
    for t in targets:
        errors += _side_errors(t.name, abstract, logical_axes, t.mesh, t.param_shardings)
    return errors


def _side_errors(side, abstract, logical_axes, mesh, shardings) -> list[str]:
    """What is wrong with one mesh's shardings."""
    errors = [f"{side}: no sharding for parameter {n}" for n in abstract if n not in shardings]
    errors += [
        f"{side}: sharding for {n}, which the model does not have"
        for n in shardings
        if n not in abstract
    ]
    for name, a in abstract.items():
        sharding = shardings.get(name)
        if sharding is None:
            continue
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            errors.append(
                f"{side}: parameter {name} is placed by {sharding}, not on the mesh {mesh}"
            )
        elif len(sharding.spec) > len(a.shape):
            errors.append(
                f"{side}: parameter {name} of shape {a.shape} has more spec entries: {sharding.spec}"
            )
        else:
            errors += _divide_errors(side, name, a.shape, logical_axes.get(name, ()), sharding)
    return errors


def _divide_errors(side, name, shape, axes, sharding) -> list[str]:
    errors = []
    for dim, entry in enumerate(sharding.spec):
        mesh_axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        ways = math.prod(sharding.mesh.shape[a] for a in mesh_axes)
        if shape[dim] % ways:
            meaning = axes[dim] if dim < len(axes) else None
            errors.append(
                f"{side}: parameter {name} dimension {dim} ({meaning}) = {shape[dim]} is not divisible by mesh axes"
                f" {'*'.join(mesh_axes)} = {ways}; change the axis size or the rule for {meaning}"
            )
    return errors
