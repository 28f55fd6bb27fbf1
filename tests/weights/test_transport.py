"""Conformance of transports: whatever the layouts, exact values arrive, in fresh memory, in the target's sharding."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rl_jax.mesh import make_mesh
from rl_jax.weights.host_copy import TRANSPORTS
from rl_jax.weights.layout import boxes, pieces, source_layout
from rl_jax.weights.packed_copy import PackedCopy, _num_holders, _parts
from rl_jax.weights.plan import Parameter, Target
from rl_jax.weights.reshard_copy import ReshardCopy

# name -> (train axes, [(first device, axes) of each server]); train starts at device 0.
MESHES = {
    "fsdp2_to_tensor2": ({"fsdp": 2}, [(4, {"tensor": 2})]),
    "one_to_two": ({}, [(4, {"tensor": 2})]),
    "three_to_one": ({"data": 3}, [(4, {})]),
    "fsdp3_to_two_servers": ({"fsdp": 3}, [(4, {"tensor": 2}), (6, {})]),
    "overlapping": ({"fsdp": 2}, [(1, {"tensor": 3})]),
    "to_data2_tensor2": ({"fsdp": 2}, [(4, {"data": 2, "tensor": 2})]),
    "colocated": ({"fsdp": 2}, [(0, {"tensor": 2})]),
    "colocated_two_single": ({"data": 2}, [(0, {}), (1, {})]),
}


def pointers(x: jax.Array) -> set[int]:
    return {s.data.unsafe_buffer_pointer() for s in x.addressable_shards if s.data.size}


def servers_of(kit, layouts):
    return [
        kit.FakeServer(
            f"decode.{i}", kit.devices[at : at + int(np.prod(list(axes.values()) or [1]))], axes
        )
        for i, (at, axes) in enumerate(layouts)
    ]


def send_all(transport, plan, train) -> dict[str, dict[str, jax.Array]]:
    out = {name: {} for name in plan.targets}
    for bucket in plan.buckets:
        for name, arrays in transport.send(train.params, bucket.names, list(plan.targets)).items():
            out[name].update(arrays)
    return out


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("meshes", MESHES)
def test_exact_values_arrive_in_the_targets_sharding_and_fresh_memory(kit, transport, meshes):
    axes, layouts = MESHES[meshes]
    size = int(np.prod(list(axes.values()) or [1]))
    train = kit.train_side(kit.devices[:size], axes)
    servers = servers_of(kit, layouts)
    plan = kit.make_plan(train, servers, bucket_bytes=6000)
    got = send_all(TRANSPORTS[transport](plan), plan, train)
    taken = set().union(*(pointers(x) for x in train.params.values()))
    for server in servers:
        for name, want in train.host.items():
            x = got[server.name][name]
            np.testing.assert_array_equal(np.asarray(x), want)
            assert x.sharding == server.param_shardings[name]
            for shard in x.addressable_shards:  # every replica, not only the first
                np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])
            assert not pointers(x) & taken, f"{name} shares memory with the train state"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("meshes", ["fsdp2_to_tensor2", "one_to_two", "colocated"])
def test_cast_arrives_exactly(kit, meshes, transport):
    axes, layouts = MESHES[meshes]
    train = kit.train_side(kit.devices[: 2 if axes else 1], axes)
    servers = servers_of(kit, layouts)
    plan = kit.make_plan(train, servers, dtype="bfloat16")
    got = send_all(TRANSPORTS[transport](plan), plan, train)
    for name, want in train.host.items():
        x = got[servers[0].name][name]
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(x), want.astype(jnp.bfloat16))


def test_collective_moves_the_narrow_dtype(kit):
    """Before optimisation, for XLA:CPU then widens bfloat16 collectives again."""
    train = kit.train_side(kit.devices[:2], {"fsdp": 2})
    plan = kit.make_plan(train, servers_of(kit, [(4, {"tensor": 2})]), dtype="bfloat16")
    transport = ReshardCopy(plan)
    transport.send(train.params, ["up"], ["decode.0"])
    (program,) = transport._programs.values()
    text = program.lower([train.params["up"]]).as_text()
    convert = text.index("stablehlo.convert")
    assert "sharding_constraint" in text[convert:] or "custom_call @Sharding" in text[convert:]


def test_targets_with_one_layout_share_the_collective(kit):
    train = kit.train_side(kit.devices[:4], {"fsdp": 4})
    servers = servers_of(kit, [(4, {"tensor": 2}), (6, {"tensor": 2})])
    transport = ReshardCopy(kit.make_plan(train, servers))
    assert len(transport.stagings) == 1
    firsts = [transport.routes[s.name].pieces["up"][0].source for s in servers]
    assert firsts[0] != firsts[1]  # and each copies from a replica of its own


def test_nothing_is_computed_where_the_layout_and_dtype_are_the_targets(kit):
    train = kit.train_side(kit.devices[:2], {"tensor": 2}, rules=kit.SERVE)
    plan = kit.make_plan(train, servers_of(kit, [(4, {"tensor": 2})]))
    transport = ReshardCopy(plan)
    send_all(transport, plan, train)
    assert transport._programs == {}
    assert transport.routes["decode.0"].whole == set(train.params)


def test_only_the_targets_bytes_cross(kit):
    train = kit.train_side(kit.devices[:1], {})
    plan = kit.make_plan(train, servers_of(kit, [(4, {"tensor": 2})]))
    sharded = sum(
        np.prod(s) * 4 for n, (s, axes) in kit.SHAPES.items() if set(axes) & set(kit.SERVE)
    )
    replicated = sum(
        np.prod(s) * 4 for n, (s, axes) in kit.SHAPES.items() if not set(axes) & set(kit.SERVE)
    )
    assert plan.targets["decode.0"].num_bytes == sharded + 2 * replicated
    assert all(p.cut is not None for p in ReshardCopy(plan).routes["decode.0"].pieces["up"])
    parts = PackedCopy(plan)._parts["decode.0"]["up"]
    assert [[p.cut for p in device] for device in parts] == [
        [((0, 24), (0, 18))],
        [((0, 24), (18, 36))],
    ]


@pytest.mark.slow
def test_any_pair_of_meshes_is_covered_exactly(kit):
    """Pure geometry over many mesh pairs, two-axis specs in both orders included."""
    shape = (24, 24)
    specs = [
        ("data", "tensor"),
        (("data", "tensor"), None),
        (("tensor", "data"), None),
        (None, "tensor"),
        (),
    ]
    cuts = [
        {"data": d, "tensor": t} for d, t in itertools.product((1, 2, 3), (1, 2, 4)) if d * t <= 8
    ]
    for source_axes, target_axes, spec in itertools.product(cuts, cuts, specs):
        count = [int(np.prod(list(a.values()))) for a in (source_axes, target_axes)]
        source = make_mesh(source_axes, kit.devices[: count[0]])
        target = NamedSharding(
            make_mesh(target_axes, kit.devices[-count[1] :]), PartitionSpec(*spec)
        )
        for turn in (0, 1):
            check_reshard(source, target, shape, turn)
            check_packed(NamedSharding(source, PartitionSpec(*specs[turn])), target, shape, turn)


def check_reshard(source, target, shape, turn):
    layout = source_layout(source, target.mesh)
    staged = layout.sharding(target, shape)
    parts = pieces(staged, target, shape, layout.parts, turn)
    for piece, want in zip(parts, boxes(target, shape), strict=True):
        outer = boxes(staged, shape)[piece.source]
        cut = piece.cut or tuple((0, b - a) for a, b in outer)
        assert tuple((o[0] + a, o[0] + b) for o, (a, b) in zip(outer, cut, strict=True)) == want


def check_packed(source, target, shape, turn):
    """Every element of every target shard is filled once, with the element of that global index."""
    p = Parameter("w", shape, np.dtype("f4"), np.dtype("f4"), source)
    server = Target("decode.0", target.mesh, {"w": target}, 0)
    index = np.arange(np.prod(shape)).reshape(shape)
    held, wanted = boxes(source, shape), boxes(target, shape)
    for want, parts in zip(wanted, _parts(p, server, turn, _num_holders(p)), strict=True):
        shard = np.full([b - a for a, b in want], -1)
        for part in parts:
            outer = index[tuple(slice(*r) for r in held[part.source])]
            place = tuple(slice(*r) for r in part.place)
            assert (shard[place] == -1).all()
            shard[place] = outer[tuple(slice(*r) for r in part.cut)]
        assert (shard == index[tuple(slice(*r) for r in want)]).all()


def test_targets_that_want_the_same_parts_share_their_buffers(kit):
    train = kit.train_side(kit.devices[:2], {"fsdp": 2})
    servers = servers_of(kit, [(4, {"tensor": 2}), (6, {"tensor": 2})])
    plan = kit.make_plan(train, servers)
    transport = PackedCopy(plan)
    packings = [
        d.packings for s in servers for d in transport._deliver(s.name, plan.buckets[0].names)
    ]
    assert packings[:2] == packings[2:]
    lone = kit.train_side(kit.devices[:2], {"data": 2})
    transport = PackedCopy(kit.make_plan(lone, servers))
    sources = [transport._parts[s.name]["up"][0][0].source for s in servers]
    assert sources == [0, 1]


def test_source_layout_splits_the_leading_axes(kit):
    layout = source_layout(
        make_mesh({"fsdp": 4}, kit.devices[:4]), make_mesh({"tensor": 8}, kit.devices)
    )
    assert dict(layout.mesh.shape) == {"replicas": 1, "tensor": 4}
    layout = source_layout(
        make_mesh({"fsdp": 4}, kit.devices[:4]), make_mesh({"tensor": 2}, kit.devices[4:6])
    )
    assert dict(layout.mesh.shape) == {"replicas": 2, "tensor": 2}
