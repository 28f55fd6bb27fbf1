"""Whole jobs on a real Ray cluster of two simulated nodes: every role but the driver is a process of some node.

Its name puts it before test_ray.py, which starts another Ray beside the shared one: after that, Ray 2.60's head takes a
new driver for dead, and cancels its actors.
"""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow(seconds=90)
pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

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
