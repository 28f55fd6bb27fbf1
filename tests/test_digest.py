"""kernels/digest.py: the two sums, against plain numpy, in every sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels import digest


def digest_ref(x: np.ndarray) -> tuple[int, int]:
    """The definition, word for word, in uint64 (products stay below 2^64 because bits and weights are below 2^32)."""
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]
    bits = np.ascontiguousarray(x).reshape(-1).view(unsigned).astype(np.uint64)
    weight = (2 * np.arange(x.size, dtype=np.uint64) + 1) % 2**32
    first = int(((bits * weight) % 2**32).sum() % 2**32)
    second = int((((bits ^ (bits >> np.uint64(7))) * weight) % 2**32).sum() % 2**32)
    return first, second


def as_ints(values) -> dict[str, tuple[int, int]]:
    return {name: (int(v[0]), int(v[1])) for name, v in values.items()}


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "matrix": rng.normal(size=(8, 12)).astype(np.float32),
        "half": rng.normal(size=(4, 8, 6)).astype(jnp.bfloat16),
        "vector": rng.normal(size=(16,)).astype(np.float32),
        "one": np.array([3.5], np.float32),
        "scalar": np.array(-1.25, np.float32),
        "ints": rng.integers(-9, 9, size=(4, 4)).astype(np.int32),
        "bytes": rng.integers(-9, 9, size=(8,)).astype(np.int8),
        "mask": rng.integers(0, 2, size=(8, 2)).astype(bool),
        "empty": np.zeros((0, 4), np.float32),
        "special": np.array([np.nan, -0.0, 0.0, np.inf], np.float32),
    }


def test_digest_equals_the_definition(params):
    got = as_ints(digest.digest_arrays({n: jnp.array(x) for n, x in params.items()}))
    assert got == {n: digest_ref(x) for n, x in params.items()}


def test_hand_value():
    x = jnp.array([1, 2, 256], jnp.int32)  # 1*1 + 2*3 + 256*5; 256 ^ (256 >> 7) = 258
    assert as_ints(digest.digest_arrays({"x": x})) == {"x": (1287, 1 + 6 + 258 * 5)}


@pytest.mark.parametrize(
    ("shape", "matrix", "half"),
    [
        ((4, 2), ("a", "b"), ("b", "a", None)),
        ((2, 4), (None, "b"), (None, "b", "a")),
        ((2, 2), (("a", "b"), None), (("b", "a"),)),
        ((8, 1), ("a",), ()),
    ],
)
def test_digest_is_the_same_in_any_sharding(params, shape, matrix, half):
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("a", "b"))
    specs = {"matrix": matrix, "half": half}
    placed = {
        n: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*specs.get(n, ()))))
        for n, x in params.items()
    }
    assert as_ints(digest.digest_arrays(placed)) == {n: digest_ref(x) for n, x in params.items()}


def test_cast_digest_is_the_digest_of_the_cast_array(params):
    floats = {n: params[n] for n in ("matrix", "vector", "ints")}
    got = digest.digest_arrays({n: jnp.array(x) for n, x in floats.items()}, dtype="bfloat16")
    want = {
        n: digest_ref(x if x.dtype == np.int32 else x.astype(jnp.bfloat16))
        for n, x in floats.items()
    }
    assert as_ints(got) == want


def test_every_bit_and_every_swap_of_two_elements_is_visible():
    x = np.random.default_rng(1).normal(size=(32,)).astype(np.float32)
    seen = {digest_ref(x)}
    flips = [
        x.view(np.uint32) ^ np.where(np.arange(32) == i, np.uint32(1 << b), np.uint32(0))
        for i in (0, 7, 31)
        for b in range(32)
    ]
    swaps = [x[np.r_[1, 0, 2:32]], x[::-1], np.roll(x, 1)]
    stacked = jnp.array(np.stack([f.view(np.float32) for f in flips] + swaps))
    block = jax.jit(jax.vmap(lambda row: digest.partial_digest(row, 0, (1,))))(stacked)
    for row in np.asarray(block):
        seen.add((int(row[0]), int(row[1])))
    assert len(seen) == 1 + len(flips) + len(swaps)


def test_replica_that_differs_is_named():
    devices = jax.devices()[:2]
    mesh = Mesh(np.array(devices), ("a",))
    good, bad = np.ones((4,), np.float32), np.array([1, 1, 2, 1], np.float32)
    shards = [jax.device_put(good, devices[0]), jax.device_put(bad, devices[1])]
    x = jax.make_array_from_single_device_arrays((4,), NamedSharding(mesh, PartitionSpec()), shards)
    with pytest.raises(
        digest.ReplicasDiffer, match="parameter w: .*0.* and .*1.* hold the same shard"
    ):
        digest.digest_arrays({"w": x})


def test_parameters_of_two_meshes_are_refused():
    a = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("a",)), PartitionSpec())
    b = NamedSharding(Mesh(np.array(jax.devices()[2:4]), ("a",)), PartitionSpec())
    params = {"x": jax.device_put(np.ones(2), a), "y": jax.device_put(np.ones(2), b)}
    with pytest.raises(ValueError, match="parameter y lies on"):
        digest.digest_arrays(params)


def test_digest_program_has_no_collective():
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, PartitionSpec("a")))
    program = digest._program(mesh, (PartitionSpec("a"),), None)
    text = program.lower((x,)).compile().as_text()
    assert not any(
        word in text for word in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    )


def test_digest_of_all_depends_on_names_and_values_and_not_on_their_order():
    values = {"a": (1, 2), "b": np.array([3, 4], np.uint32)}
    word = digest.of_all(values)
    assert word == digest.of_all({"b": (3, 4), "a": (1, 2)}) and len(word) == 32
    others = ({"a": (1, 2), "b": (3, 5)}, {"a": (1, 2), "c": (3, 4)}, {"a": (1, 2)})
    assert all(digest.of_all(other) != word for other in others)
