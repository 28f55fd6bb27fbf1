"""SyncPlan: buckets and what is refused at the start."""

from types import SimpleNamespace

import pytest

from rl_jax.weights.plan import _buckets


def test_every_parameter_is_in_one_bucket_within_its_bytes(kit):
    train = kit.train_side(kit.devices[:2], {"fsdp": 2})
    server = kit.FakeServer("decode.0", kit.devices[4:6], {"tensor": 2})
    for limit in (1, 100, 5000, 1 << 30):
        plan = kit.make_plan(train, [server], bucket_bytes=limit)
        names = [n for b in plan.buckets for n in b.names]
        assert names == list(train.params)
        assert all(b.num_bytes <= limit or len(b.names) == 1 for b in plan.buckets)
        assert sum(b.num_bytes for b in plan.buckets) == plan.num_bytes
    assert len(plan.buckets) == 1
    assert "8 parameters" in plan.describe()
    assert "decode.0: " in plan.describe()


def test_equal_layers_make_equal_buckets(kit):
    """So that they compile once; a layer is cut only where it is larger than a bucket."""
    sizes = {
        "embed": 90,
        **{f"layers.{i}.{n}": s for i in range(3) for n, s in (("a", 30), ("b", 20))},
        "head": 40,
    }
    for limit, want in (
        (50, [1, 2, 2, 2, 1]),
        (100, [1, 4, 3]),
        (140, [3, 5]),
        (30, [1, 1, 1, 1, 1, 1, 1, 1]),
        (1000, [8]),
    ):
        buckets = _buckets(
            {n: SimpleNamespace(name=n, num_bytes=s) for n, s in sizes.items()}, limit
        )
        assert [len(b.names) for b in buckets] == want
        assert [n for b in buckets for n in b.names] == list(sizes)


def test_bytes_are_counted_in_the_served_dtype(kit):
    train = kit.train_side(kit.devices[:2], {"fsdp": 2})
    server = kit.FakeServer("decode.0", kit.devices[4:6], {"tensor": 2})
    full, half = (
        kit.make_plan(train, [server], dtype=d).num_bytes for d in ("float32", "bfloat16")
    )
    assert full == 2 * half


def test_all_errors_are_found_at_once_with_names_and_remedies(kit):
    train = kit.train_side(kit.devices[:2], {"fsdp": 2})
    server = kit.FakeServer("prefill.0", kit.devices[:5], {"tensor": 5}, kind="prefill")
    del server.param_shardings["bias"]
    server.param_shardings["extra"] = server.param_shardings["norm"]
    with pytest.raises(ValueError) as error:
        kit.make_plan(train, [server], bucket_bytes=0)
    text = str(error.value)
    for part in (
        "weights.bucket_bytes=0",
        "no decode server among ['prefill.0']",
        "prefill.0: no sharding for parameter bias",
        "prefill.0: sharding for extra, which the model does not have",
        "prefill.0: parameter up dimension 1 (mlp) = 36 is not divisible by mesh axes tensor = 5;"
        " change the axis size or the rule for mlp",
    ):
        assert part in text


def test_a_repeated_name_and_a_foreign_mesh_are_refused(kit):
    train = kit.train_side(kit.devices[:2], {"fsdp": 2})
    a = kit.FakeServer("decode.0", kit.devices[4:6], {"tensor": 2})
    b = kit.FakeServer("decode.0", kit.devices[4:6], {"tensor": 2})
    b.param_shardings = kit.shardings(train.mesh, kit.SERVE)
    with pytest.raises(ValueError, match="(?s)server names repeat.*parameter embed is placed by"):
        kit.make_plan(train, [a, b])
