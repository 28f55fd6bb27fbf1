"""Every file of mesh_configs/ is a legal plan for the models we run, and builds on fake devices."""

import importlib
from dataclasses import fields
from pathlib import Path

import jax
import pytest

from rl_jax.mesh import MeshPlan, build_meshes
from rl_jax.settings import (
    EngineSettings,
    LearnerSettings,
    MeshSettings,
    ModelSettings,
    PoolSettings,
)
from rl_jax.testing.tiny_model import tiny_settings

CONFIGS = {  # file and argument -> devices
    "one_device": 1,
    "colocated_8": 8,
    "split_8": 8,
    "split_8:train1": 5,
    "split_8:train2": 6,
    "split_8:4": 8,
    "gpu_2": 2,
    "split_2": 2,
    "h100_8": 8,
    "tpu_v5e_16": 16,
}
MODELS = {
    "quickstart": (ModelSettings(), 264),
    "tiny": (tiny_settings(), 264),
    "qwen2.5-1.5b": (
        ModelSettings(
            num_layers=28,
            embed_size=1536,
            num_heads=12,
            num_kv_heads=2,
            head_dim=128,
            mlp_size=8960,
            qkv_bias=True,
        ),
        151_936,
    ),
}


def mesh_settings(name: str) -> MeshSettings:
    file, _, arg = name.partition(":")
    config = importlib.import_module(f"mesh_configs.{file}").get_config(arg)
    plain = config.to_dict()
    assert set(plain) == {field.name for field in fields(MeshSettings)}
    pools = [PoolSettings(**dict(pool)) for pool in config.pools]
    return MeshSettings(**{**plain, "pools": tuple(pools)})


def test_every_file_is_listed_here():
    files = Path(importlib.import_module("mesh_configs").__file__).parent.glob("[a-z]*.py")
    assert {file.stem for file in files} == {name.partition(":")[0] for name in CONFIGS}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CONFIGS)
def test_config_fits_each_model(name, model):
    settings, vocab_size = MODELS[model]
    plan = MeshPlan.from_settings(mesh_settings(name), settings)
    assert plan.num_devices == CONFIGS[name]
    assert (
        plan.check(settings, CONFIGS[name], LearnerSettings(), EngineSettings(), vocab_size) == []
    )
    if plan.num_devices > 1:
        assert plan.check(settings, plan.num_devices - 1)


@pytest.mark.parametrize("name", [name for name, devices in CONFIGS.items() if devices <= 8])
def test_config_builds_on_fake_devices(name):
    plan = MeshPlan.from_settings(mesh_settings(name), ModelSettings())
    meshes = build_meshes(plan)
    used = [d for mesh in meshes.servers.values() for d in mesh.devices.ravel()]
    if plan.pools[0].kind != "colocated":
        used += meshes.train.devices.ravel().tolist()
    assert sorted(d.id for d in used) == list(range(CONFIGS[name]))
    assert len(meshes.servers) == len(plan.servers)
    assert meshes.train.devices.ravel()[0] in jax.devices()


@pytest.mark.parametrize("name", ["one_device:x", "split_8:train3", "split_8:many"])
def test_unknown_argument_is_refused_with_the_remedy(name):
    with pytest.raises(ValueError, match=r"takes no argument|use train1, train2 or train4"):
        mesh_settings(name)
