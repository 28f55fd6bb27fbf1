"""A prefill server and two decode servers round FakeEngines, as threads or as processes, behind a router and a sync."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from rl_jax.child import clean_environment
from rl_jax.mesh import make_mesh, named_sharding
from rl_jax.remote.carriers import Carriers
from rl_jax.remote.private_network import PrivateNetwork
from rl_jax.remote.server import RemoteDecodeServer, RemotePrefillServer
from rl_jax.remote.starter import ExternalStarter, LocalStarter
from rl_jax.serve import Router
from rl_jax.settings import ClusterSettings, EngineSettings, ServeSettings, WeightSettings
from rl_jax.testing.fake_engine import FakeEngine
from rl_jax.testing.fake_servers import fake_spec, make
from rl_jax.types import TurnRequest
from rl_jax.weights.plan import SyncPlan
from rl_jax.weights.sync import WeightSync

PATIENCE_S = 60.0
LEASE_S = 2.0
ENGINE = EngineSettings(
    slots=4, context=64, page_size=8, steps_per_block=4, chunk_sizes=(4, 16), chunk_requests=2,
    num_stop_tokens=2, append_limit=8,
)  # fmt: skip
SERVE = ServeSettings(queue_size=16, stop_deadline_s=10.0)
WEIGHTS = WeightSettings(deadline_s=30.0)
BLOCK_S = 0.02  # of a decode server's block, so that a turn can be caught under way


class Hooked:
    """A SyncTarget before or after whose calls something happens: hooks["before commit"], hooks["after commit"]."""

    def __init__(self, server, hooks):
        self.server, self.hooks = server, hooks

    def __getattr__(self, name):
        value = getattr(self.server, name)
        if name not in ("stage", "digest", "commit", "discard"):
            return value

        def call(*args):
            self.hooks.pop(f"before {name}", lambda: None)()
            try:
                return value(*args)
            finally:
                self.hooks.pop(f"after {name}", lambda: None)()

        return call


class Operator:
    """Runs each command that an ExternalStarter tells, and again whenever its process has ended, as a batch system does
    that was told to requeue."""

    def __init__(self, commands, names):
        self.commands = dict(zip(names, commands, strict=True))
        self.processes = {}
        self._closing, self._paused = threading.Event(), threading.Event()
        self.pause, self.resume = self._paused.set, self._paused.clear
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        root = Path(__file__).resolve().parents[2]
        while not self._closing.wait(0.05):
            for name, command in self.commands.items():
                process = self.processes.get(name)
                is_gone = process is None or process.poll() is not None
                if is_gone and not self._paused.is_set():
                    self.processes[name] = subprocess.Popen(
                        ["sh", "-c", f"exec env {command}"], env={**clean_environment(), "PATH": path}, cwd=root,
                        stderr=subprocess.DEVNULL,
                    )  # fmt: skip

    def pid(self, name):
        return self.processes[name].pid

    def retire(self):
        """What ends from now on is not run again. To be called before a driver ends: a process that was run again
        while its driver still listened would try for all its patience to be let in."""
        self._closing.set()
        self._thread.join(PATIENCE_S)

    def close(self):
        """Each ends by itself, as its driver is gone."""
        self.retire()
        for process in self.processes.values():
            process.wait(PATIENCE_S)


class World:
    """Servers, router and sync of one backend. `hooks`: of decode.0's sync calls, each used once."""

    def __init__(self, backend, log_dir, address=""):
        """address: of a Ray cluster."""
        self.backend, self.hooks, self.version = backend, {}, -1
        cluster = ClusterSettings(heartbeat_s=0.2, lease_s=LEASE_S, restarts=100, address=address)
        specs = [
            fake_spec(name, name.partition(".")[0], ENGINE, SERVE, block_s=block_s)
            for name, block_s in (("prefill.0", 0.0), ("decode.0", BLOCK_S), ("decode.1", BLOCK_S))
        ]
        self.operator = self.starter = None
        self.carriers = Carriers("auto" if backend == "local" else "channel")
        if backend == "inproc":
            self.servers = [make(spec.job) for spec in specs]
        else:
            self.starter = starter_of(backend, cluster, log_dir, specs)
            self.starter.open(specs)
            if backend == "external":
                self.operator = Operator(self.starter.commands, [spec.name for spec in specs])
            self.servers = [
                (RemotePrefillServer if spec.kind == "prefill" else RemoteDecodeServer)(
                    spec, cluster, log_dir, WEIGHTS.deadline_s, self.starter, self.carriers
                )
                for spec in specs
            ]
        self.prefill, *self.decode = self.servers
        for server in self.servers:
            server.start()
        targets = [self.prefill, Hooked(self.decode[0], self.hooks), self.decode[1]]
        mesh = make_mesh({}, jax.devices()[:1])
        self.place = named_sharding((), {}, mesh)
        plan = SyncPlan.build(
            {"offset": jax.ShapeDtypeStruct((), np.int32)}, {"offset": ()}, mesh, {"offset": self.place},
            targets, "float32", WEIGHTS,
        )  # fmt: skip
        self.sync = WeightSync(plan, targets, WEIGHTS)
        self.engine = FakeEngine(ENGINE)  # computes what is expected
        for server in self.servers:
            server.wait_ready(PATIENCE_S)

    def router(self, decode=None, prefill=()):
        return Router(decode or self.decode, prefill, SimpleNamespace(pools_for=lambda tag: ()))

    def publish(self, version=None):
        """Weights whose offset is the version."""
        self.version = self.version + 1 if version is None else version
        params = {"offset": jax.device_put(jnp.array(self.version, jnp.int32), self.place)}
        return self.sync.publish(params, self.version)

    def pid(self, server):
        """Of the server's process, however it was started."""
        if self.backend == "ray":
            words = {f"--server={server.name}", f"--connect={self.starter.where}"}
            running = psutil.process_iter(["cmdline"])
            return next(p.pid for p in running if words <= set(p.info["cmdline"] or ()))
        return server.pid if self.operator is None else self.operator.pid(server.name)

    def heal(self):
        """Wait until every server serves the same version again."""
        for server in self.servers:
            server.wait_ready(PATIENCE_S)
        result = self.publish()
        assert result.state == "PUBLISHED", result

    def is_clean(self, request, turn) -> bool:
        """Whether the tokens are those of one version, the one that is said."""
        versions = set(turn.versions.tolist())
        if len(versions) != 1:
            return False
        want = self.engine.expected(
            request.tokens.tolist(), len(turn.tokens), offset=versions.pop(), seed=request.seed
        )
        return turn.tokens.tolist() == want

    @staticmethod
    def offset(version):
        """The weights of a version, as a host array."""
        return np.array(version, np.int32)

    def close(self):
        if self.operator is not None:
            self.operator.retire()
        self.sync.close()
        for server in self.servers:
            server.close()
        if self.operator is not None:
            self.operator.close()
        self.carriers.close()
        if self.starter is not None:
            self.starter.close()


