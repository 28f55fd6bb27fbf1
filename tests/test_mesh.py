"""MeshPlan: where pools land, what is refused and in which words, which meshes come out."""

import subprocess
import sys
from dataclasses import replace

import jax
import pytest
from jax.sharding import PartitionSpec

from kernels.kv import KVSpec
from rl_jax.mesh import (
    AXES,
    SERVE_RULES,
    TRAIN_RULES,
    MeshPlan,
    build_meshes,
    merge_rules,
    partition_spec,
    shardings,
)
from rl_jax.models.decoder import build_model
from rl_jax.settings import (
    EngineSettings,
    LearnerSettings,
    MeshSettings,
    ModelSettings,
    PoolSettings,
)
from rl_jax.testing.tiny_model import tiny_settings

MODEL = ModelSettings()  # 4 heads, 2 kv heads, embed 96, mlp 256
SPLIT = (
    PoolSettings("prefill", "prefill", devices=2, replicas=2),
    PoolSettings("decode", "decode", devices=2, replicas=2),
    PoolSettings("train", "train", devices=4, axes={"data": 2, "fsdp": 2}),
)


def plan_of(*pools: PoolSettings, model: ModelSettings | None = None, **rules) -> MeshPlan:
    return MeshPlan.from_settings(MeshSettings("test", pools, **rules), model)


def errors_of(*pools: PoolSettings, num_devices: int = 8, model=MODEL, **rules) -> list[str]:
    return plan_of(*pools, model=model, **rules).check(model, num_devices, LearnerSettings())


def split_with(index: int, **changes) -> tuple[PoolSettings, ...]:
    """SPLIT with one pool changed."""
    return tuple(replace(p, **changes) if i == index else p for i, p in enumerate(SPLIT))


# --- placing -------------------------------------------------------------------------------------


def test_counts_take_the_next_free_devices():
    plan = plan_of(*SPLIT)
    assert {s.name: s.devices for s in plan.servers} == {
        "prefill.0": (0,),
        "prefill.1": (1,),
        "decode.0": (2,),
        "decode.1": (3,),
    }
    assert plan.train.devices == (4, 5, 6, 7)
    assert plan.num_devices == 8
    assert plan.check(MODEL, 8, LearnerSettings(), EngineSettings(), 264) == []


def test_counts_step_round_devices_that_a_later_pool_lists():
    pools = split_with(2, devices=(0, 2), axes={"fsdp": 2})
    plan = plan_of(*pools)
    assert [s.devices for s in plan.servers] == [(1,), (3,), (4,), (5,)]
    assert plan.check(MODEL, 8) == []


def test_device_order_is_kept():
    plan = plan_of(*split_with(2, devices=(7, 5, 6, 4)))
    assert plan.train.devices == (7, 5, 6, 4)
    train = build_meshes(plan).train
    assert [d.id for d in train.devices.ravel()] == [7, 5, 6, 4]


def test_colocated_pool_serves_and_trains_on_the_same_devices():
    pool = PoolSettings("all", "colocated", devices=8, replicas=4, axes={"tensor": 2})
    plan = plan_of(pool)
    assert [s.devices for s in plan.servers] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {s.kind for s in plan.servers} == {"colocated"}
    assert plan.train.devices == tuple(range(8))
    assert plan.train.axes == {"data": 4, "fsdp": 1, "tensor": 2, "expert": 1, "context": 1}
    meshes = build_meshes(plan)
    for i, server in enumerate(plan.servers):  # a server is one row of the train mesh
        row = meshes.train.devices[i].ravel().tolist()
        assert row == meshes.servers[server.name].devices.ravel().tolist()


def test_pools_for_prefers_the_tag_then_the_untagged_then_any():
    decode = PoolSettings("decode", "decode")
    plan = plan_of(
        PoolSettings("prefill", "prefill", tags=("sums",)),
        decode,
        replace(decode, name="long", tags=("sums", "maze")),
        PoolSettings("train", "train"),
    )
    assert plan.pools_for("sums") == ("prefill", "long")
    assert plan.pools_for("lake") == ("prefill", "decode")


def test_describe_has_a_line_for_each_server_and_the_train_mesh():
    lines = plan_of(*SPLIT).describe().splitlines()
    assert lines[0] == "mesh test: 8 device(s)"
    cells = [line.split() for line in lines[2:]]
    assert cells[0] == ["prefill.0", "prefill", "0", "-", "cpu", "any"]
    assert cells[-1] == ["train", "train", "4-7", "data=2", "fsdp=2", "cpu"]
    assert len(cells) == 5


