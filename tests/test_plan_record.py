"""The count of device memory, from shapes alone."""

from dataclasses import replace

import numpy as np

from rl_jax.mesh import MeshPlan
from rl_jax.plan_record import host_memory, memory_rows
from rl_jax.settings import ClusterSettings, MeshSettings, PoolSettings, Settings, WeightSettings
from rl_jax.testing.tiny_model import tiny_model


def rows_of(bucket_bytes):
    pools = (PoolSettings("decode", "decode"), PoolSettings("train", "train"))
    mesh = MeshSettings(pools=pools)
    settings = replace(Settings(), mesh=mesh, weights=WeightSettings(bucket_bytes=bucket_bytes))
    model, _ = tiny_model()
    num = sum(int(np.prod(a.shape)) for a in model.abstract.values())
    return num, memory_rows(MeshPlan.from_settings(mesh), model, settings)


def test_a_sync_is_counted_as_one_more_copy_on_a_server_and_the_buckets_under_way_at_both_ends():
    num, (decode, train) = rows_of(bucket_bytes=10_000)
    name, total, weights, _, kv, sync = decode
    assert (name, weights, sync) == ("decode.0", 4 * num, 4 * num + 30_000)
    assert total == weights + kv + sync
    name, total, weights, state, kv, sync = train
    assert (name, weights, state, kv, sync) == ("train", 4 * num, 12 * num, 0, 30_000)
    assert total == weights + state + sync


def test_no_more_is_under_way_than_there_is():
    num, (decode, train) = rows_of(bucket_bytes=1 << 30)
    assert (decode[-1], train[-1]) == (8 * num, 4 * num)


def test_host_memory_is_two_buckets_of_the_driver_and_a_version_of_each_store():
    model, _ = tiny_model()
    sizes = [4 * int(np.prod(a.shape)) for a in model.abstract.values()]

    def held(backend, transport="auto", stores=0, bucket_bytes=1 << 30):
        weights = WeightSettings(transport=transport, bucket_bytes=bucket_bytes)
        cluster = ClusterSettings(backend=backend, stores=stores)
        return host_memory(model, replace(Settings(), weights=weights, cluster=cluster))

    assert held("inproc") == {}
    assert held("local") == {"driver": 2 * sum(sizes)}
    assert held("local", bucket_bytes=1) == {"driver": 2 * max(sizes)}
    assert held("external", "store", 2) == {"each store": sum(sizes)}
    assert held("external", "channel") == held("local", "transfer") == {}
