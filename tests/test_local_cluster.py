"""Servers as processes of this host with a real model: the same bits as in one process, and whole runs that equal."""

import asyncio
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from rl_jax import config, launch
from rl_jax.cluster import InProcCluster, ProcessCluster, make_cluster
from rl_jax.mesh import TRAIN_RULES, MeshPlan, build_meshes, shardings
from rl_jax.models.decoder import build_model
from rl_jax.preflight_cluster import check_backend
from rl_jax.tokens import ByteTokenizer
from rl_jax.tools.trace_files import read_attempts
from rl_jax.types import TurnRequest
from rl_jax.weights.plan import SyncPlan
from rl_jax.weights.sync import WeightSync
from tests.timeline_checks import check_timeline

FILE = Path(__file__).parent / "job_config.py"
MESH = """
from ml_collections import ConfigDict


def get_config():
    pool = lambda name, devices, **axes: ConfigDict(
        {"name": name, "kind": name, "devices": devices, "axes": axes}
    )
    pools = [pool("prefill", 1), pool("decode", 2, tensor=2), pool("train", 2, fsdp=2)]
    return ConfigDict({"name": "three", "platform": "cpu", "pools": pools})
"""


def ask(uid, tokens):
    return TurnRequest(
        uid=uid, attempt=0, turn=0, tokens=np.array(tokens, np.int32), temperature=0.0, top_p=1.0, top_k=0,
        max_new_tokens=12, stop_token_ids=(), stop=(), seed=5, tag="even", deadline_s=60.0,
    )  # fmt: skip


def played(cluster, model, settings, params, mesh, places):
    """What two versions answer, through the router and its prefill server."""
    cluster.start()
    plan = SyncPlan.build(
        model.abstract, model.logical_axes, mesh, places, cluster.targets, settings.model.dtype, settings.weights
    )  # fmt: skip
    sync = WeightSync(plan, cluster.targets, settings.weights)
    turns = []
    try:
        cluster.wait_ready(240.0)
        for version, weights in enumerate(params):
            result = sync.publish(weights, version)
            assert result.state == "PUBLISHED", result
            asked = [ask(f"v{version}.{n}", range(20, 20 + n)) for n in (2, 17, 70)]

            async def one_by_one(asked=asked):
                return [await cluster.router.generate(request) for request in asked]

            turns += asyncio.run(one_by_one())
        assert cluster.router.stats()["prefilled"] == 6
        assert cluster.counters()["decode_tokens"] == 6 * 12
        # What no prefill server computed.
        done: queue.Queue = queue.Queue()
        cluster.decode[0].submit(ask("alone", range(30, 60)), None, done.put)
        turns.append(done.get(timeout=60.0))
    finally:
        sync.close()
        cluster.close()
    return turns


@pytest.mark.slow(seconds=30)
@pytest.mark.bits
def test_greedy_tokens_and_logprobs_are_those_of_one_process_down_to_the_bits(tmp_path):
    (tmp_path / "three.py").write_text(MESH)
    parse = lambda backend: config.parse(
        [f"--config={FILE}", f"--mesh={tmp_path / 'three.py'}", f"--config.cluster.backend={backend}"]
    )  # fmt: skip
    turns = {}
    for backend, kind in (("inproc", InProcCluster), ("local", ProcessCluster)):
        settings = parse(backend).settings
        plan = MeshPlan.from_settings(settings.mesh, settings.model)
        meshes = build_meshes(plan)
        model = build_model(settings.model, ByteTokenizer().vocab_size)
        places = shardings(model.logical_axes, TRAIN_RULES, meshes.train)
        init = jax.jit(model.init, out_shardings=places)
        params = [init(jax.random.key(seed)) for seed in range(2)]
        cluster = make_cluster(plan, meshes, model, settings, "", tmp_path / "logs")
        assert type(cluster) is kind
        turns[backend] = played(cluster, model, settings, params, meshes.train, places)
    for here, there in zip(turns["inproc"], turns["local"], strict=True):
        assert here.tokens.tolist() == there.tokens.tolist()
        assert here.logprobs.tobytes() == there.logprobs.tobytes()
        assert (here.spans, here.finish, here.cached_prompt) == (
            there.spans,
            there.finish,
            there.cached_prompt,
        )
    assert {t.spans[0].version for t in turns["local"]} == {0, 1}
    assert turns["local"][0].tokens.tolist() != turns["local"][3].tokens.tolist()
    assert (tmp_path / "logs" / "decode.0.log").exists()


