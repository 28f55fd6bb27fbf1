"""Faults 27 and 28: the network between driver and process breaks, and nothing is answered twice or wrongly."""

import re
import threading
import time

import numpy as np
import pytest

from rl_jax.remote.server import RemoteDecodeServer
from rl_jax.remote.starter import ExternalStarter
from rl_jax.settings import ClusterSettings
from rl_jax.testing.fake_engine import FakeEngine
from rl_jax.testing.fake_servers import fake_spec
from rl_jax.testing.fault_proxy import FaultProxy
from rl_jax.types import TurnError
from tests.remote.test_faults import submit

pytestmark = pytest.mark.slow(seconds=12)


@pytest.fixture
def far(kit, tmp_path):
    """A server whose process is behind a network, and that network."""
    cluster = ClusterSettings(heartbeat_s=0.2, lease_s=kit.LEASE_S, restarts=100)
    spec = fake_spec("decode.0", "decode", kit.ENGINE, kit.SERVE, block_s=0.05)
    starter = ExternalStarter(cluster, tmp_path, [spec])
    (command,) = starter.commands
    here = re.search(r"--connect=([\d.]+):(\d+)", command)
    proxy = FaultProxy((here[1], int(here[2])))
    there = "--connect={}:{}".format(*proxy.address)
    operator = kit.Operator([command.replace(here[0], there)], ["decode.0"])
    server = RemoteDecodeServer(spec, cluster, tmp_path, 20.0, starter)
    server.start()
    yield server, proxy, operator
    operator.retire()
    server.close()
    proxy.close()
    for process in operator.processes.values():
        process.kill()  # one that was not let in yet would go on trying
    operator.close()
    starter.close()


def serve(server, kit, version):
    """What a sync does."""
    server.wait_ready(kit.PATIENCE_S)
    server.stage(f"v{version}", version, 0, {"offset": kit.World.offset(version)})
    assert server.commit(f"v{version}", "recompute", 20.0).version == version


def is_of(kit, request, turn, version) -> bool:
    engine = FakeEngine(kit.ENGINE)
    want = engine.expected(
        request.tokens.tolist(), len(turn.tokens), offset=version, seed=request.seed
    )
    return turn.tokens.tolist() == want and set(turn.versions.tolist()) == {version}


def test_partition_ends_with_the_lease_and_what_comes_after_it_is_not_answered(far, kit):
    server, proxy, operator = far
    serve(server, kit, 1)
    first = operator.pid("decode.0")
    request = kit.ask("a", max_new_tokens=40)
    done, start = submit(server, request), time.monotonic()
    time.sleep(0.1)
    proxy.hold()
    silent = lambda: [w for w in server.waits() if w.what == "a sign of life of decode.0"]
    kit.until(silent, "the silence to be named")
    assert silent()[0].limit == "cluster.lease_s=2" and done.empty()
    error = done.get(timeout=kit.LEASE_S + 5)
    assert isinstance(error, TurnError) and error.retryable
    assert "nothing came from decode.0 for" in str(error) and "cluster.lease_s=2" in str(error)
    assert kit.LEASE_S <= time.monotonic() - start + 0.2 < kit.LEASE_S + 5
    starts = lambda: [wait for wait in server.waits() if wait.what == "the start of decode.0"]
    kit.until(starts, "a new process")
    proxy.release()  # the answer of the first process comes now, to nobody
    kit.until(lambda: operator.pid("decode.0") != first, "another process")
    serve(server, kit, 2)
    assert done.empty(), "a request has one answer"
    again = kit.ask("a", attempt=1)
    turn = submit(server, again).get(timeout=kit.PATIENCE_S)
    assert is_of(kit, again, turn, 2)


@pytest.mark.parametrize("fault", ["half_close", "reset"])
def test_link_that_breaks_while_weights_are_staged_leaves_no_version_behind(far, kit, fault):
    server, proxy, _ = far
    serve(server, kit, 1)
    big = np.zeros(1 << 20, np.int32)  # of which half arrives
    if fault == "half_close":
        proxy.half_close_after(big.nbytes // 2)
    else:
        proxy.hold()
    start = time.monotonic()
    if fault == "reset":
        threading.Timer(0.3, lambda: (proxy.reset(), proxy.release())).start()
    with pytest.raises((ConnectionError, TimeoutError)):
        server.stage("v2", 2, 0, {"offset": big})
    assert time.monotonic() - start < kit.LEASE_S + 5
    assert server.version == 1 and server.fenced is not None
    error = submit(server, kit.ask("b")).get(timeout=5)
    assert isinstance(error, TurnError) and error.retryable
    server.wait_ready(kit.PATIENCE_S)
    with pytest.raises((KeyError, ConnectionError)):  # the new process knows nothing of it
        server.commit("v2", "recompute", 20.0)
    serve(server, kit, 3)
    request = kit.ask("c")
    assert is_of(kit, request, submit(server, request).get(timeout=kit.PATIENCE_S), 3)
