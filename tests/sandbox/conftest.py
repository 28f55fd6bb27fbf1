"""Sandboxes for tests: each backend that works on this machine, once; the others are skipped with their reason.

pytest tests/sandbox --sandboxes=nsjail:/path/of/nsjail,container:podman/localhost/IMAGE     more of them
"""

import shutil

import pytest

from tests.sandbox.opened import sandbox_or_skip


def names(config) -> list[str]:
    more = config.getoption("--sandboxes") or ""
    found = ["nsjail"] if shutil.which("nsjail") else []
    return ["bubblewrap", *found, *(name for name in more.split(",") if name)]


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", names(metafunc.config), indirect=True)


@pytest.fixture
def backend(request):
    """A sandbox of each backend."""
    return sandbox_or_skip(request.param)


@pytest.fixture
def bubblewrap():
    return sandbox_or_skip()
