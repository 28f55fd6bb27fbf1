"""rl_jax: agentic RL post-training for language models on JAX meshes. Importing it does no work.

`quickstart`, `run` and `open` (docs/notebook.md) are imported when they are asked for.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_NOTEBOOK = {"quickstart": "quickstart", "run": "run", "open": "open_run"}  # -> rl_jax.notebook.run


def __getattr__(name: str) -> Any:
    if name not in _NOTEBOOK:
        raise AttributeError(f"module rl_jax has no attribute {name}")
    return getattr(importlib.import_module("rl_jax.notebook.run"), _NOTEBOOK[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *_NOTEBOOK])
