"""A server's process that dies or stops: the others serve on, nothing wrong gets out, and it comes back by a sync."""

import asyncio
import os
import queue
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rl_jax.remote.server import RemoteDecodeServer
from rl_jax.settings import ClusterSettings
from rl_jax.testing.fake_servers import fake_spec
from rl_jax.types import TurnError

pytestmark = pytest.mark.slow(seconds=6)
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@pytest.fixture
def world(local):
    local.heal()
    yield local
    local.hooks.clear()


def strike(world, name):
    os.kill(world.decode[0].pid, SIGNALS[name])


@pytest.mark.parametrize("fault", SIGNALS)
def test_server_lost_in_generation_fails_its_turns_in_time_and_is_refitted(world, kit, fault):
    router, lost = world.router(), world.decode[0]
    first_pid, decoded = lost.pid, lost.stats()["decode_tokens"]

    async def episode(i):
        """As rollout does: a retryable failure is tried once more."""
        request = kit.ask(f"{fault}{i}", range(1, 4 + i), max_new_tokens=50, deadline_s=20.0)
        start, errors = time.monotonic(), []
        for _ in range(2):
            try:
                return request, await router.generate(request), errors
            except TurnError as error:
                errors.append((error, time.monotonic() - start))
        return request, None, errors

    async def faulty():
        while lost._flights == set() or lost.progress().num_done == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        strike(world, fault)

    *played, _ = kit.together(*[episode(i) for i in range(6)], faulty())
    failed = [error for _, _, errors in played for error in errors]
    assert len(failed) >= 2  # those of decode.0
    for error, seconds in failed:
        assert error.retryable and error.server == "decode.0"
        assert seconds < kit.LEASE_S + 3, "no request waits for its deadline"
    for request, turn, _ in played:
        assert turn is not None and world.is_clean(request, turn)
        assert set(turn.versions.tolist()) == {world.version}
        router.release(request.session)

    why = lost.fenced
    assert why is not None and world.router().capacity() == {"decode": 4}
    lost.wait_ready(kit.PATIENCE_S)
    assert lost.pid != first_pid and lost.fenced is not None, "it came back without weights"
    result = submit(lost, kit.ask("early")).get(timeout=5)
    assert isinstance(result, TurnError) and result.retryable
    assert world.publish().state == "PUBLISHED"
    request = kit.ask("again")
    turn = submit(lost, request).get(timeout=kit.PATIENCE_S)
    assert world.is_clean(request, turn) and turn.versions.tolist() == [world.version] * 6
    assert lost.stats()["decode_tokens"] >= decoded + 6, "counters only rise"


def submit(server, request, on_tokens=None):
    done: queue.Queue = queue.Queue()
    server.submit(request, None, done.put, on_tokens)
    return done


POINTS = ("before stage", "after stage", "before digest", "before commit", "after commit")


@pytest.mark.parametrize(
    ("point", "fault"),
    [*((point, "killed") for point in POINTS), ("before stage", "stopped"), ("before commit", "stopped")],
)  # fmt: skip
def test_server_lost_in_a_sync_is_fenced_and_refitted_by_the_next_one(world, kit, point, fault):
    lost, other = world.decode
    world.hooks[point] = lambda: strike(world, fault)
    start = time.monotonic()
    result = world.publish()
    assert time.monotonic() - start < kit.LEASE_S + 5
    if point == "after commit":  # the sync does not know yet
        assert result.state == "PUBLISHED"
        kit.until(lambda: lost.fenced is not None)
    else:
        assert result.state == "PARTIAL" and result.fenced == ("decode.0",), result
        assert result.acked == ("prefill.0", "decode.1")
    assert result.version == world.version and lost.fenced is not None
    router = world.router()
    request = kit.ask("meanwhile", max_new_tokens=8)
    (turn,) = kit.together(router.generate(request))
    assert turn.server == "decode.1" and world.is_clean(request, turn)
    assert set(turn.versions.tolist()) == {world.version}
    result = world.publish()  # waits for the new process
    assert result.state == "PUBLISHED", result
    lost.wait_ready(kit.PATIENCE_S)
    request = kit.ask("after", max_new_tokens=8)
    turn = submit(lost, request).get(timeout=kit.PATIENCE_S)
    assert world.is_clean(request, turn) and set(turn.versions.tolist()) == {world.version}


