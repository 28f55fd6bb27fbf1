"""Trackers that behave, raise or hang: what a run must not notice."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rl_jax.trackers.tracker import RunInfo, Sample


class RecordingTracker:
    """Keeps its calls in `calls`, of all that were made."""

    calls: list[tuple[str, Any]] = []

    def __init__(self, run: RunInfo, **options: Any):
        self.calls.append(("made", options))

    def log_hparams(self, hparams: Mapping[str, Any]) -> None:
        self.calls.append(("hparams", dict(hparams)))

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("metrics", (step, dict(values))))

    def log_rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        self.calls.append(("rollouts", (step, list(samples))))

    def close(self) -> None:
        self.calls.append(("closed", None))


class RaisingTracker(RecordingTracker):
    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("the service is away")


class HangingTracker(RecordingTracker):
    """Its first row never comes back."""

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        threading.Event().wait()
