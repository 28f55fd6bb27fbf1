"""Workers of environments and scorers that the cluster starts: a driver cannot tell them from its own children."""

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import psutil
import pytest

from rl_jax.remote.spec import scraped
from rl_jax.remote.starter import ExternalStarter, LocalStarter
from rl_jax.remote.worker_place import ClusterPlace, worker_specs
from rl_jax.rollout.worker import EnvError
from rl_jax.settings import (
    ClusterSettings,
    MetricsSettings,
    RewardSettings,
    RolloutSettings,
    Settings,
    TaskSettings,
)
from rl_jax.testing.fault_proxy import FaultProxy
from rl_jax.types import Action, EpisodeView
from tests.rollout.bench import GOOD, TIMEOUT_S, Bench
from tests.rollout.test_env_pool import misbehaving, step_of

pytestmark = pytest.mark.slow(seconds=15)
LEASE_S = 1.5
SCORED = replace(GOOD, reward="rl_jax.testing.envs:MisbehavingScorer")
FAULTS = ["raise", "exit", "hang"]


def specs_of(sources, rewards=None, **rollout):
    tasks, rewards = TaskSettings(sources=tuple(sources)), rewards or RewardSettings()
    return worker_specs(Settings(tasks=tasks, rewards=rewards, rollout=RolloutSettings(**rollout)))


def made(sources, tmp_path, rewards=None, metrics=MetricsSettings(), **rollout):
    """A bench whose workers a starter starts."""
    cluster = ClusterSettings(heartbeat_s=0.2, lease_s=LEASE_S, start_timeout_s=30.0)
    specs = scraped(specs_of(sources, rewards, **rollout), metrics, 0)
    place = ClusterPlace(specs, cluster, LocalStarter(cluster, tmp_path))
    return Bench(sources, rewards=rewards, place=place, **rollout)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        metrics = MetricsSettings(port=probe.getsockname()[1] - 1)  # the worker has the next one
    sources = [GOOD, *map(misbehaving, FAULTS)]
    bench = made(sources, tmp_path_factory.mktemp("logs"), metrics=metrics)
    bench.metrics_port = metrics.port + 1
    yield bench
    bench.close()


