"""A sandbox for a test, or the reason why it is skipped.

Skipped is what this machine lacks. Where it has what a backend needs, a sandbox that does not open is a failure: it may
be ours.
"""

import shutil
import subprocess
from functools import cache

import pytest

from rl_jax.sandbox.load import make_sandbox, open_sandbox
from rl_jax.sandbox.records import SandboxMissing


@cache
def _lacks(name):
    """What this machine lacks for a backend; "" = nothing."""
    try:
        make_sandbox(name)
    except SandboxMissing as error:
        return str(error)
    if name != "bubblewrap":
        return ""
    bwrap = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
    ]
    tried = subprocess.run([*bwrap, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() or f"bwrap: exit {tried.returncode}" if tried.returncode else ""


def sandbox_or_skip(name="bubblewrap"):
    if lacks := _lacks(name):
        pytest.skip(lacks)
    return open_sandbox(name)
