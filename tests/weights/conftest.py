"""Fixtures of the weights tests: meshes cut from the 8 simulated devices, a bag of parameters, fake servers."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kernels import digest
from rl_jax.mesh import make_mesh
from rl_jax.settings import WeightSettings
from rl_jax.types import Ack, Digest
from rl_jax.weights.plan import SyncPlan

SHAPES = {
    "embed": ((48, 24), ("vocab", "embed")),
    "query": ((24, 12, 4), ("embed", "heads", "head_dim")),
    "bias": ((12, 4), ("heads", "head_dim")),
    "up": ((24, 36), ("embed", "mlp")),
    "down": ((36, 24), ("mlp", "embed")),
    "norm": ((24,), ("embed_norm",)),
    "one": ((1,), (None,)),
    "scalar": ((), ()),
}
TRAIN = {"embed": "fsdp", "mlp": "tensor", "heads": "tensor"}
SERVE = {"vocab": "tensor", "mlp": "tensor", "heads": "tensor"}


def shardings(mesh, rules) -> dict[str, NamedSharding]:
    return {
        name: NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in axes)))
        for name, (_, axes) in SHAPES.items()
    }


class FakeServer:
    """A SyncTarget that only holds arrays. `fault(phase, server)` may raise, wait or change what was staged."""

    def __init__(self, name, devices, axes, kind="decode", rules=SERVE, fault=None):
        self.name, self.kind = name, kind
        self.mesh = make_mesh(axes, devices)
        self.param_shardings = shardings(self.mesh, rules)
        self.staged: dict[str, dict] = {}
        self.params, self.version, self.fenced, self.calls = {}, -1, None, []
        self._fault = fault or (lambda phase, server: None)

    def stage(self, sync_id, version, bucket, arrays):
        self.calls.append(f"stage{bucket}")
        self.staged.setdefault(sync_id, {"version": version, "arrays": {}})["arrays"].update(arrays)
        self._fault("stage", self)

    def digest(self, sync_id):
        self.calls.append("digest")
        self._fault("digest", self)
        values = digest.digest_arrays(self.staged[sync_id]["arrays"])
        return Digest({n: (int(v[0]), int(v[1])) for n, v in values.items()})

    def commit(self, sync_id, kv, deadline_s):
        self.calls.append("commit")
        start = time.monotonic()
        self._fault("commit", self)
        staged = self.staged.pop(sync_id)
        self.params, self.version = staged["arrays"], staged["version"]
        return Ack(self.name, self.version, 0, time.monotonic() - start)

    def discard(self, sync_id):
        self.calls.append("discard")
        self.staged.pop(sync_id, None)

    def fence(self, reason):
        self.fenced = reason


def train_side(devices, axes, seed=0, dtype=np.float32, rules=TRAIN) -> SimpleNamespace:
    """mesh, shardings, host values and placed params of one train mesh."""
    mesh = make_mesh(axes, devices)
    placed = shardings(mesh, rules)
    rng = np.random.default_rng(seed)
    host = {n: rng.normal(size=shape).astype(dtype) for n, (shape, _) in SHAPES.items()}
    # jnp.array copies: device_put of numpy memory may alias it on CPU.
    params = {n: jax.device_put(jnp.array(x), placed[n]) for n, x in host.items()}
    return SimpleNamespace(mesh=mesh, shardings=placed, host=host, params=params)


def make_plan(train, servers, dtype="float32", **settings) -> SyncPlan:
    abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in train.host.items()}
    axes = {n: axes for n, (_, axes) in SHAPES.items()}
    return SyncPlan.build(
        abstract, axes, train.mesh, train.shardings, servers, dtype, WeightSettings(**settings)
    )


@pytest.fixture
def kit() -> SimpleNamespace:
    """The builders above; importmode=importlib keeps test modules from importing each other."""
    return SimpleNamespace(
        SHAPES=SHAPES,
        SERVE=SERVE,
        TRAIN=TRAIN,
        FakeServer=FakeServer,
        train_side=train_side,
        make_plan=make_plan,
        shardings=shardings,
        devices=jax.devices(),
    )
