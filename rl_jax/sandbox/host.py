"""What of the host a sandbox is made of: the programs that make it, and the directories it shows read-only."""

import os
import shutil
from functools import cache

from rl_jax.sandbox.records import SandboxMissing

PATH = "/usr/local/bin:/usr/bin:/bin"  # of sandboxes
SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ROOT_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = ("/etc/ld.so.cache", "/etc/alternatives")  # neither says anything of the host's users


def find_program(backend: str, name: str, remedy: str, searched: str = SEARCHED) -> str:
    """Its path; PATH of the environment is not asked. Raises SandboxMissing with the remedy."""
    path = shutil.which(name, path=searched)
    if path is None:
        raise SandboxMissing(
            f"sandbox {backend}: the program {name} is missing; {remedy}, or use another backend; programs that a model"
            " wrote do not run without isolation"
        )
    return path


@cache
def read_only_paths() -> dict[str, str]:
    """Paths that a sandbox shows -> "", or where one is a symbolic link that leads to."""
    out = {"/usr": ""}
    for path in ROOT_LINKS:
        if os.path.islink(path):
            out[path] = os.readlink(path)
        elif os.path.isdir(path):
            out[path] = ""
    return out | {path: "" for path in ETC if os.path.exists(path)}
