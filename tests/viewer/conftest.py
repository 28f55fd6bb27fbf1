"""Generated runs that the viewer's tests read; none of them writes there."""

import shutil

import pytest

from rl_jax.names import resolve
from rl_jax.testing.generated_run import write_run
from rl_jax.viewer.api import Api


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "calm", 12, 4, 4)


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "hostile", 6, 3, 4, hostile=True)


@pytest.fixture(scope="session")
def api(run):
    return Api(run, resolve)


@pytest.fixture
def copy(run, tmp_path):
    """A run of the test's own."""
    return shutil.copytree(run, tmp_path / "copy")