def test_silent_process_is_suspect_and_gets_nothing_new_and_needs_no_refit_if_it_goes_on(
    world, kit, monkeypatch
):
    """Between healthy and dead: new sessions go elsewhere, what it has waits, and a sign of life ends it."""
    router, (stopped, well) = world.router(), world.decode
    channel = stopped._lives.channel
    # Far off, so that a starved test is not overtaken by the death.
    monkeypatch.setattr(channel, "settings", replace(channel.settings, lease_s=30.0))
    restarts, pid = stopped.stats()["restarts"], stopped.pid
    placed = lambda request: router._sessions[request.session].server

    async def play():
        first = kit.ask("mine")
        turn = await router.generate(first)
        assert placed(first) is stopped
        os.kill(pid, signal.SIGSTOP)
        try:
            while stopped.suspect is None:
                await asyncio.sleep(0.01)
            history = [*first.tokens.tolist(), *turn.tokens.tolist(), 9]
            waiting = asyncio.create_task(router.generate(kit.ask("mine", history, turn=1)))
            others = [kit.ask(f"new{i}", range(1, 4 + i)) for i in range(3)]
            await asyncio.gather(*map(router.generate, others))
            assert {placed(request) for request in others} == {well}
            assert not waiting.done() and stopped.fenced is None
        finally:
            os.kill(pid, signal.SIGCONT)
        turn = await waiting
        assert placed(first) is stopped and set(turn.versions.tolist()) == {world.version}
        assert stopped.suspect is None
        last = kit.ask("last", (9, 9, 9))
        await router.generate(last)
        assert placed(last) is stopped, "it has the fewest sessions"

    (failed,) = kit.together(play())
    if failed is not None:
        raise failed
    assert router.stats()["suspect_servers"] == 1 and stopped.fenced is None
    assert (stopped.stats()["restarts"], stopped.pid) == (restarts, pid)


def test_fence_fails_requests_at_once_though_the_process_is_stopped_and_drops_its_answers(
    world, kit
):
    server = world.decode[0]
    unasked = lambda: server.stats()["channel_unasked"]
    done, pid, dropped = (
        submit(server, kit.ask("s", max_new_tokens=8)), server.pid, unasked()
    )  # fmt: skip
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    server.fence("a test")
    error = done.get(timeout=1.0)
    assert isinstance(error, TurnError) and error.retryable and time.monotonic() - start < 1.0
    os.kill(pid, signal.SIGCONT)
    kit.until(lambda: unasked() == dropped + 1)
    assert done.empty() and server.pid == pid
    assert world.publish().state == "PUBLISHED" and server.fenced is None


def test_all_decode_servers_dead_is_told_by_router_and_sync(world, kit):
    router = world.router()
    for server in world.decode:
        os.kill(server.pid, signal.SIGKILL)
    kit.until(lambda: all(server.fenced for server in world.decode))
    (error,) = kit.together(router.generate(kit.ask("z")))
    assert isinstance(error, TurnError) and error.server == "router"
    assert "no decode server is live: decode.0: its process ended" in str(error)
    assert "decode.1: its process ended" in str(error)


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_of_a_version_that_was_not_committed_never_get_out(world, kit, streams):
    server, pieces = world.decode[0], []
    server._versions.clear()  # as if the process had weights that nobody told it to use
    told = pieces.append if streams else None
    error = submit(server, kit.ask("unknown"), told).get(timeout=kit.PATIENCE_S)
    assert pieces == []
    assert isinstance(error, TurnError) and error.retryable
    assert f"tokens of version {world.version}, which was not committed" in str(error)
    assert "cannot be used" in server.fenced


def test_dead_engine_ends_its_process_and_the_budget_of_restarts_ends(kit, tmp_path):
    spec = fake_spec("decode.0", "decode", kit.ENGINE, kit.SERVE, die_at_block=2)
    cluster = ClusterSettings(heartbeat_s=0.1, lease_s=5.0, restarts=1)
    server = RemoteDecodeServer(spec, cluster, tmp_path, 20.0)
    server.start()
    try:
        for life in (1, 2):
            server.wait_ready(kit.PATIENCE_S)
            server.stage(f"v{life}", life, 0, {"offset": kit.World.offset(life)})
            server.commit(f"v{life}", "recompute", 20.0)
            error = submit(server, kit.ask("a", max_new_tokens=60)).get(timeout=20)
            assert isinstance(error, TurnError) and error.retryable
            kit.until(lambda: server.fenced is not None)
        kit.until(lambda: server._lives.final is not None)
        assert "told to die at block 2" in server._lives.final
        assert "it was started 2 times (cluster.restarts=1)" in server.fenced
        with pytest.raises(RuntimeError, match="cluster.restarts=1"):
            server.wait_ready(1.0)
        with pytest.raises(ConnectionError, match="cluster.restarts=1"):
            server.stage("v3", 3, 0, {"offset": kit.World.offset(3)})
    finally:
        server.close()
    assert "RuntimeError: told to die at block 2" in (tmp_path / "decode.0.log").read_text()


