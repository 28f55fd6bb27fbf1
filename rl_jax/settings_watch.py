"""The sections of the configuration that watch a run, and change nothing of what it trains. stdlib only.

A field's comment gives its unit and range, as in settings.py, which imports them: whoever reads a section takes it from
there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def steps_range(text: str) -> tuple[int, int]:
    """(A, B) of "A:B". Raises: ValueError."""
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"{text!r} is no range of steps: A:B with 1 <= A <= B, as 3:5")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class MetricsSettings:
    # auto: plain | rich: the last steps as a table, on a terminal (the extra rich) | plain | json | none: the log only
    progress: str = "auto"
    heartbeat_s: float = 30.0
    rollouts_every: int = 1  # steps between saved traces; 0 = never
    # of the timeline that one process may leave in traces/ (tools.trace reads it); the older half goes first; 0 = none
    timeline_bytes: int = 64 << 20
    profile_steps: str = (
        ""  # "A:B": steps A to B, both with, are traced by JAX's profiler into profile/; "" = none
    )
    # Names of TRACKERS, or "package.module:attribute": where else the rows of metrics.jsonl go. tensorboard | wandb |
    # mlflow. None of them can stop or slow the run
    trackers: tuple[str, ...] = ()
    # keyword arguments of a tracker's constructor, by its name
    tracker_options: Mapping[str, Any] = field(default_factory=dict)
    # episodes that trackers get of each step whose traces are saved, and bytes of each one's text
    tracker_samples: int = 4
    tracker_sample_bytes: int = 16_384
    # Prometheus text of every process of the run at http://HOST:PORT/metrics. 0 = none; else the driver's port, and
    # each other process has the next one (endpoints.json in the run directory)
    port: int = 0
    host: str = "127.0.0.1"  # beyond loopback it needs token_file
    token_file: str = ""  # a file whose one line scrapers must send; "" = none


@dataclass(frozen=True)
class GuardSettings:
    """Alarms of a step (guards.py). Each word: warn | raise (the run ends after the step, saved; exit code 6) | off."""

    zero_signal: str = "warn"  # no trained token, or every advantage 0
    nonfinite: str = "warn"  # a figure of the step, or its update, is not finite
    truncated: str = "warn"  # more than truncated_above of the episodes cut by a length
    ess: str = "warn"  # is/ess below ess_below
    k3: str = "warn"  # mismatch/k3 above k3_above
    lag0: str = "warn"  # mismatch/abs_mean_lag0_pure above lag0_above
    truncated_above: float = 0.9  # share of a step's episodes that ended by context or length
    ess_below: float = 0.5
    k3_above: float = 0.05
    lag0_above: float = 0.0  # 0 = by model.dtype: 1e-3 in float32, 0.05 in bfloat16
    every: int = 20  # steps before the same alarm speaks again
