"""What JAX itself can tell of a process: its profiler's traces of some steps, and what it compiles when.

Owns: `Profiler` (metrics.profile_steps) and `CompileSpans`, a listener of JAX's compile events that fills the timeline.
A profile is of the process that makes it: the driver's, with the servers and the learner that live there, and each of
the learner's own; servers in other processes are not profiled.
Must not: stop a run because a profile could not be made.
"""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import jax
from jax import monitoring

from rl_jax.settings import MetricsSettings
from rl_jax.settings_watch import steps_range
from rl_jax.timeline import Timeline

LOG = logging.getLogger(__name__)

COMPILES = {  # event -> what it is; they lie within each other
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
LEAST_S = 1e-3  # a shorter one is of no interest: small functions are traced by the thousand


class Profiler:
    """Traces whole steps. `begin` and `end` on the thread that makes them."""

    def __init__(self, settings: MetricsSettings, directory: Path):
        """Of the steps that settings.profile_steps names, into the directory. Raises: ValueError."""
        named = settings.profile_steps
        self._steps, self._directory = steps_range(named) if named else (0, 0), directory
        self._is_on = False

    def begin(self, step: int) -> None:
        first, last = self._steps
        if self._is_on or not first <= step <= last:
            return
        try:
            jax.profiler.start_trace(str(self._directory))
            self._is_on = True
        except Exception as error:  # the boundary to the profiler: another one may be at work
            LOG.warning("steps %d to %d are not profiled: %s", first, last, error)
            self._steps = (0, 0)

    def end(self, step: int) -> None:
        if self._is_on and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write what there is; idempotent."""
        if not self._is_on:
            return
        self._is_on = False
        try:
            jax.profiler.stop_trace()
            LOG.info("a profile is in %s", self._directory)
        except Exception as error:  # the boundary to the profiler: a full disk, say
            LOG.warning("the profile could not be written to %s: %s", self._directory, error)


class CompileSpans:
    """From its making until `close`, every program that this process compiles is a span of compile/THREAD."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._is_over = not timeline.is_on
        if timeline.is_on:
            monitoring.register_event_duration_secs_listener(self._heard)

    def close(self) -> None:
        """Listen no more; idempotent."""
        if not self._is_over:
            self._is_over = True
            monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, seconds: float, **fields: Any) -> None:
        if event in COMPILES and seconds > LEAST_S:
            end_s = time.monotonic()
            track = self._timeline.track(f"compile/{threading.current_thread().name}")
            program = str(fields.get("fun_name", ""))
            track.add(COMPILES[event], end_s - seconds, end_s, program=program)
