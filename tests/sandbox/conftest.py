"""Sandboxes for tests: each backend that works on this machine, once; the others are skipped with their reason.

pytest tests/sandbox --sandboxes=nsjail:/path/of/nsjail,container:podman/localhost/IMAGE     more of them
"""

import shutil
from functools import cache

import pytest

from rl_jax.sandbox.load import open_sandbox
from rl_jax.sandbox.records import SandboxMissing


def names(config) -> list[str]:
    more = config.getoption("--sandboxes") or ""
    found = ["nsjail"] if shutil.which("nsjail") else []
    return ["bubblewrap", *found, *(name for name in more.split(",") if name)]


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", names(metafunc.config), indirect=True)


@cache
def opened(name):
    """The sandbox, or why there is none."""
    try:
        return open_sandbox(name)
    except SandboxMissing as error:
        return str(error)


@pytest.fixture
def backend(request):
    """A sandbox of each backend."""
    found = opened(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def bubblewrap():
    found = opened("bubblewrap")
    if isinstance(found, str):
        pytest.skip(found)
    return found
