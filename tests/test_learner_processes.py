"""A learner whose train mesh two processes share: the same weights as in one, also after one of them was killed."""

import json
import threading
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from rl_jax import config, launch
from rl_jax.checkpoint import Checkpointer
from rl_jax.settings import CheckpointSettings
from rl_jax.tools.trace_files import read_attempts
from tests.timeline_checks import check_timeline

FILE = Path(__file__).parent / "job_config.py"
MESH = """
from ml_collections import ConfigDict


def get_config():
    pool = lambda name, devices, **axes: ConfigDict(
        {"name": name, "kind": name, "devices": devices, "axes": axes}
    )
    pools = [pool("prefill", 1), pool("decode", 1), pool("train", 2, fsdp=2)]
    return ConfigDict({"name": "three", "platform": "cpu", "pools": pools})
"""
STEPS = 4
TWO = "--config.cluster.learner_processes=2"


def learners():
    """The learner's processes of this one, as they were started."""
    children = psutil.Process().children()
    found = [child for child in children if "learner_process" in " ".join(child.cmdline())]
    return sorted(found, key=lambda child: child.create_time())


def kill_after(metrics, num_rows, killed, heard):
    """A process of the learner, once so many steps are recorded. heard: gets the addresses that they listen on."""
    while not metrics.exists() or metrics.read_text().count('optim/grad_norm"') < num_rows:
        time.sleep(0.005)
    for process in learners():
        heard += [c.laddr.ip for c in process.net_connections("tcp") if c.status == "LISTEN"]
    victim = learners()[1]
    victim.kill()
    killed.append(victim.pid)


def weights(run, step):
    """The whole state that a run saved, as host arrays."""
    keeper = Checkpointer(run, CheckpointSettings())
    leaves = keeper.manifest(step)["leaves"]
    wanted = {n: jax.ShapeDtypeStruct(shape, dtype) for n, (dtype, shape) in leaves.items()}
    return {name: np.asarray(x) for name, x in keeper.restore(step, wanted)[0].items()}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run in the driver's process, and one in two processes of which one is killed in the middle."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "three.py").write_text(MESH)
    killed: list[int] = []
    heard: list[str] = []
    for name, more in (("here", ()), ("there", (TWO,))):
        run = folder / name
        if more:
            args = (run / "metrics.jsonl", 2, killed, heard)
            threading.Thread(target=kill_after, args=args, daemon=True).start()
        words = [f"--config={FILE}", f"--run_dir={run}", "--config.run_id=r", *more]
        words += [f"--mesh={folder / 'three.py'}", f"--config.steps={STEPS}"]
        words += ["--config.warm_start.steps=2", "--config.warm_start.batch_episodes=4"]
        words += ["--config.tasks.sources[0].script_episodes=8"]
        words += ["--config.tasks.sources[0].env=rl_jax.testing.envs:ScriptedEvenEnv"]
        assert launch.main(words) == 0
    assert killed and not psutil.pid_exists(killed[0])
    assert learners() == []
    assert heard and {ip.removeprefix("::ffff:") for ip in heard} <= {"127.0.0.1", "::1"}
    return folder


@pytest.mark.slow(seconds=60)
def test_weights_are_those_of_one_process_and_a_killed_process_changes_nothing(runs):
    here, there = runs / "here", runs / "there"
    (lost,) = [e for e in lines(there / "events.jsonl") if e["kind"] == "learner_lost"]
    assert lost["base"] == 0 and 1 <= lost["updates"] < STEPS
    assert "learner.1" in lost["why"]
    for step in (STEPS,):
        want, got = weights(here, step), weights(there, step)
        assert want.keys() == got.keys()
        for name, array in want.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-6, atol=1e-7, err_msg=name)
    trained = {
        run.name: {
            (line["uid"], line["step"]): line["sha256"]
            for line in lines(run / "ledger.jsonl")
            if line["state"] == "TRAINED"
        }
        for run in (here, there)
    }
    assert len(trained["here"]) == STEPS * 4 and trained["there"] == trained["here"]
    once = Counter(
        line["uid"] for line in lines(there / "ledger.jsonl") if line["state"] == "TRAINED"
    )
    assert set(once.values()) == {1}
    syncs = [e for e in lines(there / "events.jsonl") if e["kind"] == "sync"]
    assert len(syncs) <= 1  # at most the one under way when the process died


@pytest.mark.slow
def test_timeline_has_what_learners_did_and_the_seconds_without_them(runs):
    goodput = check_timeline(runs / "there")
    assert 0.1 < goodput.sched < 1.0, "both were started again"
    train = goodput.pools["train"]
    assert train.useful_s > 0 and train.buckets["compile"] > 0
    (attempt,) = read_attempts(runs / "there")
    updates = [s for s in attempt.of("train") if s.kind == "update" and s.row == "learner.0"]
    # Two of the warm start, and of each version at least one: those that were lost are repeated. What a process did in
    # the last half second before it was killed may be missing.
    assert {s.more["version"] for s in updates} == set(range(STEPS)) and len(updates) >= STEPS + 2
    assert attempt.within_s == 0.0, "one host, one clock"


@pytest.mark.slow(seconds=60)
def test_run_goes_on_where_another_number_of_processes_left_it(runs):
    run = runs / "here"
    words = [f"--run_dir={run}", f"--config.steps={STEPS + 1}"]
    assert launch.main([*words, TWO]) == 0
    rows = [row for row in lines(run / "metrics.jsonl") if "optim/grad_norm" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 2))
    assert weights(run, STEPS + 1)["step"] != weights(run, STEPS)["step"]


@pytest.mark.slow
def test_processes_of_a_run_that_replays_are_asked_for_as_a_live_runs_are(runs, tmp_path, capsys):
    """The command is told, who did not come is named, and the secret's file goes."""
    words = [f"--config={FILE}", f"--run_dir={tmp_path / 'r'}", "--mode=train_only"]
    words += [f"--mesh={runs / 'three.py'}", f"--config.rollout.replay_dir={runs / 'here'}"]
    words += [TWO, "--config.cluster.backend=external", "--config.cluster.start_timeout_s=2"]
    assert launch.main(words) == 5
    (log,) = (tmp_path / "r").glob("logs/attempt_*/driver.log")
    said = log.read_text()
    for name in ("learner.0", "learner.1"):
        assert "rl_jax.learner_process --connect=127.0.0.1:" in said
        assert f"--server={name}" in said
    error = capsys.readouterr().err
    assert "run the command that was printed for each" in error and "ended here" not in error
    assert not list((tmp_path / "r").glob("logs/*/cluster.secret"))


def refused(*words):
    with pytest.raises(config.ConfigError) as caught:
        config.parse(list(words))
    return caught.value.errors


def test_processes_must_share_the_train_mesh_evenly_and_hold_all_that_scores():
    mesh = "--mesh=split_8"
    assert config.parse([mesh, TWO]).settings.cluster.learner_processes == 2
    (error,) = refused(mesh, "--config.cluster.learner_processes=3")
    assert "cluster.learner_processes=3 does not divide the 4 devices of the train mesh" in error
    (error,) = refused(mesh, TWO, "--config.mesh.platform=")
    assert "cluster.learner_processes gives each process devices of its own" in error
    errors = refused(mesh, TWO, "--config.weights.transport=reshard")
    assert errors[0].startswith(
        "weights.transport=reshard is from a train mesh of the driver's process"
    )
    errors = refused(mesh, TWO, "--config.algorithm.name=sft", "--config.data.path=x.jsonl")
    assert any("trains on rows of data trains in the driver's process; use 0" in e for e in errors)