def test_process_that_cannot_be_built_or_started_is_told_with_its_cause(kit, tmp_path):
    spec = fake_spec("decode.0", "decode", kit.ENGINE, kit.SERVE)
    for changed, text in (
        ({"factory": "rl_jax.testing.fake_servers:absent"}, "could not be built: .*absent"),
        ({"job": {**spec.job, "kind": "other"}}, "could not be built: KeyError: .other"),
    ):
        server = RemoteDecodeServer(replace(spec, **changed), ClusterSettings(), tmp_path, 20.0)
        server.start()
        with pytest.raises(RuntimeError, match=text):
            server.wait_ready(kit.PATIENCE_S)
        server.close()
    hasty = ClusterSettings(heartbeat_s=0.05, lease_s=0.2, start_timeout_s=0.3)
    server = RemoteDecodeServer(spec, hasty, tmp_path, 20.0)
    server.start()
    with pytest.raises(RuntimeError, match="could not be built|nothing came from"):
        server.wait_ready(kit.PATIENCE_S)
    server.close()


def test_slow_compile_is_no_death(kit, tmp_path):
    """A lease is of signs of life, which a process gives while it compiles."""
    spec = fake_spec(
        "decode.0", "decode", kit.ENGINE, kit.SERVE, num_compile_steps=2, compile_s=1.0
    )
    server = RemoteDecodeServer(spec, ClusterSettings(heartbeat_s=0.1, lease_s=0.8), tmp_path, 20.0)
    server.start()
    try:
        kit.until(lambda: server._lives.channel is not None)
        with pytest.raises(TimeoutError, match="not compiled after 0.3 s"):
            server.wait_ready(0.3)
        server.stage("v1", 1, 0, {"offset": kit.World.offset(1)})
        assert server.commit("v1", "recompute", 20.0).version == 1  # between two programs
        server.wait_ready(kit.PATIENCE_S)
        assert server._lives.num == 1
    finally:
        server.close()


DRIVER = """
import sys, time
from pathlib import Path
from rl_jax.remote.server import RemoteDecodeServer
from rl_jax.settings import ClusterSettings, EngineSettings, ServeSettings
from rl_jax.testing.fake_servers import fake_spec

servers = [
    RemoteDecodeServer(
        fake_spec(f"decode.{i}", "decode", EngineSettings(), ServeSettings()),
        ClusterSettings(), Path(sys.argv[1]), 20.0,
    )
    for i in range(2)
]
for server in servers:
    server.start()
for server in servers:
    server.wait_ready(120)
print(*[server.pid for server in servers], flush=True)
time.sleep(600)
"""


def test_no_process_outlives_its_driver_not_even_a_stopped_one(kit, tmp_path):
    root = Path(__file__).resolve().parents[2]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    try:
        children = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(children) == 2 and all(child.is_running() for child in children)
        children[0].suspend()
    finally:
        driver.kill()
        driver.wait(10)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_counters_that_were_told_are_not_forgotten_with_the_process(kit, tmp_path):
    rare = ClusterSettings(heartbeat_s=5.0, lease_s=30.0, restarts=0)  # no pulse tells them in time
    server = RemoteDecodeServer(
        fake_spec("decode.0", "decode", kit.ENGINE, kit.SERVE), rare, tmp_path, 20.0
    )
    server.start()
    try:
        server.wait_ready(kit.PATIENCE_S)
        server.stage("v1", 1, 0, {"offset": kit.World.offset(1)})
        server.commit("v1", "recompute", 20.0)
        submit(server, kit.ask("a", max_new_tokens=6)).get(timeout=20)
        assert server.stats()["decode_tokens"] == 6 and server.stats()["free_slots"] == 4
        os.kill(server.pid, signal.SIGKILL)
        kit.until(lambda: server.fenced is not None and not server._lives.stats)
        assert server.stats()["decode_tokens"] == 6
        assert "free_slots" not in server.stats()  # there are none
    finally:
        server.close()


def test_closed_server_leaves_no_process(kit, tmp_path):
    server = RemoteDecodeServer(
        fake_spec("decode.0", "decode", kit.ENGINE, kit.SERVE), ClusterSettings(), tmp_path, 20.0
    )
    server.start()
    server.wait_ready(kit.PATIENCE_S)
    child = psutil.Process(server.pid)
    assert set(child.environ()) & {"PYTHONPATH", "XLA_FLAGS"} and "PYTEST_CURRENT_TEST" not in (
        child.environ()
    )
    assert child.net_connections() == []  # a socket pair is the only connection, and has no address
    server.close()
    assert not child.is_running()
    result = submit(server, kit.ask("a")).get(timeout=5)
    assert isinstance(result, TurnError) and "closed" in str(result)