def run_commands(run):
    """What a person does who reads them in the driver's log: each is run until it ends."""
    pattern, found = (
        re.compile(r"(\S+=\S+ .*(?:server_process|store_process|worker_host) --connect=.*)$", re.M),
        [],
    )
    while not found:
        time.sleep(0.05)
        text = "".join(path.read_text() for path in run.rglob("driver.log"))
        found = pattern.findall(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    started = [
        subprocess.Popen(
            ["sh", "-c", f"exec env {command}"], cwd=FILE.parents[1], env={"PATH": path},
            stderr=subprocess.DEVNULL,
        )
        for command in found
    ]  # fmt: skip
    for process in started:
        process.wait(200)


@pytest.mark.slow(seconds=40)
def test_run_on_processes_trains_on_the_same_tokens(tmp_path):
    """Synchronous, so that nothing depends on time: what was trained is equal, episode by episode."""
    trained, ways = {}, {"inproc": (), "local": ()}
    ways["external"] = ("--config.cluster.stores=1", "--config.weights.transport=store")
    for backend, way in ways.items():
        run = tmp_path / backend
        words = [f"--config={FILE}", f"--run_dir={run}", "--config.run_id=r", "--mesh=split_2"]
        operator = threading.Thread(target=run_commands, args=(run,), daemon=True)
        if backend == "external":
            operator.start()
        assert launch.main([*words, *way, f"--config.cluster.backend={backend}"]) == 0
        lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
        trained[backend] = {
            (line["uid"], line["step"]): line["sha256"]
            for line in lines
            if line["state"] == "TRAINED"
        }
        assert json.loads((run / "STATUS.json").read_text())["state"] == "done"
    assert len(trained["inproc"]) == 3 * 4
    assert trained["local"] == trained["inproc"] and trained["external"] == trained["inproc"]
    operator.join(20)
    assert not operator.is_alive(), "the process ends with the run"
    text = "".join(path.read_text() for path in (tmp_path / "external").rglob("driver.log"))
    assert "remote.worker_host" in text and "env_0 came from" in text
    logs = {path.name for path in (tmp_path / "local" / "logs").rglob("*.log")}
    assert {"decode.0.log"} <= logs, logs
    by = {"local": "shared memory", "external": "the store store.0"}
    for backend, copies in (("inproc", 0), ("local", 0), ("external", 1)):
        run = tmp_path / backend
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        row = [row for row in rows if "sync/bytes" in row][-1]
        goodput = check_timeline(run)
        assert all(pool.run > 0.001 for pool in goodput.pools.values()), backend
        assert row["sync/link_bytes"] == copies * row["sync/bytes"] and row["sync/bytes"] > 0
        text = "".join(path.read_text() for path in run.rglob("driver.log"))
        assert f"decode.0 gets its weights by {by.get(backend, '')}" in text or backend not in by


TWO_DECODE = """
from ml_collections import ConfigDict


def get_config():
    pool = lambda kind, devices, replicas: ConfigDict(
        {"name": kind, "kind": kind, "devices": devices, "replicas": replicas}
    )
    return ConfigDict(
        {"name": "two", "platform": "cpu", "pools": [pool("decode", 2, 2), pool("train", 1, 1)]}
    )
"""


@pytest.mark.slow(seconds=40)
def test_run_goes_on_when_a_server_is_killed_and_the_server_comes_back(tmp_path):
    (tmp_path / "two.py").write_text(TWO_DECODE)
    run, killed = tmp_path / "run", []
    metrics, others = run / "metrics.jsonl", set(psutil.Process().children())

    def kill_one():
        """After the second step."""
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            time.sleep(0.01)
        servers = [
            child
            for child in psutil.Process().children()
            if child not in others and "rl_jax.remote.server_process" in child.cmdline()
        ]
        assert len(servers) == 2
        servers[0].kill()
        killed.append(servers[0].pid)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    words = [f"--config={FILE}", f"--run_dir={run}", f"--mesh={tmp_path / 'two.py'}"]
    assert launch.main([*words, "--config.cluster.backend=local", "--config.steps=8"]) == 0
    killer.join(10)
    assert killed and not psutil.pid_exists(killed[0])
    assert json.loads((run / "STATUS.json").read_text())["state"] == "done"
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    trained = Counter(line["uid"] for line in lines if line["state"] == "TRAINED")
    assert len(trained) == 8 * 4 and set(trained.values()) == {1}
    for line in lines:  # synchronous: all of a step is of the version before it
        if line["state"] == "TRAINED":
            assert line["versions"] == [line["step"] - 1]
    logs = [path.read_text() for path in (run / "logs").rglob("*.log")]
    assert any("killed by SIGKILL" in log and "it is started again" in log for log in logs)
    assert sum("serves again" in log for log in logs) == 1
    # The timeline has both lives of the server, and the seconds in which it was not there.
    goodput = check_timeline(run)
    assert 0.3 < goodput.sched < 1.0
    decode = goodput.pools["decode"]
    assert decode.up_s < decode.allocated_s and decode.useful_s > 0
    (attempt,) = read_attempts(run)
    processes = {span.process for span in attempt.of("decode")}
    assert len(processes) == 3, "two of the one that was killed, one of the other"
    lives = [s for s in attempt.of("life") if s.kind == "up"]
    whys = [s.more["why"] for s in lives]
    assert len(whys) == 3 and sum(why != "the server was closed" for why in whys) == 1
    peaks = {s.more["of"] for s in attempt.of("run") if s.kind == "peaks"}
    assert peaks == {"decode.0", "decode.1"}


@pytest.mark.slow(seconds=25)
def test_run_whose_decode_servers_are_all_gone_saves_and_ends_with_their_causes(tmp_path, capsys):
    """Fault 11: no process is started again (cluster.restarts=0), so retries end, in time and by name."""
    (tmp_path / "two.py").write_text(TWO_DECODE)
    run, times = tmp_path / "run", {}
    metrics = run / "metrics.jsonl"

    def kill_all():
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            time.sleep(0.01)
        times["killed"] = time.monotonic()
        for child in psutil.Process().children():
            if "rl_jax.remote.server_process" in child.cmdline():
                child.kill()

    killer = threading.Thread(target=kill_all, daemon=True)
    killer.start()
    words = [f"--config={FILE}", f"--run_dir={run}", f"--mesh={tmp_path / 'two.py'}"]
    words += ["--config.cluster.backend=local", "--config.steps=1000"]
    assert launch.main([*words, "--config.cluster.restarts=0"]) == 5
    assert time.monotonic() - times["killed"] < 30
    killer.join(10)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, errors
    for name in ("decode.0", "decode.1"):
        assert f"{name}: " in errors[0] and "killed by SIGKILL" in errors[0]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = max(row["step"] for row in rows if "optim/grad_norm" in row)
    saved = [int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*")]
    assert saved and max(saved) in (last, last + 1), "what was learned is kept"


def refused(*words):
    with pytest.raises(config.ConfigError) as caught:
        config.parse(list(words))
    return caught.value.errors


def test_servers_as_processes_need_the_cpu_and_a_lease_of_some_heartbeats():
    local = "--config.cluster.backend=local"
    assert config.parse([local]).settings.cluster.backend == "local"
    for platform in ("", "gpu"):
        (error,) = refused(local, f"--config.mesh.platform={platform}")
        assert "simulated ones with mesh.platform=cpu, or GPUs with mesh.platform=gpu" in error
    learner, gpu = "--config.cluster.learner_processes=1", "--config.mesh.platform=gpu"
    assert config.parse([local, learner, gpu]).settings.mesh.platform == "gpu"
    (error,) = refused(local, "--config.cluster.lease_s=2")
    assert "cluster.lease_s=2 is less than three times cluster.heartbeat_s=1" in error
    assert (
        config.parse(["--config.cluster.lease_s=2"]).settings.cluster.lease_s == 2
    )  # of local only


def test_workers_go_where_something_starts_them():
    ray, external = "--config.cluster.backend=ray", "--config.cluster.backend=external"
    hardware = "--config.cluster.env_hardware=cpus"
    assert config.parse([ray, hardware]).settings.cluster.env_hardware == "cpus"
    for words in ((external, hardware), (ray, "--config.cluster.workers=driver", hardware)):
        (error,) = refused(*words)
        assert "cluster.env_hardware=cpus is where Ray puts workers" in error
    idle = "--config.rewards.keep_alive_s=9"
    assert config.parse([ray, idle]).settings.rewards.keep_alive_s == 9
    (error,) = refused(external, idle)
    assert "nobody but a person starts any; use 0, or cluster.workers=driver" in error
    assert config.parse([external, idle, "--config.cluster.workers=driver"])


def test_address_to_listen_on_is_one_that_others_can_use():
    external = "--config.cluster.backend=external"
    assert config.parse([external, "--config.cluster.port=4711"]).settings.cluster.port == 4711
    (error,) = refused(external, "--config.cluster.host=0.0.0.0")
    assert "cluster.host='0.0.0.0' is no address that a process could connect to" in error
    (error,) = refused(external, "--config.cluster.address=h:1")
    assert "cluster.address=h:1 is not used by backend external" in error
    (error,) = refused("--config.cluster.backend=local", "--config.cluster.port=4711")
    assert "cluster.port=4711 is not used by backend local" in error
    (error,) = refused(external, "--config.cluster.port=70000")
    assert "cluster.port=70000" in error
    alone = "--config.cluster.backend=ray"
    (error,) = refused(alone, "--config.rewards.url=http://127.0.0.1:8080")
    assert "rewards.url=http://127.0.0.1:8080 is not reached from the private network" in error
    for address in ("garbage", "ray://10.0.0.5:10001", "10.0.0.5:", ":6379"):
        (error,) = refused(alone, f"--config.cluster.address={address}")
        assert f"cluster.address={address} is no address of a Ray head; give HOST:PORT" in error
    (error,) = refused(alone, "--config.cluster.host=10.0.0.5")
    assert (
        "cluster.host=10.0.0.5 is not in the private network of a Ray that the run starts" in error
    )


def test_backend_that_is_not_installed_is_told_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    check_backend("local")
    with pytest.raises(config.ConfigError) as caught:
        check_backend("ray")
    (error,) = caught.value.errors
    assert "cluster.backend=ray needs Ray, which is not installed; pip install -e '.[ray]'" in error
