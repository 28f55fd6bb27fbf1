"""What the benchmarks of serving share: how they begin, and random weights for an engine.

Imports jax inside its functions only: the simulated devices of --tiny must be asked for before.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.train_step import QWEN_1_5B, SHAPES
from rl_jax.settings import ModelSettings


def begin(
    out: Path, tiny: bool, predictions: Mapping[str, float], num_devices: int = 1
) -> tuple[Any, ModelSettings]:
    """(the Report, the shape that is served), with an empty compile cache: compiling is measured too.

    num_devices: simulated ones, where tiny.
    """
    if tiny:
        from rl_jax.backend import simulate_cpu_devices

        simulate_cpu_devices(num_devices)
    import jax

    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    from benchmarks.report import Report

    report = Report(out, {} if tiny else predictions)
    report.head["shape"] = "tiny" if tiny else "Qwen2.5-1.5B"
    return report, replace(SHAPES["tiny"] if tiny else QWEN_1_5B, param_dtype="bfloat16")


def draw(model: Any, shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Random weights of the model by name, in its compute dtype, made by a small program a shape."""
    import jax

    made, arrays = {}, {}
    for i, (name, place) in enumerate(shardings.items()):
        mean, std = model.initial[name]
        shape = model.abstract[name].shape
        key = (shape, mean, std)
        if key not in made:
            fill = lambda k, m=mean, s=std, n=shape: m + s * jax.random.normal(k, n)
            cast = lambda k, fill=fill: fill(k).astype(model.settings.dtype)
            made[key] = jax.jit(cast, out_shardings=place)
        arrays[name] = made[key](jax.random.fold_in(jax.random.key(0), i))
    return arrays