def test_roles_have_pools_and_meshes_of_their_own_or_share_the_train_mesh():
    pools = (*SPLIT, PoolSettings("judge", "role", devices=2, axes={"fsdp": 2}))
    plan = plan_of(*pools)
    assert plan.describe().splitlines()[-1].split() == ["judge", "role", "8-9", "fsdp=2", "cpu"]
    assert plan.role("judge", MODEL).devices == (8, 9)
    assert plan.role("", MODEL) == plan.train
    assert plan.check_role("judge", MODEL, LearnerSettings()) == []
    (error,) = plan.check_role("judge", replace(MODEL, embed_size=33), LearnerSettings())
    assert "pool judge" in error and "model.embed_size=33" in error
    with pytest.raises(KeyError):
        plan.role("decode", MODEL)
    small = plan_of(
        *SPLIT[:2], replace(SPLIT[2], devices=1, axes={}), replace(pools[3], devices=(6, 7))
    )
    meshes = build_meshes(small)
    assert meshes.roles[""] is meshes.train
    assert [d.id for d in meshes.roles["judge"].devices.ravel()] == [6, 7]


# --- refusing ------------------------------------------------------------------------------------


def decode_tensor(tensor: int, **changes) -> tuple[PoolSettings, ...]:
    return split_with(1, devices=tensor, replicas=1, axes={"tensor": tensor}, **changes)


@pytest.mark.parametrize(
    "pools, parts",
    [
        ((*SPLIT[:2], replace(SPLIT[2], devices=8)), ["pool train", "need 4", "has 8"]),
        (split_with(1, devices=12, replicas=12), ["needs 18 devices but 8 are present"]),
        (split_with(1, devices=3), ["pool decode", "2 replica(s)", "need 2", "has 3"]),
        (
            (replace(SPLIT[0], devices=(0, 1)), replace(SPLIT[1], devices=(1, 2)), SPLIT[2]),
            ["pool decode", "device(s) 1 also belong to pool prefill"],
        ),
        (split_with(0, devices=(0, 9)), ["pool prefill", "9 are outside 0..7"]),
        (split_with(0, devices=(-1, 0)), ["pool prefill", "-1 are outside"]),
        (split_with(0, devices=(0, 0)), ["pool prefill", "twice"]),
        (split_with(0, devices=0), ["pool prefill", "devices=0", "at least 1"]),
        (split_with(1, replicas=0), ["pool decode", "replicas=0", "at least 1"]),
        (split_with(1, kind="decoder"), ["kind='decoder'", "prefill, decode, train, colocated"]),
        (split_with(1, name="prefill"), ["2 pools are named 'prefill'"]),
        (split_with(2, axes={"fdsp": 4}), ["'fdsp' is unknown", "fsdp"]),
        (split_with(2, axes={"fsdp": 0}), ["fsdp=0 must be at least 1"]),
        (split_with(2, replicas=2), ["pool train", "replicas=2", "one train mesh"]),
        ((*SPLIT, PoolSettings("r", "role", 2, 2)), ["pool r", "replicas=2", "one role mesh"]),
        (split_with(1, kv_heads="copy"), ["kv_heads='copy'", "replicate or error"]),
        (SPLIT[:2], ["0 pools train (none)", "train or colocated"]),
        ((SPLIT[0], SPLIT[2]), ["no pool decodes"]),
        ((*SPLIT, PoolSettings("all", "colocated")), ["2 pools train (train, all)"]),
        (decode_tensor(4), ["tensor=4", "model.num_kv_heads=2", "kv_heads: replicate"]),
        (decode_tensor(3), ["tensor=3", "model.num_heads=4", "multiple of 3"]),
        (split_with(1, axes={"fsdp": 2}, replicas=1), ["fsdp=2 splits nothing", "replicas"]),
        (split_with(2, devices=3, axes={"data": 3}), ["data*fsdp=3", "microbatch_rows=8"]),
        (split_with(2, devices=10**12), ["pool train", "1000000000000"]),
    ],
)
def test_plan_that_does_not_fit_is_refused_with_the_numbers(pools, parts):
    errors = errors_of(*pools)
    assert any(all(part in error for part in parts) for error in errors), errors
    assert all("\n" not in error for error in errors)


def test_all_errors_come_at_once_and_once():
    errors = errors_of(*split_with(1, kind="x", replicas=3), num_devices=4)
    for part in ("kind='x'", "3 replica(s)", "8 devices but 4", "outside 0..3", "no pool decodes"):
        assert sum(part in error for error in errors) == 1, (part, errors)


@pytest.mark.parametrize(
    "rules, parts",
    [
        ({"rules_train": (("embd", "fsdp"),)}, ["rules_train", "'embd' is unknown", "embed"]),
        ({"rules_serve": (("heads", "tp"),)}, ["rules_serve", "'tp' is no mesh axis", "tensor"]),
        ({"rules_train": (("embed", ("fsdp", "tensor")),)}, ["tensor splits one array twice"]),
    ],
)
def test_rules_nobody_can_follow_are_refused(rules, parts):
    errors = errors_of(*SPLIT, **rules)
    assert any(all(part in error for part in parts) for error in errors), errors


