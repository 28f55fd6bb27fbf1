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

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from rl_jax.weights.layout import Box, same_layout
from rl_jax.weights.plan import Parameter, Route, Staging, SyncPlan

Arrays = dict[str, jax.Array]


class DeviceCopy:
    """The transport for meshes of one process. Owns the compiled programs; a bucket shape compiles once."""

    def __init__(self, plan: SyncPlan):
        self.plan = plan
        self._programs: dict[tuple, jax.stages.Wrapped] = {}

    def send(
        self, params: Mapping[str, jax.Array], names: Sequence[str], targets: Sequence[str]
    ) -> dict[str, Arrays]:
        """Args:    params: the train state's, placed as planned. names: of one bucket. targets: server names.
        Returns: per target name -> array on its mesh; still being computed and copied when this returns.
        """
        routes = [self.plan.routes[t] for t in targets]
        staged = {
            index: self._stage(self.plan.stagings[index], params, names)
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
                    self.plan.stagings[route.staging].shardings[n],
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
