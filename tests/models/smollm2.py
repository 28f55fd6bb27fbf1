"""Where SmolLM2 is, for the tests that need it: `make smollm2` fetches it, or RL_JAX_SMOLLM2 names its directory."""

import os
from pathlib import Path

import pytest

DIRECTORY = Path(
    os.environ.get("RL_JAX_SMOLLM2", Path(__file__).resolve().parents[2] / ".cache" / "smollm2")
)

needs_smollm2 = pytest.mark.skipif(
    not (DIRECTORY / "config.json").is_file(), reason="no SmolLM2; make smollm2 fetches it"
)
