"""TensorBoard, by tensorboardX (extra `tensorboard`): event files in RUN/trackers/tensorboard.

    tensorboard --logdir RUN/trackers/tensorboard

Rows of steps that a resume makes again are purged by it. Must not: import anything else of TensorBoard.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_jax.trackers.tracker import RunInfo, Sample

FLUSH_S = 10


class TensorBoardTracker:
    def __init__(self, run: RunInfo, **options: Any):
        """options: of tensorboardX.SummaryWriter."""
        from tensorboardX import SummaryWriter

        purge = {"purge_step": run.resume_step + 1} if run.attempt else {}
        self._writer = SummaryWriter(str(run.directory), flush_secs=FLUSH_S, **purge, **options)

    def log_hparams(self, hparams: Mapping[str, Any]) -> None:
        rows = "\n".join(f"| {key} | `{value}` |" for key, value in hparams.items())
        self._writer.add_text("config", f"| setting | value |\n|---|---|\n{rows}", 0)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        for i, sample in enumerate(samples):
            head = f"{sample.uid} {sample.tag} reward {sample.reward} {sample.outcome}"
            indented = "\n".join("    " + line for line in sample.text.splitlines())
            self._writer.add_text(f"rollouts/{i}", f"{head}\n\n{indented}", step)

    def close(self) -> None:
        self._writer.close()