def processes():
    """(the program beside it, the worker) of each worker that lives."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            if "rl_jax.remote.worker_host" in child.cmdline():
                found += [(child, worker) for worker in child.children()]
    return found


def test_an_episode_is_played_and_its_faults_are_told_as_on_the_drivers_host(bench):
    ((_, worker),) = processes()
    assert "rl_jax.rollout.env_process" in worker.cmdline()
    assert bench.run(bench.play_good()) == [1.0, 0.0]
    for fault, kind, message in (
        ("raise", "env_error", r"step: RuntimeError: the environment is broken \(envs.py:\d+"),
        ("exit", "env_died", r"step of r/0/0/0: the process ended with exit code 3; its last"),
        (
            "hang",
            "env_timeout",
            rf"took more than rollout.step_timeout_s={TIMEOUT_S}; it was at envs.py:\d+ in _hang",
        ),
    ):
        before = bench.pool.counts["restarts"]
        with pytest.raises(EnvError) as caught:
            step_of(bench, fault)
        assert caught.value.kind == kind and re.search(message, caught.value.detail), caught.value
        assert bench.run(bench.play_good()) == [1.0, 0.0]
        assert bench.pool.counts["restarts"] == before + (fault != "raise")
    assert bench.pool.num_live == 0 and not worker.is_running()


def test_the_program_beside_a_worker_tells_prometheus_what_passes(bench):
    parser = pytest.importorskip("prometheus_client.parser")
    assert bench.run(bench.play_good()) == [1.0, 0.0]
    with urllib.request.urlopen(
        f"http://127.0.0.1:{bench.metrics_port}/metrics", timeout=10
    ) as answer:
        text = answer.read().decode()
    families = parser.text_string_to_metric_families(text)
    found = {(s.name, s.labels.get("direction")): s for family in families for s in family.samples}
    lines = {way: found["rl_jax:worker_lines_total", way].value for way in ("to", "from")}
    assert lines["to"] >= 4 and lines["from"] >= 4  # two resets, two steps
    assert found["rl_jax:workers", None].value == 1
    assert found["rl_jax:workers", None].labels["process"].startswith("env")


@pytest.mark.parametrize("how", ["SIGKILL of the program beside it", "SIGSTOP", "SIGKILL"])
def test_what_the_worker_had_is_told_it_died_and_nothing_of_it_is_left(bench, how):
    ((host, worker),) = processes()

    async def play():
        handle = await bench.open("good")
        await handle.reset()
        victim = worker if how == "SIGKILL" else host
        victim.send_signal(signal.SIGSTOP if how == "SIGSTOP" else signal.SIGKILL)
        start = time.monotonic()
        try:
            await asyncio.wait_for(handle.step(Action("x")), 60)
        finally:
            await handle.close()
            took.append(time.monotonic() - start)

    took: list[float] = []
    bench.pool.step_limit = replace_limit(bench, 30.0)  # it is the lease that ends it
    try:
        with pytest.raises(EnvError) as caught:
            bench.run(play())
    finally:
        bench.pool.step_limit = replace_limit(bench, TIMEOUT_S)
    assert caught.value.kind in ("env_died", "env_lost")
    if how == "SIGSTOP":
        assert f"(cluster.lease_s={LEASE_S:g})" in caught.value.detail
        assert took[0] < LEASE_S + 5
    if how == "SIGKILL":
        assert "the process was killed by SIGKILL" in caught.value.detail
    assert psutil.wait_procs([host, worker], timeout=10)[1] == []
    assert bench.run(bench.play_good()) == [1.0, 0.0]
    assert len(processes()) == 1


def replace_limit(bench, seconds):
    return bench.pool.step_limit._replace(seconds=seconds)


def test_scorers_come_with_the_calls_and_go_when_there_are_none(tmp_path):
    """0 to N: none at first, one a call that finds none free, at most rewards.workers, none again."""
    rewards = RewardSettings(timeout_s=TIMEOUT_S, workers=2, keep_alive_s=0.5)
    others = processes()
    new = lambda: [pair for pair in processes() if pair not in others]
    bench = made([SCORED], tmp_path, rewards)
    pool, task = bench.pool, bench.pool.list_tasks("good", "train")[0]
    view, asked = EpisodeView((), ("x",), {}, ()), replace(task, payload={"answer": "one"})
    try:
        assert len(new()) == 1 and not pool.scorers.workers

        async def play():
            calls = [pool.score(SCORED.reward, asked, view) for _ in range(8)]
            answers = await asyncio.gather(*calls)
            num = len(pool.scorers.workers)
            end_s = time.monotonic() + 10
            while len(new()) > 1 and time.monotonic() < end_s:
                await asyncio.sleep(0.05)
            return [answer.reward.value for answer in answers], num

        assert bench.run(play()) == ([1.0] * 8, 2)
        assert len(new()) == 1 and pool.counts["reward_retired"] == 2
        again = bench.run(pool.score(SCORED.reward, asked, view))
        assert again.reward.value == 1.0 and pool.counts["reward_starts"] == 3
    finally:
        bench.close()
    assert new() == []


def test_worker_that_cannot_be_started_uses_up_the_same_budget(tmp_path, bench):
    """What started it may be gone for good; the pool's own count ends the waiting."""

    class Broken(LocalStarter):
        def start(self, spec, attempt):
            raise OSError("there is no room")

    cluster = ClusterSettings(start_timeout_s=5.0)
    place = ClusterPlace(specs_of([GOOD]), cluster, Broken(cluster, tmp_path))
    with pytest.raises(EnvError, match="the process is lost: it cannot be started: there is no"):
        Bench([GOOD], place=place, max_env_failures=0)


def test_partition_ends_with_the_lease_and_a_late_answer_reaches_nobody(kit, tmp_path):
    """Fault 27: the episode fails retryably, its worker's next attempt plays on, and what the first one still says is
    of an attempt that is over."""
    cluster = ClusterSettings(heartbeat_s=0.2, lease_s=LEASE_S, start_timeout_s=30.0)
    specs = specs_of([GOOD])
    starter = ExternalStarter(cluster, tmp_path, specs)
    (command,) = starter.commands
    assert "rl_jax.remote.worker_host" in command and "--server=env_0" in command
    here = re.search(r"--connect=([\d.]+):(\d+)", command)
    proxy = FaultProxy((here[1], int(here[2])))
    there = "--connect={}:{}".format(*proxy.address)
    operator = kit.Operator([command.replace(here[0], there)], ["env_0"])
    bench = Bench([GOOD], place=ClusterPlace(specs, cluster, starter))
    bench.pool.step_limit = replace_limit(bench, 30.0)
    try:

        async def play():
            handle = await bench.open("good")
            await handle.reset()
            proxy.hold()
            with pytest.raises(EnvError, match=r"cluster.lease_s=1.5") as caught:
                await handle.step(Action("ant0"))
            await handle.close()
            proxy.release()
            return caught.value.kind, await bench.play_good()

        first = operator.pid("env_0")
        assert bench.run(play()) == ("env_died", [1.0, 0.0])
        assert operator.pid("env_0") != first and bench.pool.counts["restarts"] == 1
    finally:
        operator.retire()
        bench.close()
        proxy.close()
        operator.close()
        starter.close()


def test_program_beside_a_worker_never_imports_jax():
    code = "import rl_jax.remote.worker_host, sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
