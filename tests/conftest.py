"""Every test runs on XLA:CPU with 8 simulated devices and one compile cache, set before anything imports jax.

Programs are compiled without LLVM's optimisations, which halves what an empty cache costs; set XLA_FLAGS to
--xla_backend_optimization_level=3 to run what users run, as `make test` does for the tests marked `bits`.
"""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from rl_jax.backend import avoid_broken_fusions, enable_compile_cache, simulate_cpu_devices

OPTIMIZATION_FLAG = "--xla_backend_optimization_level"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if OPTIMIZATION_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {OPTIMIZATION_FLAG}=0".strip()
avoid_broken_fusions()
simulate_cpu_devices(8)
enable_compile_cache(Path(__file__).resolve().parents[1] / ".cache" / "xla")


def pytest_addoption(parser):
    parser.addoption("--cases", help="a file of worked cases for tests/algorithms/test_cases.py")
    parser.addoption("--sandboxes", help="more of them, comma-separated, for tests/sandbox")
    parser.addoption(
        "--num_sandboxes", default=50, help="in sequence, in tests/sandbox/test_run.py"
    )
    parser.addoption("--failures", default=6, help="of servers, in tests/remote/test_storm.py")


def pytest_collection_modifyitems(items):
    """Files that take longest first, so that no worker is left alone with one of them at the end."""
    seconds = Counter()
    for item in items:
        if mark := item.get_closest_marker("slow"):
            seconds[item.path] += mark.kwargs.get("seconds", 1)
    items.sort(key=lambda item: -seconds[item.path])  # stable


@pytest.fixture(scope="module")  # for longer its event loop would be in the way of other tests
def browser():
    """A headless Chromium, where playwright and a chromium are there."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pages are tried with playwright")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
