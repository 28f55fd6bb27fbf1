"""SyncPlan: everything about a sync that is known before the first step, checked once.

Owns: names, shapes, dtypes, shardings on both sides, and the byte-sized buckets. A plan that builds can be carried out
by any transport: every error is found here, all at once, with the parameter's name.
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
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from rl_jax.mesh import as_tuple
from rl_jax.settings import WeightSettings

Axes = Mapping[str, tuple[str | None, ...]]


class SyncPlanError(ValueError):
    """A model, a mesh and servers between which weights cannot move."""


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
class Target:
    """One server as the plan knows it."""

    name: str
    mesh: Mesh | AbstractMesh  # abstract where its devices are another process's
    shardings: Mapping[str, NamedSharding]  # of every parameter, on its mesh
    num_bytes: int  # as served, over all its devices


@dataclass(frozen=True)
class SyncPlan:
    parameters: Mapping[str, Parameter]
    buckets: tuple[Bucket, ...]
    targets: Mapping[str, Target]
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
        dtype: of served floating weights. Raises: SyncPlanError listing everything that is wrong."""
        errors = _errors(abstract, logical_axes, train_mesh, train_shardings, targets, settings)
        if errors:
            raise SyncPlanError("weight sync cannot be planned:\n" + "\n".join(errors))
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
        buckets = _buckets(parameters, settings.bucket_bytes)
        planned = {t.name: _target(t, parameters) for t in targets}
        return cls(parameters, buckets, planned, train_mesh, jnp.dtype(dtype))

    @property
    def num_bytes(self) -> int:
        """Of one served copy."""
        return sum(p.num_bytes for p in self.parameters.values())

    def describe(self) -> str:
        """One line a target, for the log at start."""
        head = (
            f"weights: {len(self.parameters)} parameters, {self.num_bytes / 1e6:.1f} MB as {self.dtype},"
            f" {len(self.buckets)} buckets of at most {max(b.num_bytes for b in self.buckets) / 1e6:.1f} MB"
        )
        lines = [
            f"  {t.name}: {t.num_bytes / 1e6:.1f} MB over {t.mesh.size} devices"
            for t in self.targets.values()
        ]
        return "\n".join([head, *lines])


def _target(target: Any, parameters: Mapping[str, Parameter]) -> Target:
    places = {name: target.param_shardings[name] for name in parameters}
    num_bytes = sum(
        math.prod(places[name].shard_shape(p.shape)) * p.served.itemsize * target.mesh.size
        for name, p in parameters.items()
    )
    return Target(target.name, target.mesh, places, num_bytes)


def _served(trained: Any, dtype: Any) -> jnp.dtype:
    return jnp.dtype(dtype) if jnp.issubdtype(trained, jnp.floating) else jnp.dtype(trained)


def _buckets(parameters: Mapping[str, Parameter], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Parameters in order. A layer is not cut where it fits, so that buckets of equal layers compile once."""
    layers: dict[str, list[Parameter]] = {}
    for p in parameters.values():
        layers.setdefault(_layer(p.name), []).append(p)
    buckets: list[Bucket] = []
    for layer in layers.values():
        size = sum(p.num_bytes for p in layer)
        joins = buckets and size <= bucket_bytes - buckets[-1].num_bytes
        for p in layer:
            last = buckets[-1] if buckets else None
            fits = last is not None and last.num_bytes + p.num_bytes <= bucket_bytes
            if last is None or not fits or (not joins and p is layer[0]):
                buckets.append(Bucket(len(buckets), (p.name,), p.num_bytes))
            else:
                buckets[-1] = Bucket(
                    last.index, (*last.names, p.name), last.num_bytes + p.num_bytes
                )
    return tuple(buckets)


def _layer(name: str) -> str:
    """The name up to its first number: all of "layers.3"; a name without one is its own."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else name


def _errors(abstract, logical_axes, train_mesh, train_shardings, targets, settings) -> list[str]:
    errors = []
    if settings.bucket_bytes < 1:
        errors.append(f"weights.bucket_bytes={settings.bucket_bytes} must be at least 1")
    if not abstract:
        errors.append("the model has no parameters")
    errors += [
        f"parameter {n} of shape {a.shape} is empty" for n, a in abstract.items() if 0 in a.shape
    ]
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
        mesh_axes = as_tuple(entry)
        ways = math.prod(sharding.mesh.shape[a] for a in mesh_axes)
        if shape[dim] % ways:
            meaning = axes[dim] if dim < len(axes) else None
            errors.append(
                f"{side}: parameter {name} dimension {dim} ({meaning}) = {shape[dim]} is not divisible by mesh axes"
                f" {'*'.join(mesh_axes)} = {ways}; change the axis size or the rule for {meaning}"
            )
    return errors
