"""Moves one bucket of trained parameters into fresh arrays on every target, in two phases.

1. One compiled program on the train mesh casts to the served dtype and lays the parameters out as the target wants
   them, over the train mesh's own devices (layout.py); targets with equal layouts share its result. A parameter that
   already lies so, in the served dtype, skips this phase.
2. Shards are copied device to device and assembled on the target's mesh. Where a target has more devices than the
   source, its shards are first sliced out on the source device, so only the target's bytes cross.
Everything is dispatched and nothing waited for: the collective of bucket i + 1 overlaps the copies of bucket i.

Invariants: what a target gets never shares memory with the train state (the learner donates that); the copies are
between equal layouts only, because `device_put` across layouts is a hundred times slower and blocks; nothing is donated
across meshes (it frees nothing, and the CPU backend crashes).
Must not: wait, retry or know about versions; that is sync.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from rl_jax.weights.layout import Box, Piece, SourceLayout, pieces, same_layout, source_layout
from rl_jax.weights.plan import Parameter, SyncPlan, Target

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Staging:
    """One layout on the source mesh; targets with equal layouts share it."""

    layout: SourceLayout
    shardings: Mapping[str, NamedSharding]  # of every parameter
    as_is: frozenset[str]  # parameters the train state holds so, in the served dtype: nothing to do


@dataclass(frozen=True)
class Route:
    """How one target is reached."""

    target: str
    staging: int  # index into the transport's stagings
    shardings: Mapping[str, NamedSharding]  # on the target's mesh
    whole: frozenset[str]  # parameters copied as one array: shard i to shard i, disjoint devices
    pieces: Mapping[str, tuple[Piece, ...]]  # of the others, per target device


class ReshardCopy:
    """A transport for meshes of one process. Owns the compiled programs; a bucket of new shapes compiles once."""

    def __init__(self, plan: SyncPlan, targets: Sequence[str] | None = None):
        """targets: as of PackedCopy."""
        self.plan = plan
        names = plan.targets if targets is None else targets
        self.stagings, self.routes = _routes(plan, [plan.targets[name] for name in names])
        self._programs: dict[tuple, jax.stages.Wrapped] = {}

    def send(
        self, params: Mapping[str, jax.Array], names: Sequence[str], targets: Sequence[str]
    ) -> dict[str, Arrays]:
        """Args:    params: the train state's, placed as planned. names: of one bucket. targets: server names.
        Returns: per target name -> array on its mesh; still being computed and copied when this returns.
        """
        routes = [self.routes[t] for t in targets]
        staged = {
            index: self._stage(self.stagings[index], params, names)
            for index in sorted({r.staging for r in routes})
        }
        copies = _Copies()
        waiting = [(r, self._order(r, staged[r.staging], names, copies)) for r in routes]
        arrived = copies.run()
        return {
            route.target: _assemble(self.plan, route, order, arrived) for route, order in waiting
        }

    def _stage(
        self, staging: Staging, params: Mapping[str, jax.Array], names: Sequence[str]
    ) -> Arrays:
        """Phase 1: the bucket in the staging's layout."""
        out = {n: params[n] for n in names if n in staging.as_is}
        moved = [self.plan.parameters[n] for n in names if n not in staging.as_is]
        if moved:
            shardings = tuple(staging.shardings[p.name] for p in moved)
            key = tuple(
                (p.shape, p.trained, p.served, p.source, s)
                for p, s in zip(moved, shardings, strict=True)
            )
            program = self._programs.get(key)
            if program is None:
                program = self._programs[key] = _reshard(moved, shardings)
            out.update(
                zip((p.name for p in moved), program([params[p.name] for p in moved]), strict=True)
            )
        return out

    def _order(
        self, route: Route, staged: Arrays, names: Sequence[str], copies: "_Copies"
    ) -> dict[str, list[int]]:
        """Phase 2, first half: ask for each copy; returns per parameter the tickets of its parts."""
        order: dict[str, list[int]] = {}
        shards = {n: _by_position(staged[n]) for n in names if n not in route.whole}
        cuts = _cut_pieces(route, shards)
        for n in names:
            if n in route.whole:
                assert same_layout(
                    self.stagings[route.staging].shardings[n],
                    route.shardings[n],
                    staged[n].shape,
                ), f"{route.target}: {n} would be resharded by a device_put"
                order[n] = [copies.ask(staged[n], route.shardings[n])]
                continue
            devices = route.shardings[n].mesh.devices.flat
            order[n] = [
                copies.ask(cuts.get((n, t), shards[n][piece.source]), SingleDeviceSharding(device))
                for t, (piece, device) in enumerate(zip(route.pieces[n], devices, strict=True))
            ]
        return order


