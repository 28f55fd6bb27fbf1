"""`make test` fetches the real model that some tests need, and goes on without it."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def make_test(directory, fetch_code, **env):
    """(exit code, output, what the interpreter was told) of `make test` with an interpreter that does nothing."""
    (directory / ".ci").mkdir()
    for name in ("setup.py", "pyproject.toml", ".ci/venv", "stamp"):
        (directory / name).touch()
    python = directory / "python"
    python.write_text(
        f"#!/bin/sh\necho $* >> {directory}/said\ncase $* in *fetch_smollm2*) exit {fetch_code};; esac\n"
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "-f", ROOT / "Makefile", "test", f"PY={python}", f"STAMP={directory}/stamp"],
        cwd=directory,
        env={**{k: v for k, v in os.environ.items() if k != "RL_JAX_SMOLLM2"}, **env},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, (directory / "said").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 3])
def test_model_is_fetched_once_and_its_lack_is_told(tmp_path, code):
    status, out, said = make_test(tmp_path, code)
    assert status == 0 and said[0] == "-m rl_jax.tools.fetch_smollm2 .cache/smollm2"
    assert [line.split()[1] for line in said[1:]] == ["pytest", "pytest"]
    assert ("SmolLM2 could not be fetched: its tests are skipped" in out) == bool(code)


def test_model_that_is_there_is_not_fetched(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    _, _, said = make_test(tmp_path, 3, RL_JAX_SMOLLM2=str(tmp_path / "elsewhere"))
    assert not any("fetch" in line for line in said) and len(said) == 2
