"""Regions: what was told comes out, bit by bit and in memory of its own, or an error that says why not."""

import os
import resource
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rl_jax.mesh import make_mesh
from rl_jax.remote import region
from rl_jax.remote.framing import DTYPES
from rl_jax.remote.region import NoRoom, NotHere, Region, Torn


@pytest.fixture
def made():
    """made(size) -> a region, closed at the end."""
    regions = []

    def make(size):
        regions.append(Region(size))
        return regions[-1]

    yield make
    for one in regions:
        one.close()


def put(one, arrays, bucket=0, sync_id="v0.1"):
    stamp = one.fill(sync_id, 0, bucket, arrays)
    return one.told(stamp, region.describe(arrays))


def test_arrays_of_every_dtype_and_shape_come_back_bit_by_bit(made):
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 2 if name == "bool" else 256, 24 * dtype.itemsize, np.uint8).view(dtype).reshape(2, 3, 4)
        for name, dtype in DTYPES.items()
    }  # fmt: skip
    arrays |= {"scalar": np.array(-7, np.int32), "one": np.array([np.nan], np.float32)}
    got = region.take(put(made(1 << 16), arrays))
    assert list(got) == list(arrays)
    for name, want in arrays.items():
        assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape)
        assert got[name].tobytes() == want.tobytes()


@pytest.mark.parametrize("spec", [("fsdp", None), (None, "fsdp"), (None, None)])
def test_sharded_array_is_written_part_by_part_each_once(made, spec):
    mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])
    want = np.arange(96, dtype=np.float32).reshape(8, 12)
    array = jax.device_put(want.copy(), NamedSharding(mesh, PartitionSpec(*spec)))
    shards = region.shards({"up": array})
    assert sum(part.data.size for shard in shards for part in shard) == want.size
    assert len(shards) == (2 if "fsdp" in spec else 1)
    got = region.take(put(made(1 << 10), {"up": array}))
    np.testing.assert_array_equal(got["up"], want)


def test_what_was_taken_is_not_changed_by_the_next_bucket(made):
    """JAX uses host memory in place on a CPU where it is aligned so."""
    one, (first, second) = made(1 << 20), (np.full(1 << 16, i, np.float32) for i in (1, 2))
    placed = jax.device_put(region.take(put(one, {"up": first}))["up"])
    put(one, {"up": second}, bucket=1)
    np.testing.assert_array_equal(np.asarray(placed), first)


def test_older_bucket_is_not_taken_for_the_one_that_is_there(made):
    one, array = made(1 << 10), {"up": np.ones(8, np.float32)}
    old = put(one, array)
    again = put(one, array)  # the same arrays, sync, version and bucket
    with pytest.raises(Torn, match=r"bucket 0 of sync v0\.1 is not, or no more, in its region"):
        region.take(old)
    assert region.take(again)["up"].tolist() == [1] * 8
    one.begin()
    with pytest.raises(Torn):
        region.take(again)


def test_damage_behind_the_stamp_is_found(made):
    one = made(3 << 20)
    told = put(one, {"up": np.ones(1 << 19, np.float32)})
    one._bytes[region.HEADER + (1 << 20) + 5] ^= 1
    with pytest.raises(Torn, match="the checksum of bucket 0"):
        region.take(told)


@pytest.mark.slow
def test_reader_beside_a_writer_gets_a_whole_bucket_or_an_error(made):
    one, stop = made(8 << 20), threading.Event()
    told, taken, torn = [put(one, {"up": np.zeros(1 << 20, np.float32)})], 0, 0

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            told[0] = put(one, {"up": np.full(1 << 20, number, np.float32)}, bucket=number)
            time.sleep(0.001)

    writer = threading.Thread(target=write)
    writer.start()
    end = time.monotonic() + 10
    while time.monotonic() < end and (taken < 5 or torn < 5):
        this = told[0]
        try:
            values = np.unique(region.take(this)["up"])
            assert values.tolist() == [this["stamp"]["bucket"]]
            taken += 1
        except Torn:
            torn += 1
    stop.set()
    writer.join()
    assert taken >= 5 and torn >= 5


def test_what_is_no_region_or_another_one_is_not_read(made, tmp_path):
    one, array = made(1 << 10), {"up": np.ones(8, np.float32)}
    told = put(one, array)
    with pytest.raises(NotHere, match="is another region"):
        region.take({**told, "at": made(1 << 10).address | {"key": told["at"]["key"]}})
    with (tmp_path / "file").open("w") as file, pytest.raises(NotHere, match="is no region"):
        region.reach(told["at"] | {"fd": file.fileno()})
    with pytest.raises(NotHere, match="there is no region at /proc/4194303/fd/"):
        region.reach(told["at"] | {"pid": 4194303})
    one.close()
    with pytest.raises(NotHere):
        region.take(told)


def test_others_cannot_write_or_cut_a_region(made):
    one = made(1 << 10)
    told = put(one, {"up": np.ones(8, np.float32)})
    fd = os.open(f"/proc/{os.getpid()}/fd/{one.address['fd']}", os.O_RDWR)
    for change in (lambda: os.pwrite(fd, b"x", region.HEADER), lambda: os.ftruncate(fd, 8)):
        with pytest.raises(PermissionError):
            change()
    os.close(fd)
    assert region.take(told)["up"].tolist() == [1] * 8


def test_region_takes_nothing_of_dev_shm_and_its_memory_is_given_back():
    def mapped():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))

    shm, fds = os.statvfs("/dev/shm").f_bfree, len(os.listdir("/proc/self/fd"))
    before = mapped()
    one = Region(32 << 20)
    put(one, {"up": np.ones(8 << 20, np.float32)})
    assert mapped() >= before + (32 << 10) and os.statvfs("/dev/shm").f_bfree >= shm - 1000
    one.close()
    assert mapped() <= before and len(os.listdir("/proc/self/fd")) == fds


def test_region_that_does_not_fit_is_refused_in_one_line_and_leaves_nothing():
    fds = len(os.listdir("/proc/self/fd"))
    assert 0 < region.free_bytes() < 1 << 50
    with pytest.raises(NoRoom, match="does not fit: 2,000 bytes of memory are free") as caught:
        Region(10_000, free=2_000)
    assert "\n" not in str(caught.value)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(NoRoom, match=r"of 2,097,152 bytes does not come to be: File too large"):
            Region(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == fds


def test_part_of_another_shape_or_dtype_is_refused(made):
    one, described = made(1 << 10), [["up", "float32", [4]]]
    for data in (np.ones(4, np.float64), np.ones(2, np.float32)):
        with pytest.raises(ValueError, match=r"is no part \(\(0, 4\),\) of up"):
            one.write(described, [region.Part("up", ((0, 4),), data)])
