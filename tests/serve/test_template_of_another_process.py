"""L6 between two processes: a server of another one joins with the hash of the template that it loaded there.

There is no transport between processes yet; what crosses here is the line that a server would join with.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_jax.launch import resolve
from rl_jax.mesh import MeshPlan
from rl_jax.serve import Router
from rl_jax.serve.router import TemplateMismatch
from rl_jax.settings import MeshSettings
from rl_jax.tokens.load import load_tokenizer, make_renderer
from tests.tokens.families import directory_of

ROOT = Path(__file__).resolve().parents[2]
PLAN = MeshPlan.from_settings(MeshSettings())
NAMES = ("qwen25", "llama31")

# The program of a server up to its joining, for each directory given.
SERVER = """
import json, os, sys
from rl_jax.launch import resolve
from rl_jax.tokens.load import load_tokenizer, make_renderer
renderers = [make_renderer(load_tokenizer(name, resolve), "auto", resolve) for name in sys.argv[1:]]
print(json.dumps({"pid": os.getpid(), "hash": hash("x"), "templates": [r.template_sha256 for r in renderers]}))
"""


def joining(directories: list[Path], cwd: Path, seed: str) -> dict:
    """What servers of another process say of themselves; it gets the paths relative to its cwd."""
    words = [sys.executable, "-c", SERVER, *(os.path.relpath(path, cwd) for path in directories)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def copy_of(name: str, directory: Path, more: str = "") -> Path:
    """A family's files elsewhere, keys of JSON in another order where that is no content. more: of the template."""
    shutil.copytree(directory_of(name), directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    told = json.dumps(dict(reversed(config.items())), indent=3)
    (directory / "tokenizer_config.json").write_text(told)
    with (directory / "chat_template.jinja").open("a") as template:
        template.write(more)
    return directory


def test_a_server_of_another_process_joins_with_the_same_template_only(kit, tmp_path):
    load = lambda path: make_renderer(load_tokenizer(str(path), resolve), "auto", resolve)
    ours = [load(directory_of(name)).template_sha256 for name in NAMES]
    same = [copy_of(name, tmp_path / "same" / name) for name in NAMES]
    changed = [copy_of(name, tmp_path / "changed" / name, more=" ") for name in NAMES]
    # Sets and hashes have another order in each process.
    said = [joining([*same, *changed], *at) for at in ((ROOT, "1"), (tmp_path, "4242"))]
    assert len({os.getpid(), *(one["pid"] for one in said)}) == 3
    assert said[0]["hash"] != said[1]["hash"]
    assert said[0]["templates"] == said[1]["templates"]

    server, theirs = kit.decode().server, said[0]["templates"]
    for i, run in enumerate(ours):
        server.template_sha256 = theirs[i]
        assert Router([server], [], PLAN, run).version() == 0
        server.template_sha256 = odd = theirs[len(NAMES) + i]
        with pytest.raises(TemplateMismatch) as caught:
            Router([server], [], PLAN, run)
        line = str(caught.value)
        assert f"server decode.0 was started for the chat template {odd}, but" in line
        assert f"this run renders with {run}; start it with" in line
        assert odd != run and "\n" not in line
