"""What the wall-clock benchmarks of rollout play against: a Router over a decode server round a FakeEngine in a process
of its own, so that what an engine costs the interpreter is not rollout's.
"""

import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.mesh import MeshPlan, make_mesh, named_sharding
from rl_jax.remote.carriers import Carriers
from rl_jax.remote.server import RemoteDecodeServer
from rl_jax.remote.starter import LocalStarter
from rl_jax.serve import Router
from rl_jax.settings import (
    ClusterSettings,
    EngineSettings,
    MeshSettings,
    PoolSettings,
    ServeSettings,
    WeightSettings,
)
from rl_jax.testing.fake_servers import fake_spec
from rl_jax.weights.plan import SyncPlan
from rl_jax.weights.sync import WeightSync

READY_S = 120.0
PLAN = MeshPlan.from_settings(
    MeshSettings(pools=(PoolSettings("decode", "decode"), PoolSettings("train", "train")))
)


class ProcessSampler(Router):
    """A Router over one decode server in a process, with a weight sync to it."""

    def __init__(self, block_s: float, engine: EngineSettings, log_dir: Path):
        """block_s: what a block of the engine takes."""
        cluster, weights = ClusterSettings(), WeightSettings()
        serve = ServeSettings(queue_size=1024)
        self._carriers = Carriers("auto")
        spec = fake_spec("decode.0", "decode", engine, serve, block_s=block_s)
        starter = LocalStarter(cluster, log_dir)
        self._process = RemoteDecodeServer(
            spec, cluster, log_dir, weights.deadline_s, starter, self._carriers
        )
        self._process.start()
        self._process.wait_ready(READY_S)
        mesh = make_mesh({}, jax.devices()[:1])
        self._sharding = named_sharding((), {}, mesh)
        shape = {"offset": jax.ShapeDtypeStruct((), np.int32)}
        plan = SyncPlan.build(
            shape,
            {"offset": ()},
            mesh,
            {"offset": self._sharding},
            [self._process],
            "float32",
            weights,
        )
        self._weight_sync = WeightSync(plan, [self._process], weights)
        self.sync_s: list[float] = []  # what each commit took
        self.commit(0)
        super().__init__([self._process], [], PLAN)

    def commit(self, version: int) -> None:
        """Publish, through the real protocol. Blocks."""
        begin_s = time.monotonic()
        params = {"offset": jax.device_put(jnp.array(version, jnp.int32), self._sharding)}
        result = self._weight_sync.publish(params, version)
        assert result.state == "PUBLISHED", result
        self.sync_s.append(time.monotonic() - begin_s)

    def close(self) -> None:
        self._weight_sync.close()
        self._process.close()
        self._carriers.close()
