"""How a job's parts are built, and what it leaves of itself in the process."""

import asyncio
import gc
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_jax import job, launch
from rl_jax.cluster import InProcCluster, ServersNotReady
from rl_jax.driver import Driver
from rl_jax.mesh import build

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
    frozen, states, loop = [], [], Driver.run

    def status(name):
        return json.loads((tmp_path / name / "STATUS.json").read_text())["state"]

    def watched(driver):
        frozen.append(gc.get_freeze_count())
        states.append(status("a"))
        return loop(driver)

    monkeypatch.setattr(Driver, "run", watched)
    for name in ("a", "b"):
        assert run(tmp_path / name) == 0
        assert gc.get_freeze_count() == 0
    assert min(frozen) > 10_000
    assert states == ["running", "done"] and status("b") == "done"


def test_servers_that_do_not_compile_in_time_end_the_run_and_dead_ones_wait_for_the_sync():
    def server(error):
        def wait_ready(deadline_s):
            if error is not None:
                raise error

        return SimpleNamespace(wait_ready=wait_ready)

    cluster = object.__new__(InProcCluster)
    cluster.prefill, cluster.decode = [server(RuntimeError("died"))], [server(None)]
    cluster.wait_ready(5.0)
    cluster.decode.append(server(TimeoutError("decode.1: not compiled after 5 s (compiling)")))
    with pytest.raises(ServersNotReady, match="decode.1: not compiled.*serve.compile_deadline_s=5"):
        cluster.wait_ready(5.0)
    assert job.exit_code(ServersNotReady("x")) == 5
