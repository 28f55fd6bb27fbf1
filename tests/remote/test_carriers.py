"""Carriers: which way a server's buckets take, and how the driver's two regions are shared by its readers."""

import threading
import time

import numpy as np
import pytest

from rl_jax.remote import region
from rl_jax.remote.carriers import Carriers, SharedBuckets
from rl_jax.remote.channel import Answer
from rl_jax.remote.store import Load


@pytest.fixture
def shared():
    buckets = SharedBuckets()
    yield buckets
    buckets.close()


ARRAYS = {i: {"up": np.full(1000, i, np.float32)} for i in range(4)}


def load(bucket, left_s=5.0, sync_id="v0.1"):
    return Load(sync_id, 0, bucket, ARRAYS[bucket], time.monotonic() + left_s)


def value(told):
    return float(region.take(told)["up"][0])


def test_readers_of_one_bucket_share_what_was_written_once(shared):
    with shared.lend(load(0)) as one, shared.lend(load(0)) as two:
        assert one == two and value(one) == 0
    with shared.lend(load(0)) as later:
        assert later == one
    with shared.lend(load(0, sync_id="v0.2")) as other:
        assert other != one and other["stamp"]["sync_id"] == "v0.2"


def test_other_arrays_of_one_bucket_are_another_bucket(shared):
    with shared.lend(load(0)) as one:
        changed = Load("v0.1", 0, 0, {"up": np.full(1000, 9, np.float32)}, time.monotonic() + 5)
        with shared.lend(changed) as other:
            assert (value(one), value(other)) == (0, 9)


def test_region_that_is_read_is_not_written_and_who_finds_none_is_sent_elsewhere(shared):
    with shared.lend(load(0)) as zero, shared.lend(load(1)) as one:
        start = time.monotonic()
        with shared.lend(load(2, left_s=0.8)) as none:
            assert none is None
        assert 0.15 < time.monotonic() - start < 0.7  # a quarter of what is left
        assert (value(zero), value(one)) == (0, 1)
    with shared.lend(load(2)) as two:
        assert value(two) == 2
    with pytest.raises(region.Torn):
        region.take(one)
    assert value(zero) == 0  # what was given back last is kept longest


def test_who_waits_gets_the_region_that_gets_free(shared):
    got = []

    def wait():
        with shared.lend(load(2)) as told:
            got.append(value(told))

    with shared.lend(load(0)):
        with shared.lend(load(1)):
            waiting = threading.Thread(target=wait)
            waiting.start()
            time.sleep(0.05)
            assert not got
        waiting.join(5)
    assert got == [2]


def test_regions_grow_to_the_largest_bucket_and_are_kept(shared):
    for size in (1000, 300_000, 1000, 300_000):
        arrays = {"up": np.ones(size, np.float32)}
        with shared.lend(Load("v0.1", 0, size, arrays, time.monotonic() + 5)) as told:
            assert len(region.take(told)["up"]) == size
    assert 1_200_000 < shared.num_bytes < 3_000_000


def test_close_waits_for_nobody_and_frees_what_is_read_afterwards(shared):
    with shared.lend(load(0)) as told:
        shared.close()
        assert value(told) == 0
    with pytest.raises(region.NotHere):
        region.take(told)
    with shared.lend(load(1)) as none:
        assert none is None and shared.address is None


class Process:
    """A channel to a process that sees the regions in `seen` only, and what it was asked to stage."""

    def __init__(self, *seen):
        self.seen, self.staged = [address["key"] for address in seen], []

    def call(self, verb, body, arrays=(), **more):
        if verb == "reach":
            return Answer({"why": "" if body["at"]["key"] in self.seen else "another host"}, ())
        self.staged.append(
            "region" if "region" in body else [np.asarray(a).tolist() for a in arrays]
        )
        return Answer(None, ())


class FakeStore:
    """A store that is up, by a region of this process."""

    def __init__(self, name):
        self.name, self.refused, self.placed, self.gone = name, "", [], []
        self._shown = region.Region(0)
        self.address = self._shown.address

    def place(self, server, load):
        self.placed.append((server, load.bucket))
        return {"of": self.name}, load.num_bytes

    def over(self, server, sync_id):
        self.gone.append((server, sync_id))


def test_each_server_goes_the_first_way_that_reaches_it(shared):
    stores = [FakeStore("store.0"), FakeStore("store.1")]
    here, there, nowhere = Process(shared.address), Process(stores[1].address), Process()
    carriers = Carriers("auto", stores, shared)
    sent = [
        carriers.carry(name, process, load(0))
        for name, process in (("decode.0", here), ("decode.1", there), ("decode.2", nowhere))
    ]
    assert sent == [0, 4000, 4000]
    assert (here.staged, there.staged) == (["region"], ["region"])
    assert nowhere.staged == [[ARRAYS[0]["up"].tolist()]]
    assert (stores[0].placed, stores[1].placed) == ([], [("decode.1", 0)])
    carriers.over("decode.1", "v0.1")
    assert stores[1].gone == [("decode.1", "v0.1")]


def test_way_is_kept_for_a_sync_and_picked_anew_for_the_next(shared):
    store = FakeStore("store.0")
    process, carriers = Process(store.address), Carriers("store", [store], shared)
    carriers.carry("decode.0", process, load(0))
    store.address = None
    carriers.carry("decode.0", process, load(1))
    assert process.staged == ["region"] * 2
    carriers.carry("decode.0", process, load(2, sync_id="v0.2"))
    assert process.staged[2] != "region" and store.placed == [("decode.0", 0), ("decode.0", 1)]


def test_way_that_was_asked_for_and_is_not_there_is_told_once(shared, caplog):
    process, carriers = Process(), Carriers("shared", shared=shared)
    for bucket in (0, 1):
        assert carriers.carry("decode.0", process, load(bucket)) == 4000
    carriers.carry("decode.0", process, load(2, sync_id="v0.2"))
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert line == (
        "decode.0 gets its weights over its channel (weights.transport=shared): no shared memory: another host"
    )