def starter_of(backend, cluster, log_dir, specs):
    if backend == "external":
        return ExternalStarter(cluster, log_dir, specs)
    if backend == "ray":
        from rl_jax.ray_cluster import RayStarter

        return RayStarter(cluster, log_dir, specs)
    return LocalStarter(cluster, log_dir)


def ask(uid, tokens=(1, 2, 3), turn=0, **fields) -> TurnRequest:
    defaults = {
        "attempt": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 6,
        "stop_token_ids": (), "stop": (), "seed": 0, "tag": "", "deadline_s": PATIENCE_S,
    }  # fmt: skip
    return TurnRequest(uid=uid, turn=turn, tokens=np.array(tokens, np.int32), **(defaults | fields))


def together(*coroutines) -> list:
    """Their results or exceptions."""

    async def run():
        return await asyncio.gather(*coroutines, return_exceptions=True)

    return asyncio.run(run())


def until(condition, what="the condition") -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def kit():
    return SimpleNamespace(
        ask=ask, together=together, until=until, World=World, Operator=Operator, PATIENCE_S=PATIENCE_S, LEASE_S=LEASE_S,
        BLOCK_S=BLOCK_S, ENGINE=ENGINE, SERVE=SERVE, WEIGHTS=WEIGHTS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The world of processes: one for all tests of a file, as each process costs seconds. Not longer: where a later
    test holds the interpreter for a lease its processes would end and be started again, in that test's log."""
    world = World("local", tmp_path_factory.mktemp("logs"))
    yield world
    world.close()


@pytest.fixture(scope="session")
def ray_nodes():
    """A real Ray cluster of two simulated nodes on this host, one for all tests, in a network of its own."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    try:
        network = PrivateNetwork()
    except OSError as error:
        pytest.skip(f"this host gives no private network, and Ray listens everywhere: {error}")
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
        )
        second = cluster.add_node(num_cpus=4, resources={"h200": 2})
    except Exception as error:  # the boundary to another's program: no Ray, no test
        network.close()
        pytest.skip(f"Ray does not start here: {error}")
    nodes = SimpleNamespace(cluster=cluster, second=second, address=cluster.address)
    nodes.nodes = lambda: (cluster.head_node, nodes.second)
    yield nodes
    ray.shutdown()
    cluster.shutdown()
    network.close()
