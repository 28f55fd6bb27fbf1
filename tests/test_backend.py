"""What JAX is told before it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax import backend


@pytest.fixture
def env(monkeypatch):
    """The environment without what chooses cache and flags; restored afterwards."""
    for name in ("RL_JAX_CACHE", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS"):
        monkeypatch.setenv(name, "")
    return monkeypatch


def test_the_compile_cache_is_in_the_home_unless_a_variable_says_otherwise(env):
    assert backend.default_cache_dir() == Path.home() / ".cache" / "rl_jax"
    env.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert backend.default_cache_dir() == Path("/elsewhere/rl_jax")
    env.setenv("RL_JAX_CACHE", "/mine")
    assert backend.default_cache_dir() == Path("/mine")


def test_the_compile_cache_is_on_without_being_asked_for(env, tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    for name in (*names, "jax_persistent_cache_min_entry_size_bytes"):
        env.setenv(name.upper(), "")  # so that it is taken back afterwards
    env.setenv("RL_JAX_CACHE", str(tmp_path))
    try:
        assert backend.enable_compile_cache() == tmp_path / "xla"
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xla")
        assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "xla")
        env.setenv("JAX_COMPILATION_CACHE_DIR", "/chosen")
        assert backend.enable_compile_cache() == Path("/chosen")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize(
    ("version", "flags", "wanted"),
    [
        ("0.10.2", "", f"{backend.FUSION_FLAG}="),
        ("0.11.0", "--xla_dump_to=x", f"--xla_dump_to=x {backend.FUSION_FLAG}="),
        ("0.10.2", f"{backend.FUSION_FLAG}=dot", f"{backend.FUSION_FLAG}=dot"),
        ("0.11.2", "", ""),
        ("0.12.0.1", "", ""),
    ],
)
def test_broken_fusions_are_off_where_jaxlib_has_them(env, version, flags, wanted):
    env.setattr(backend.metadata, "version", lambda name: version)
    env.setenv("XLA_FLAGS", flags)
    backend.avoid_broken_fusions()
    assert os.environ["XLA_FLAGS"] == wanted


def test_a_sum_of_products_under_vmap_is_right():
    """Off by a factor in its last rows on jaxlib 0.10.2 with its own fusions; larger than one thread's share."""
    rows = np.stack([np.arange(32_769, dtype=np.float32), *np.zeros((2, 32_769), np.float32)], 1)
    square = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))
    np.testing.assert_allclose(square(rows), rows[:, 0] ** 2, rtol=1e-6)


@pytest.mark.slow
def test_a_dry_runs_devices_are_simulated_whatever_the_variables_name():
    code = (
        "from rl_jax import backend; backend.only_simulate(12); import jax\n"
        "print([d.platform for d in jax.devices()] == 12 * ['cpu'])"
    )
    env = {**os.environ, "JAX_PLATFORMS": "no_such_chip", "XLA_FLAGS": ""}
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=env, check=True
    )
    assert done.stdout == "True\n"
