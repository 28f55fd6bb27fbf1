import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rl_jax.mesh import make_mesh
from rl_jax.serve.transfer import move, same_layout, tokens_sha

SHAPE = (4, 8, 2, 6)


def sharding(first, axes, spec):
    n = int(np.prod(list(axes.values())))
    return NamedSharding(make_mesh(axes, jax.devices()[first : first + n]), PartitionSpec(*spec))


ONE = (0, {}, ())
HEADS = (0, {"tensor": 2}, (None, None, "tensor"))
ELSEWHERE = {
    "one": (4, {}, ()),
    "heads": (4, {"tensor": 2}, (None, None, "tensor")),
    "copies": (4, {"data": 2}, ()),
    "both": (4, {"data": 2, "tensor": 2}, (None, None, "tensor")),
}


@pytest.mark.parametrize("source", [ONE, HEADS])
@pytest.mark.parametrize("target", ELSEWHERE)
def test_what_arrives_is_what_was_sent(source, target):
    source, target = sharding(*source), sharding(*ELSEWHERE[target])
    host = [np.random.default_rng(i).normal(size=SHAPE).astype("f4") for i in range(4)]
    kv = tuple(jax.device_put(jnp.array(x), source) for x in host)
    kv = ((kv[0], kv[1]), (kv[2], kv[3]))
    moved = move(kv, source, target)
    for got, sent, want in zip(jax.tree.leaves(moved), jax.tree.leaves(kv), host):
        assert got.sharding == target
        np.testing.assert_array_equal(np.asarray(got), want)
        np.testing.assert_array_equal(np.asarray(sent), want)  # the source stays valid


def test_equal_layouts_are_recognised_by_what_the_shards_hold():
    one, heads = sharding(*ONE), sharding(*HEADS)
    assert same_layout(one, sharding(*ELSEWHERE["one"]), SHAPE)
    assert same_layout(heads, sharding(*ELSEWHERE["heads"]), SHAPE)
    assert not same_layout(heads, sharding(*ELSEWHERE["copies"]), SHAPE)
    assert not same_layout(one, sharding(*ELSEWHERE["heads"]), SHAPE)


def test_nothing_moves_within_one_mesh():
    one = sharding(*ONE)
    kv = ((jax.device_put(jnp.ones(SHAPE), one),) * 2,)
    assert move(kv, one, one) is kv


def test_hash_is_of_the_tokens_only():
    assert tokens_sha(np.array([1, 2], np.int64)) == tokens_sha(np.array([1, 2], np.int32))
    assert tokens_sha(np.array([1, 2])) != tokens_sha(np.array([2, 1]))