class _Copies:
    """Same-layout copies collected into one device_put call: its cost on the host is per call and per array."""

    def __init__(self):
        self._arrays: list[jax.Array] = []
        self._places: list[jax.sharding.Sharding] = []

    def ask(self, array: jax.Array, place: jax.sharding.Sharding) -> int:
        """A ticket: index into what run() returns."""
        self._arrays.append(array)
        self._places.append(place)
        return len(self._arrays) - 1

    def run(self) -> list[jax.Array]:
        """Where source and destination are one device, the staged buffer itself: it is nobody else's."""
        return jax.device_put(self._arrays, self._places) if self._arrays else []


def _routes(
    plan: SyncPlan, targets: Sequence[Target]
) -> tuple[tuple[Staging, ...], dict[str, Route]]:
    """Stagings shared by targets whose shards lie alike, and each target's route out of its staging."""
    stagings: dict[tuple, Staging] = {}
    turns: dict[tuple, int] = {}  # targets of a staging so far: the next takes the next replica
    routes = {}
    for target in targets:
        layout = source_layout(plan.train_mesh, target.mesh)
        shardings = {
            name: layout.sharding(target.shardings[name], p.shape)
            for name, p in plan.parameters.items()
        }
        apart = not set(layout.mesh.devices.flat) & set(target.mesh.devices.flat)
        key = (layout.mesh, tuple(shardings.items()), apart)
        turn = turns.setdefault(key, 0)
        turns[key] += 1
        if key not in stagings:
            # A server on train devices keeps what is staged: it must own a copy, for the learner donates its state.
            as_is = _as_is(plan.parameters, shardings) if apart else frozenset()
            stagings[key] = Staging(layout, shardings, as_is)
        staging = list(stagings).index(key)
        routes[target.name] = _route(plan.parameters, target, staging, stagings[key], apart, turn)
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
    target: Target,
    index: int,
    staging: Staging,
    apart: bool,
    turn: int,
) -> Route:
    whole, cut = set(), {}
    for name, p in parameters.items():
        here, there = staging.shardings[name], target.shardings[name]
        if apart and same_layout(here, there, p.shape):
            whole.add(name)
        else:
            cut[name] = pieces(here, there, p.shape, staging.layout.parts, turn)
    return Route(target.name, index, target.shardings, frozenset(whole), cut)


def _assemble(
    plan: SyncPlan, route: Route, order: Mapping[str, list[int]], arrived: Sequence[jax.Array]
) -> Arrays:
    out = {}
    for n, tickets in order.items():
        parts = [arrived[i] for i in tickets]
        if n in route.whole:
            out[n] = parts[0]
        else:
            out[n] = jax.make_array_from_single_device_arrays(
                plan.parameters[n].shape, route.shardings[n], parts
            )
    return out


def _reshard(parameters: Sequence[Parameter], shardings: Sequence[NamedSharding]):
    """jitted: list of trained arrays -> list of served arrays in `shardings`, on the same devices."""

    def reshard(arrays):
        return [_served(x, p) for x, p in zip(arrays, parameters, strict=True)]

    return jax.jit(reshard, out_shardings=list(shardings))


def _served(x: jax.Array, p: Parameter) -> jax.Array:
    if p.served == p.trained:
        return jnp.copy(x)  # jit would hand the input itself back, and the learner donates it
    # The constraint keeps the cast before the collective, so that the narrower dtype crosses.
    return jax.lax.with_sharding_constraint(x.astype(p.served), p.source)


def _by_position(x: jax.Array) -> list[jax.Array]:
    """The single-device shards in the mesh's flat order."""
    by_device = {s.device: s.data for s in x.addressable_shards}
    return [by_device[d] for d in x.sharding.mesh.devices.flat]


def _cut_pieces(
    route: Route, shards: Mapping[str, list[jax.Array]]
) -> dict[tuple[str, int], jax.Array]:
    """(parameter, target position) -> its slice, on the source device; one program a source device."""
    wanted: dict[int, list[tuple[str, int, Box]]] = {}
    for n in shards:
        for t, piece in enumerate(route.pieces[n]):
            if piece.cut is not None:
                wanted.setdefault(piece.source, []).append((n, t, piece.cut))
    out = {}
    for source, asked in wanted.items():
        arrays = [shards[n][source] for n, _, _ in asked]
        cut = _slice_all(arrays, tuple(box for _, _, box in asked))
        out.update({(n, t): x for (n, t, _), x in zip(asked, cut, strict=True)})
    return out


def _slice_all_impl(arrays, cuts):
    return [x[tuple(slice(*r) for r in box)] for x, box in zip(arrays, cuts, strict=True)]


_slice_all = jax.jit(_slice_all_impl, static_argnums=1)
