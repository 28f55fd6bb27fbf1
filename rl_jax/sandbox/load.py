"""A sandbox by its name, once it was seen to isolate on this machine.

`open_sandbox` runs a small program in the backend (probe.sh), once a process, that looks for what a sandbox must hide
and bound. Whatever does not hold is SandboxMissing, one line with the remedy; there is no weaker way to run. It also
ends what runs that are gone left behind.
"""

import importlib
from functools import cache
from pathlib import Path

from rl_jax.sandbox import BACKENDS
from rl_jax.sandbox.records import Job, Limits, SandboxError, SandboxMissing
from rl_jax.sandbox.run import Sandbox

PROBE = Limits(
    wall_s=20.0,
    cpu_s=5,
    memory_bytes=256 << 20,
    processes=12,
    disk_bytes=1 << 20,
    output_bytes=4096,
)
REMEDY = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0;"
    " in a container: its seccomp profile), or use another backend"
)


@cache
def open_sandbox(name: str) -> Sandbox:
    """name: a key of BACKENDS, with what it runs behind a colon where it takes that.

    Raises: ValueError for an unknown name; SandboxMissing where it is missing or does not isolate.
    """
    sandbox = make_sandbox(name)
    sandbox.reap()
    _probe(name, sandbox)
    return sandbox


def make_sandbox(name: str) -> Sandbox:
    """Without trying it. Raises: ValueError, SandboxMissing."""
    key, _, arg = name.partition(":")
    if key not in BACKENDS:
        raise ValueError(f"no sandbox {name!r}; use one of {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[key].partition(":")
    backend = getattr(importlib.import_module(module), attribute)(arg)
    backend.check()
    return Sandbox(backend)


def _probe(name: str, sandbox: Sandbox) -> None:
    script = Path(__file__).with_name("probe.sh").read_bytes()
    try:
        result = sandbox.run(Job(("bash", "probe.sh"), files={"probe.sh": script}, limits=PROBE))
    except SandboxError as error:
        raise SandboxMissing(f"sandbox {name} does not work here: {error}; {REMEDY}") from None
    found = result.stdout.decode("utf-8", "replace").split("\n")
    if found[-2:] != ["probed", ""] or len(found) > 2:
        said = "; ".join(found[:-2]) or result.stderr.decode("utf-8", "replace").strip()[-300:]
        ended = f"limit {result.limit}" if result.limit else f"exit {result.status}"
        raise SandboxMissing(
            f"sandbox {name} does not isolate here: {said or ended}; {REMEDY}; programs that a model wrote do not run"
            " without isolation"
        )
