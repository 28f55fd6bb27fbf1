"""Ray starts the processes: placed by hardware, lost with actor or node, and refused before anything waits for them;
and a whole job, of which every role but the driver is a process of some node."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from rl_jax.remote.carriers import Carriers
from rl_jax.remote.server import RemoteDecodeServer
from rl_jax.remote.spec import StoreSpec
from rl_jax.remote.store import Store
from rl_jax.settings import ClusterSettings, EngineSettings, ServeSettings
from rl_jax.testing.fake_servers import fake_spec

pytestmark = pytest.mark.slow(seconds=40)
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
ray_cluster = pytest.importorskip("rl_jax.ray_cluster")

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
ROLES = ("prefill.0", "decode.0", "learner.0", "env_0", "reward_0")
MESH = """
from ml_collections import ConfigDict


def get_config():
    pool = lambda name: ConfigDict({"name": name, "kind": name, "devices": 1})
    pools = [pool("prefill"), pool("decode"), pool("train")]
    return ConfigDict({"name": "three", "platform": "cpu", "pools": pools})
"""
SCORED = """
from tests import job_config


def get_config():
    config = job_config.get_config()
    config.tasks.sources[0].shaping = {"brevity": 0.1}
    return config
"""
WORDS = (
    "--config.cluster.backend=ray",
    "--config.cluster.learner_processes=1",
    "--config.cluster.env_hardware=h200",
    "--config.cluster.scorer_hardware=h200",
    f"--config.steps={STEPS}",
)


@pytest.fixture
def made(kit, tmp_path):
    """made(address, hardware, ..) -> (starter, specs); closed at the end."""
    starters = []

    def make(address, *hardware, store="", **fields):
        fields = {"restarts": 100} | fields
        settings = ClusterSettings(heartbeat_s=0.2, lease_s=kit.LEASE_S, address=address, **fields)
        specs = [
            replace(fake_spec(f"decode.{i}", "decode", kit.ENGINE, kit.SERVE), hardware=name)
            for i, name in enumerate(hardware)
        ]
        specs += [StoreSpec(name="store.0", hardware=store)] if store else []
        starters.append(ray_cluster.RayStarter(settings, tmp_path, specs))
        server = RemoteDecodeServer(specs[0], settings, tmp_path, 20.0, starters[-1])
        return starters[-1], specs, server

    yield make
    for starter in starters:
        starter.close()


def process_of(starter, name="decode.0") -> psutil.Process:
    words = {f"--server={name}", f"--connect={starter.where}"}
    running = psutil.process_iter(["cmdline"])
    return next(p for p in running if words <= set(p.info["cmdline"] or ()))


def test_resources_that_can_never_be_met_are_named_before_anything_waits(made, ray_nodes):
    starter, specs, _ = made(ray_nodes.address, "cpu", "tpu9")
    start = time.monotonic()
    text = "decode.1 takes CPU: 1, tpu9: 1 of one Ray node.*has is CPU: 4, tpu9: 0"
    with pytest.raises(OSError, match=text):
        starter.open(specs)
    assert time.monotonic() - start < 10


def test_what_fits_one_by_one_and_not_together_is_named(made):
    nodes = [{"Resources": {"CPU": 4, "h200": 2}}, {"Resources": {"CPU": 1}}]
    _, specs, _ = made("", "h200", "h200", "cpu")
    assert ray_cluster.missing(specs, nodes) == ""
    _, specs, _ = made("", "h200", "h200", "h200")
    assert (
        "3 processes take h200: 3 in all, and the Ray cluster has h200: 2"
        in ray_cluster.missing(specs, nodes)
    )
    assert "decode.0 takes CPU: 1, h200: 1 of one Ray node" in ray_cluster.missing(specs, [])


def test_server_is_where_its_hardware_is_and_lives_on_when_actor_and_node_are_lost(
    made, kit, ray_nodes
):
    starter, specs, server = made(ray_nodes.address, "h200")
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    mine = signal.getsignal(signal.SIGTERM)
    try:
        starter.open(specs)
        assert signal.getsignal(signal.SIGTERM) is mine, "Ray's own handler would end the run"
    finally:
        signal.signal(signal.SIGTERM, before)
    server.start()
    try:
        server.wait_ready(kit.PATIENCE_S)
        process = process_of(starter)
        raylet = ray_nodes.second.all_processes["raylet"][0].process.pid
        assert raylet in [parent.pid for parent in process.parents()]
        assert "RAY_ADDRESS" not in process.environ() and starter.stats()["linked"] == 1

        worker = process.parent()
        worker.kill()
        kit.until(lambda: server.fenced is not None)
        kit.until(lambda: not process.is_running())
        server.wait_ready(kit.PATIENCE_S)
        assert server._lives.num == 2 and process_of(starter).pid != process.pid

        ray_nodes.cluster.remove_node(ray_nodes.second, allow_graceful=False)
        kit.until(lambda: not server._lives.is_ready)
        ray_nodes.second = ray_nodes.cluster.add_node(num_cpus=4, resources={"h200": 2})
        server.wait_ready(kit.PATIENCE_S)
        raylet = ray_nodes.second.all_processes["raylet"][0].process.pid
        assert raylet in [parent.pid for parent in process_of(starter).parents()]
        server.stage("v1", 1, 0, {"offset": kit.World.offset(1)})
        assert server.commit("v1", "recompute", 20.0).version == 1 and server.fenced is None
        last = process_of(starter)
    finally:
        server.close()
    kit.until(lambda: not last.is_running())


def test_store_comes_to_its_servers_node_and_takes_a_version_once(made, kit, ray_nodes):
    starter, specs, server = made(ray_nodes.address, "h200", store="h200")
    store = Store(specs[-1], starter._settings, starter)
    carriers = server._carriers = Carriers("store", [store])
    starter.open(specs)
    for part in (store, server):
        part.start()
    try:
        for part in (store, server):
            part.wait_ready(kit.PATIENCE_S)
        raylet = ray_nodes.second.all_processes["raylet"][0].process.pid
        assert raylet in [parent.pid for parent in process_of(starter, "store.0").parents()]
        offset = kit.World.offset(1)
        assert server.stage("v1", 1, 0, {"offset": offset}) == offset.nbytes
        assert server.commit("v1", "recompute", 20.0).version == 1
    finally:
        server.close()
        store.close()
        carriers.close()


def roles():
    """Name in the plan -> its process, of those that run."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        named = [word[9:] for word in words if word.startswith("--server=")]
        if named and any(word.startswith("--parent=") for word in words):
            found[named[0]] = process
    return found


