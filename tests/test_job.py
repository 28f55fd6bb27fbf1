"""How a job's parts are built, and what it leaves of itself in the process."""

import asyncio
import gc
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_jax import launch
from rl_jax.cluster import InProcCluster, ServersNotReady, Watched
from rl_jax.driver import Driver
from rl_jax.engine.engine import JaxEngine
from rl_jax.exit_codes import exit_code
from rl_jax.mesh import build
from rl_jax.rollout.traces import read_traces

CONFIG = f"--config={Path(__file__).parent / 'job_config.py'}"


def run(directory, *words):
    """As in a notebook's cell: on a thread whose event loop runs."""

    async def cell():
        return launch.main([CONFIG, f"--run_dir={directory}", "--config.steps=1", *words])

    return asyncio.run(cell())


@pytest.mark.slow
def test_each_mesh_of_the_plan_is_built_once(tmp_path, monkeypatch):
    made, make_mesh = [], build.make_mesh

    def counted(axes, devices):
        made.append(tuple(device.id for device in devices))
        return make_mesh(axes, devices)

    monkeypatch.setattr(build, "make_mesh", counted)
    monkeypatch.setattr(Driver, "run", lambda driver: driver.state)
    assert run(tmp_path, "--mesh=split_8:train2") == 0
    assert sorted(made) == [(0,), (1,), (2,), (3,), (4, 5)]


@pytest.mark.slow
def test_loop_runs_with_what_was_compiled_frozen_and_the_process_gets_it_back(
    tmp_path, monkeypatch
):
    frozen, states, named, loop = [], [], [], Driver.run

    def status(name):
        return json.loads((tmp_path / name / "STATUS.json").read_text())["state"]

    def watched(driver):
        frozen.append(gc.get_freeze_count())
        named.append(
            [type(target) is Watched for target in driver.parts.sync.taking_part().values()]
        )
        states.append(status("a"))
        return loop(driver)

    monkeypatch.setattr(Driver, "run", watched)
    for name in ("a", "b"):
        assert run(tmp_path / name) == 0
        assert gc.get_freeze_count() == 0
    assert min(frozen) > 10_000
    assert all(map(all, named)) and all(named), "a call of a sync that hangs is named"
    assert states == ["running", "done"] and status("b") == "done"


def cluster_of(**servers):
    """name -> what its wait_ready raises, None once it has compiled."""

    def server(name, error):
        def wait_ready(deadline_s):
            if error is not None:
                raise error

        return SimpleNamespace(
            name=name, wait_ready=wait_ready, progress=lambda: (3, "compiling, after arm")
        )

    cluster = object.__new__(InProcCluster)
    cluster.prefill, cluster.decode = [], [server(*item) for item in servers.items()]
    return cluster


def test_server_that_does_not_compile_in_time_ends_the_run():
    cluster_of(a=None, b=None).wait_ready(5.0)
    with pytest.raises(
        ServersNotReady, match=r"b: not compiled after 0.5 s \(compiling, after arm"
    ):
        cluster_of(a=None, b=TimeoutError()).wait_ready(0.5)
    assert exit_code(ServersNotReady("x")) == 5


def test_server_that_dies_is_told_while_another_still_compiles():
    cluster = cluster_of(slow=TimeoutError(), dead=RuntimeError("dead: it died while compiling"))
    with pytest.raises(ServersNotReady, match="^dead: it died while compiling; the log has"):
        cluster.wait_ready(1e6)
    with pytest.raises(ServersNotReady, match="^dead: "):
        cluster.check()
    cluster_of(slow=TimeoutError()).check()


@pytest.mark.slow
def test_server_that_dies_while_it_compiles_ends_the_run_by_name_with_exit_code_5(
    tmp_path, capsys, monkeypatch
):
    compile_steps = JaxEngine.compile_steps

    def broken(self, params, *, decode=True):
        if self.name == "decode.1":
            raise ValueError("no such instruction")
        return compile_steps(self, params, decode=decode)

    monkeypatch.setattr(JaxEngine, "compile_steps", broken)
    assert run(tmp_path, "--mesh=split_8:train1") == 5
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert "decode.1: its thread died while compiling: ValueError: no such instruction" in line
    assert "no such instruction" in (tmp_path / "logs" / "latest" / "driver.log").read_text()


LAKE = """
from ml_collections import ConfigDict
from tests.job_config import get_config as base

def get_config(arg=""):
    config = base()
    config.engine.context = config.learner.row_tokens = 512
    config.algorithm.name = "reinforce_pp"
    config.rollout.update(batch_groups=1, group_size=1, max_turns=10)
    lake = {"num_maps": 2, "frozen_share": 0.9, "instructions": ""}
    config.tasks.sources = [ConfigDict({"tag": "lake", "env": "frozen_lake", "config": lake})]
    return config
"""


@pytest.mark.slow
def test_an_episode_of_ten_turns_on_the_lake_computes_each_tokens_kv_once(tmp_path):
    (tmp_path / "lake.py").write_text(LAKE)
    words = ["--mode=rollout_only", "--config.steps=1", "--mesh=split_8:train2"]
    run_dir = tmp_path / "run"
    assert launch.main([f"--config={tmp_path / 'lake.py'}", f"--run_dir={run_dir}", *words]) == 0
    (episode,) = read_traces(run_dir / "rollouts/step_1/train")
    (row,) = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    names = ("prefill_tokens", "append_tokens", "decode_tokens", "recompute_tokens")
    computed = {name: row[f"serve/{name}"] for name in names}
    assert len(episode.turns) == 10
    assert sum(computed.values()) == len(episode.tokens) - 1, (
        computed
    )  # nothing follows the last one
    assert computed["recompute_tokens"] == 0
