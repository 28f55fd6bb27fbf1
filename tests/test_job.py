"""How a job's parts are built, and what it leaves of itself in the process."""

from pathlib import Path

from rl_jax import launch
from rl_jax.driver import Driver
from rl_jax.mesh import build

CONFIG = f"--config={Path(__file__).parent / 'job_config.py'}"


def run(directory, *words):
    return launch.main([CONFIG, f"--run_dir={directory}", "--config.steps=1", *words])


def test_each_mesh_of_the_plan_is_built_once(tmp_path, monkeypatch):
    made, make_mesh = [], build.make_mesh

    def counted(axes, devices):
        made.append(tuple(device.id for device in devices))
        return make_mesh(axes, devices)

    monkeypatch.setattr(build, "make_mesh", counted)
    monkeypatch.setattr(Driver, "run", lambda driver: driver.state)
    assert run(tmp_path, "--mesh=split_8:train2") == 0
    assert sorted(made) == [(0,), (1,), (2,), (3,), (4, 5)]
