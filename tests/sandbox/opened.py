"""A sandbox for a test, or the reason why it is skipped."""

from functools import cache

import pytest

from rl_jax.sandbox.load import open_sandbox
from rl_jax.sandbox.records import SandboxMissing


@cache
def _opened(name):
    try:
        return open_sandbox(name)
    except SandboxMissing as error:
        return str(error)


def sandbox_or_skip(name="bubblewrap"):
    found = _opened(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found
