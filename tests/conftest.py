"""Every test runs on XLA:CPU with 8 simulated devices and one compile cache, set before anything imports jax."""

import os
from pathlib import Path

from rl_jax.backend import avoid_broken_fusions, enable_compile_cache, simulate_cpu_devices

os.environ.setdefault("JAX_PLATFORMS", "cpu")
avoid_broken_fusions()
simulate_cpu_devices(8)
enable_compile_cache(Path(__file__).resolve().parents[1] / ".cache" / "xla")


def pytest_addoption(parser):
    parser.addoption("--cases", help="a file of worked cases for tests/algorithms/test_cases.py")
