"""A prefill server and two decode servers round FakeEngines, as threads or as processes, behind a router and a sync."""

import asyncio
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.mesh import make_mesh, named_sharding
from rl_jax.remote.server import RemoteDecodeServer, RemotePrefillServer
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


class World:
    """Servers, router and sync of one backend. `hooks`: of decode.0's sync calls, each used once."""

    def __init__(self, backend, log_dir, restarts=100):
        self.backend, self.hooks, self.version = backend, {}, -1
        cluster = ClusterSettings(heartbeat_s=0.2, lease_s=LEASE_S, restarts=restarts)
        self.servers = []
        for name, block_s in (("prefill.0", 0.0), ("decode.0", BLOCK_S), ("decode.1", BLOCK_S)):
            spec = fake_spec(name, name.partition(".")[0], ENGINE, SERVE, block_s=block_s)
            kind = RemotePrefillServer if spec.kind == "prefill" else RemoteDecodeServer
            self.servers.append(
                make(spec.job)
                if backend == "inproc"
                else kind(spec, cluster, log_dir, WEIGHTS.deadline_s)
            )
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
        self.sync.close()
        for server in self.servers:
            server.close()


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
        ask=ask, together=together, until=until, World=World, PATIENCE_S=PATIENCE_S, LEASE_S=LEASE_S,
        ENGINE=ENGINE, SERVE=SERVE, WEIGHTS=WEIGHTS,
    )  # fmt: skip


@pytest.fixture(scope="session")
def local(tmp_path_factory):
    """The world of processes: one for all tests of this folder, as each process costs seconds."""
    world = World("local", tmp_path_factory.mktemp("logs"))
    yield world
    world.close()
