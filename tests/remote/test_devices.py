"""Which devices a process finds: simulated ones of its own, or the GPUs of its part of the mesh and no others."""

from pathlib import Path

import pytest

from mesh_configs import h100_8
from rl_jax import backend, outset
from rl_jax.backend import DEVICE_FLAG
from rl_jax.cluster import learner_specs
from rl_jax.config import ConfigError, parse
from rl_jax.mesh import MeshPlan
from rl_jax.preflight_cluster import check_gpus
from rl_jax.remote.spec import Spec
from rl_jax.remote.starter import Child, ExternalStarter
from rl_jax.settings import ClusterSettings

SETTINGS = ClusterSettings()
PROGRAM = "tests.remote.show_devices"


@pytest.fixture
def six(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9, 8,7,6,5,4")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=d {DEVICE_FLAG}=8")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def gpu_spec(*devices):
    return Spec(
        name="decode.1", program=PROGRAM, num_devices=len(devices), platform="gpu", devices=devices
    )


def shown(spec, tmp_path) -> dict[str, str]:
    child = Child(spec, "1", SETTINGS, tmp_path)
    try:
        assert child.ended(60.0) == "ended with exit code 0", child.last_words()
        child.last_words()
    finally:
        child.kill()
    lines = (tmp_path / f"{spec.name}.log").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.slow
def test_a_process_sees_the_gpus_of_its_part_of_the_mesh(six, tmp_path):
    found = shown(gpu_spec(1, 4), tmp_path)
    assert found["CUDA_VISIBLE_DEVICES"] == "8,5"
    assert found["JAX_PLATFORMS"] == "cuda" and found["NCCL_DEBUG"] == "WARN"
    assert found["XLA_FLAGS"] == "--xla_dump_to=d"


@pytest.mark.slow
def test_a_process_with_simulated_devices_sees_no_gpu_settings(six, tmp_path):
    found = shown(Spec(name="decode.0", program=PROGRAM, num_devices=3), tmp_path)
    assert "CUDA_VISIBLE_DEVICES" not in found and "NCCL_DEBUG" not in found
    assert found["JAX_PLATFORMS"] == "cpu"
    assert found["XLA_FLAGS"] == f"--xla_dump_to=d {DEVICE_FLAG}=3"


def test_gpus_that_a_host_has_not_are_told_before_anything_is_written(six, monkeypatch):
    words = ["--mesh=split_8", "--config.mesh.platform=gpu", "--config.cluster.backend=local"]
    settings = parse([*words, "--config.cluster.learner_processes=1"]).settings
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    numbers = [p.name[6:] for p in Path("/dev").glob("nvidia*") if p.name[6:].isdecimal()]
    for given, num in (("9, 8,7,6,5,4", 6), ("0", 1), ("", 0), (None, len(numbers))):
        if given is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        if num < plan.num_devices:
            with pytest.raises(ConfigError, match=f"takes {plan.num_devices} GPUs, .* has {num} "):
                check_gpus(plan, settings)
        else:
            check_gpus(plan, settings)
    check_gpus(plan, parse(["--mesh=split_8"]).settings)


def test_a_command_for_somebody_else_leaves_the_choice_of_gpus_to_them(six, tmp_path):
    starter = ExternalStarter(SETTINGS, tmp_path, [gpu_spec(0, 1)])
    (command,) = starter.commands
    starter.close()
    assert "JAX_PLATFORMS=cuda" in command and DEVICE_FLAG not in command
    assert "CUDA_VISIBLE_DEVICES" not in command


def test_the_learners_processes_share_the_train_meshs_gpus():
    words = ["--mesh=h100_8", "--config.mesh.platform=gpu", "--config.cluster.backend=local"]
    settings = parse([*words, "--config.cluster.learner_processes=2"]).settings
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    one, two = learner_specs(plan, settings)
    assert (*one.devices, *two.devices) == tuple(plan.train.devices)
    assert len(one.devices) == one.num_devices and one.platform == "gpu"
    others = {number for server in plan.servers for number in server.devices}
    assert not others & {*one.devices, *two.devices}
    assert h100_8.get_config().platform == "", "the default: one process with all GPUs"


def test_a_driver_of_processes_with_gpus_takes_none(monkeypatch):
    """In a process of its own it is asked for simulated devices; this one has imported JAX already."""
    told = []
    monkeypatch.setattr(backend, "only_simulate", told.append)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    words = ["--mesh=h100_8", "--config.mesh.platform=gpu", "--config.cluster.backend=local"]
    settings = parse([*words, "--config.cluster.learner_processes=1"]).settings
    outset.set_backend(settings)
    assert told == [MeshPlan.from_settings(settings.mesh, settings.model).num_devices]


def test_where_gpus_were_asked_for_and_are_not_the_refusal_says_so(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(backend.BackendError, match="mesh.platform=gpu contradicts JAX_PLATFORMS"):
        backend.use_platform("gpu")