def raylet_of(process):
    return next(p.pid for p in process.parents() if p.name() == "raylet")


def num_steps(run):
    path = run / "metrics.jsonl"
    return path.read_text().count('optim/grad_norm"') if path.exists() else 0


def watch(run, found, kill):
    """After the first step: where each role runs; then `kill`, if any, is killed."""
    while num_steps(run) < 1:
        time.sleep(0.01)
    now = roles()
    found.update({name: raylet_of(process) for name, process in now.items()})
    if kill:
        (worker,) = now[kill].children()
        worker.kill()
        found["killed"] = worker.pid


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(run):
    return {
        (line["uid"], line["step"]): line["sha256"]
        for line in lines(run / "ledger.jsonl")
        if line["state"] == "TRAINED"
    }


def test_all_roles_run_on_rays_nodes_and_a_killed_worker_changes_nothing(ray_nodes, tmp_path):
    """Before the tests that start another Ray beside the shared one: after that, Ray 2.60's head takes a new driver for
    dead, and cancels its actors."""
    (tmp_path / "three.py").write_text(MESH)
    (tmp_path / "scored.py").write_text(SCORED)
    raylets = [node.all_processes["raylet"][0].process.pid for node in ray_nodes.nodes()]
    for name, kill in (("calm", ""), ("killed", "env_0")):
        run, found = tmp_path / name, {}
        watcher = threading.Thread(target=watch, args=(run, found, kill), daemon=True)
        watcher.start()
        words = [
            f"--config={tmp_path / 'scored.py'}",
            f"--run_dir={run}",
            "--config.run_id=r",
            *WORDS,
        ]
        words += [
            f"--mesh={tmp_path / 'three.py'}",
            f"--config.cluster.address={ray_nodes.address}",
        ]
        command = [sys.executable, "-m", "rl_jax.launch", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        watcher.join(10)
        killed = found.pop("killed", None)
        assert sorted(found) == sorted(ROLES) and set(found.values()) <= set(raylets)
        assert found["env_0"] == found["reward_0"] == raylets[1], "where their hardware is"
        assert json.loads((run / "STATUS.json").read_text())["state"] == "done"
        once = Counter(uid for uid, _ in trained(run))
        assert len(once) == STEPS * 4 and set(once.values()) == {1}
        assert not roles(), "processes end with the run"
        rows = lines(run / "metrics.jsonl")
        restarts = max(row.get("envs/restarts", 0) for row in rows)
        assert restarts == bool(kill) and (killed is None or not psutil.pid_exists(killed))
    assert trained(tmp_path / "killed") == trained(tmp_path / "calm")


def test_weights_go_past_rays_object_store(made, kit, ray_nodes):
    """Ray's store of the objects that calls give and take lies in /dev/shm: a version of weights leaves it as it was,
    and an object of the same size does not."""
    starter, specs, server = made(ray_nodes.address, "h200")
    used = lambda: shutil.disk_usage("/dev/shm").used
    weights = np.zeros(8 << 20, np.int32)
    starter.open(specs)
    server.start()
    try:
        server.wait_ready(kit.PATIENCE_S)
        before = used()
        assert server.stage("v1", 1, 0, {"offset": weights}) == weights.nbytes
        server.discard("v1")
        assert used() - before < weights.nbytes // 4
        held = ray.put(weights)
        assert used() - before >= weights.nbytes, "or this test sees nothing"
        del held
    finally:
        server.close()


def test_ray_of_this_host_alone_is_started_with_what_the_plan_takes_and_ended(made):
    starter, specs, _ = made("", "h200", "h200")
    others = set(psutil.Process().children())
    starter.open(specs)
    folder, total = starter._folder, ray.cluster_resources()
    assert total["h200"] == 2 and total["CPU"] >= 2
    assert folder.stat().st_mode & 0o777 == 0o700
    raylets = [p for p in set(psutil.Process().children()) - others if "raylet" in p.name()]
    assert raylets
    networks = {os.readlink(f"/proc/{p.pid}/ns/net") for p in (*raylets, psutil.Process().parent())}
    assert len(networks) == 2, "Ray listens on every address of its network, which must be its own"
    starter.close()
    assert not folder.exists() and not ray.is_initialized()
    assert psutil.wait_procs(raylets, timeout=10)[1] == []


def test_no_ray_at_the_address_is_told(made):
    starter, specs, _ = made("127.0.0.1:9", "cpu")
    with pytest.raises(OSError, match="there is no Ray at 127.0.0.1:9"):
        starter.open(specs)


def test_head_that_is_lost_takes_no_server_along_and_every_wait_for_it_ends(
    made, kit, ray_nodes, monkeypatch
):
    monkeypatch.setattr(ray_cluster, "PLACE_S", 1.0)
    monkeypatch.setattr(ray_cluster, "ASK_S", 1.0)
    ray.shutdown()  # of the shared cluster: this one has a head that may be lost
    starter, specs, server = made("", "cpu", restarts=1)
    before = set(psutil.Process().children(recursive=True))
    starter.open(specs)
    server.start()
    try:
        server.wait_ready(kit.PATIENCE_S)
        ours = set(psutil.Process().children(recursive=True)) - before
        (head,) = [process for process in ours if "gcs_server" in process.name()]
        head.kill()
        server.stage("v1", 1, 0, {"offset": kit.World.offset(1)})
        assert server.commit("v1", "recompute", 20.0).version == 1 and server.fenced is None
        process_of(starter).kill()
        kit.until(lambda: "was started 2 times" in (server.fenced or ""))
        assert (
            "Ray takes no actor: Ray did not answer within 1 s; its head may be lost"
            in server.fenced
        )
    finally:
        server.close()
    start = time.monotonic()
    starter.close()
    assert time.monotonic() - start < 2 * ray_cluster.END_S and not ray.is_initialized()


def test_a_process_with_gpus_takes_them_of_ray_beside_its_hardwares_resource():
    spec = fake_spec("decode.0", "decode", EngineSettings(), ServeSettings())
    four = replace(spec, num_devices=4, platform="gpu", devices=(4, 5, 6, 7))
    assert ray_cluster.demand(four) == {"CPU": 1.0, "GPU": 4.0}
    assert ray_cluster.demand(replace(four, hardware="gpu")) == {"CPU": 1.0, "GPU": 4.0}
    both = {"CPU": 1.0, "GPU": 4.0, "h200": 4.0}
    assert ray_cluster.demand(replace(four, hardware="h200")) == both


HANGS = """
import socket, sys
from rl_jax import ray_cluster
from rl_jax.settings import ClusterSettings
listener = socket.create_server(("127.0.0.1", 0))
ray_cluster.REACH_S = 3.0
address = f"127.0.0.1:{listener.getsockname()[1]}"
starter = ray_cluster.RayStarter(ClusterSettings(backend="ray", address=address), None, [])
try:
    starter.open([])
except OSError as error:
    print("told:", error, flush=True)
import os
os._exit(0)
"""


def test_what_listens_at_the_address_and_is_no_ray_is_told_in_time(kit):
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert "told: there is no Ray at 127.0.0.1:" in done.stdout, done.stderr
    assert "Ray did not answer within 3 s" in done.stdout
