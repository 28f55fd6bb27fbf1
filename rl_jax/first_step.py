"""Why the first step of a process took long: its laps, and what was compiled meanwhile.

Owns: a listener of JAX's compile events, from its making until the first step is over or it is closed. A program counts
where its compile (or its way out of the compile cache) ended within the step, on any thread: the learner's own are
compiled in the first step, those of servers before it.
Must not: say anything of a step that was quick, or of a later one.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from jax import monitoring

from rl_jax.metrics import Metric, Row
from rl_jax.progress import duration

SLOW_S = 60.0  # a longer first step is explained
LEAST = 0.02  # share of the step below which a part is not worth a word
LAPS = {  # of the driver's stopwatch
    "time/wait_for_batch_s": "waiting for a batch",
    "time/batch_s": "packing, scoring and advantages",
    "time/train_s": "the update",
    "time/sync_s": "the weight sync",
}
# Lowering and compiling; traces lie within each other, so that their sum says nothing.
COMPILES = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class FirstStep:
    """Made before the first step; `why` is asked after each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._compiled: list[tuple[float, str, float]] = []  # when it ended, program, seconds
        self._is_over = False
        monitoring.register_event_duration_secs_listener(self._heard)

    def why(self, row: Row) -> str | None:
        """What took the time of the step that just ended, in one line; None unless it is the first and was slow."""
        if self._is_over:
            return None
        end_s, total = self._clock(), _seconds(row, "time/step_s")
        compiled: dict[str, float] = {}
        for at_s, program, seconds in self._compiled:
            if end_s - at_s <= total:
                compiled[program] = compiled.get(program, 0.0) + seconds
        self.close()
        if total <= SLOW_S:
            return None
        laps = {what: _seconds(row, name) for name, what in LAPS.items()}
        line = f"the first step took {duration(total)}: {_listed(laps, LEAST * total)}"
        if programs := _listed(compiled, LEAST * total):
            line += f"; compiled meanwhile, for all steps: {programs}"
        return line

    def close(self) -> None:
        """Listen no more; idempotent."""
        if not self._is_over:
            self._is_over = True
            monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, seconds: float, **fields: Any) -> None:
        if event in COMPILES:
            program = str(fields.get("fun_name", "a program"))
            self._compiled.append((self._clock(), program, seconds))


def _seconds(row: Row, name: str) -> float:
    value = row.get(name) or 0.0
    return value.sum if isinstance(value, Metric) else value


def _listed(seconds: Mapping[str, float], least_s: float) -> str:
    longest = sorted(seconds.items(), key=lambda part: -part[1])
    return ", ".join(f"{what} {duration(s)}" for what, s in longest if s >= least_s)