def test_embed_vocab_and_slots_are_checked_against_their_splits():
    model = replace(MODEL, embed_size=95)
    pools = split_with(1, devices=4, replicas=1, axes={"data": 2, "tensor": 2})
    plan = plan_of(*pools)
    errors = plan.check(model, 10, engine=EngineSettings(slots=3), vocab_size=263)
    for part in ("model.embed_size=95", "model.vocab_size=263", "engine.slots=3"):
        assert any(part in error for error in errors), (part, errors)
    assert plan.check(MODEL, 10, vocab_size=264) == []


def test_kv_heads_are_replicated_only_where_asked_and_needed():
    pools = decode_tensor(4, kv_heads="replicate")
    plan = plan_of(*pools, model=MODEL)
    assert plan.check(MODEL, 10) == []
    server = next(s for s in plan.servers if s.pool == "decode")
    assert dict(server.rules)["kv_heads"] == ()
    assert dict(server.rules)["heads"] == ("tensor",)
    assert "decode.0: kv heads are replicated" in plan.describe()

    divides = plan_of(*pools, model=replace(MODEL, num_kv_heads=4))
    server = next(s for s in divides.servers if s.pool == "decode")
    assert dict(server.rules)["kv_heads"] == ("tensor",)


# --- rules and meshes ----------------------------------------------------------------------------


def test_a_rule_replaces_the_default_of_its_axis_only():
    rules = dict(merge_rules(TRAIN_RULES, [("embed", ["data", "fsdp"]), ("mlp", None)]))
    assert rules["embed"] == ("data", "fsdp")
    assert rules["mlp"] == ()
    assert rules["heads"] == ("tensor",)


def test_partition_specs_follow_the_rules():
    assert partition_spec(("embed", "heads", "head_dim"), TRAIN_RULES) == PartitionSpec(
        "fsdp", "tensor", None
    )
    assert partition_spec(("embed", "heads"), SERVE_RULES) == PartitionSpec(None, "tensor")
    assert partition_spec(("batch", None), TRAIN_RULES) == PartitionSpec(("data", "fsdp"), None)
    assert partition_spec(("norm",), TRAIN_RULES) == PartitionSpec(None)


def test_meshes_have_all_axes_and_auto_types():
    meshes = build_meshes(plan_of(*SPLIT))
    assert set(meshes.servers) == {"prefill.0", "prefill.1", "decode.0", "decode.1"}
    assert meshes.train.axis_names == meshes.servers["decode.0"].axis_names == AXES
    assert dict(meshes.train.shape) == {
        "data": 2,
        "fsdp": 2,
        "tensor": 1,
        "expert": 1,
        "context": 1,
    }
    assert set(meshes.train.axis_types) == {jax.sharding.AxisType.Auto}
    assert meshes.servers["decode.1"].devices.ravel().tolist() == [jax.devices()[3]]


def test_too_few_devices_are_refused_when_building():
    with pytest.raises(ValueError, match="needs 8 devices"):
        build_meshes(plan_of(*SPLIT), jax.devices()[:4])


def test_every_weight_of_a_checked_model_can_be_placed():
    settings = tiny_settings(qkv_bias=True, qk_norm=True, tie_embeddings=False)
    plan = plan_of(*split_with(1, replicas=1, axes={"tensor": 2}))
    assert plan.check(settings, 8, vocab_size=264) == []
    model, meshes = build_model(settings, 264), build_meshes(plan)
    for rules, mesh in (
        (plan.train.rules, meshes.train),
        (plan.servers[2].rules, meshes.servers["decode.0"]),
    ):
        for name, sharding in shardings(model.logical_axes, rules, mesh).items():
            sharding.shard_shape(model.abstract[name].shape)  # raises where it does not divide


def test_checking_a_plan_imports_no_jax():
    code = (
        "import sys; from rl_jax.mesh import MeshPlan; from rl_jax.settings import *;"
        "MeshPlan.from_settings(MeshSettings()).check(ModelSettings(), 1);"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_kv_spec_sizes():
    spec = KVSpec(2, 3, 8, page_size=16, num_pages=5, dtype="bfloat16")
    assert spec.shape == (5, 16, 3, 8)
    assert spec.token_bytes == 2 * 2 * 3 * 8 * 2
    assert spec.num_bytes == 5 * 16 * spec.token_bytes
    assert [spec.pages_of(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert spec.same_pages(replace(spec, num_pages=1))
    assert not spec.same_pages(replace(spec, page_size=64))
    assert not spec.same_pages(replace(spec, dtype="float32"))
    with pytest.raises(ValueError, match="layout='slots'"):
        replace(spec, layout="slots")
