"""A learner's process that stands still, and one that is lost once too often, in a real run whose servers go on."""

import json
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from rl_jax import launch

pytestmark = pytest.mark.slow(seconds=25)
FILE = Path(__file__).parent / "job_config.py"
LEASE_S = 2
MESH = """
from ml_collections import ConfigDict


def get_config():
    pool = lambda name: ConfigDict({"name": name, "kind": name, "devices": 1})
    return ConfigDict({"name": "two", "platform": "cpu", "pools": [pool("decode"), pool("train")]})
"""
WORDS = (
    "--config.cluster.learner_processes=1",
    "--config.cluster.restarts=1",
    "--config.cluster.heartbeat_s=0.3",
    f"--config.cluster.lease_s={LEASE_S}",
    "--config.rollout.max_staleness=16",
    "--config.tasks.sources[0].config.step_s=0.2",
    "--config.steps=1000",
)


def learner():
    found = [
        child
        for child in psutil.Process().children()
        if "rl_jax.learner_process" in child.cmdline()
    ]
    return found[0] if found else None


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def num_steps(run):
    return sum("optim/grad_norm" in row for row in lines(run / "metrics.jsonl"))


def break_it(run, told):
    """Stops the learner's process, waits until another one has trained, and kills that."""
    until = lambda condition: [time.sleep(0.02) for _ in iter(lambda: bool(condition()), True)]
    until(lambda: num_steps(run) >= 1)
    told["stopped"] = learner()
    told["stopped"].send_signal(signal.SIGSTOP)
    told["stopped_s"] = time.monotonic()
    until(lambda: any(e["kind"] == "learner_lost" for e in lines(run / "events.jsonl")))
    told["lost_s"] = time.monotonic()
    until(lambda: learner() not in (None, told["stopped"]))
    told["steps"] = num_steps(run)
    until(lambda: num_steps(run) > told["steps"])
    told["trained_s"] = time.monotonic()
    learner().kill()


def test_stopped_learner_comes_back_while_servers_serve_and_one_lost_too_often_ends_the_run(
    tmp_path, capsys
):
    (tmp_path / "two.py").write_text(MESH)
    run, told = tmp_path / "run", {}
    breaker = threading.Thread(target=break_it, args=(run, told), daemon=True)
    breaker.start()
    words = [f"--config={FILE}", f"--run_dir={run}", f"--mesh={tmp_path / 'two.py'}", *WORDS]
    assert launch.main(words) == 5
    breaker.join(10)

    first, *_ = losses = [e for e in lines(run / "events.jsonl") if e["kind"] == "learner_lost"]
    assert "nothing came from learner.0 for 2" in first["why"]
    assert f"(cluster.lease_s={LEASE_S})" in first["why"]
    assert len(losses) == 1 and first["base"] == 0
    assert told["lost_s"] - told["stopped_s"] < LEASE_S + 5
    assert not told["stopped"].is_running() and learner() is None

    turns = [
        line
        for line in lines(run / "ledger.jsonl")
        if line["state"] in ("COMPLETED", "TRUNCATED")
        and told["stopped_s"] < line["t_mono_s"] < told["trained_s"]
    ]
    assert len(turns) >= 4, "episodes end while the learner is away"
    steps = [row["step"] for row in lines(run / "metrics.jsonl") if "optim/grad_norm" in row]
    assert steps == list(range(1, len(steps) + 1)), "no step is made twice"

    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, errors
    assert "the learner's processes were lost 2 times (cluster.restarts=1): learner.0" in errors[0]
    assert "killed by SIGKILL" in errors[0]
    assert json.loads((run / "STATUS.json").read_text())["state"] == "failed"
