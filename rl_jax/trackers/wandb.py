"""Weights & Biases: mode offline unless its options say otherwise, so that nothing leaves the host unasked.

    metrics.tracker_options = {"wandb": {"mode": "online", "project": "name"}}
    wandb sync RUN/trackers/wandb/wandb/offline-run-*        # later, from wherever there is a network

A resume goes on under the run's id. A row's step is a value of its own, as W&B refuses steps that do not rise.
Must not: read a key; wandb finds its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_jax.trackers.tracker import RunInfo, Sample

COLUMNS = ("step", "uid", "tag", "reward", "outcome", "turns", "tokens", "text")


class WandbTracker:
    def __init__(self, run: RunInfo, **options: Any):
        """options: of wandb.init."""
        import wandb

        given = {"mode": "offline", "project": "rl_jax", "resume": "allow", **options}
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
        self._table = wandb.Table
        self._run = wandb.init(
            dir=str(run.directory), id=run.run_id, name=run.run_id, settings=quiet, **given
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_hparams(self, hparams: Mapping[str, Any]) -> None:
        self._run.config.update(dict(hparams), allow_val_change=True)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def log_rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [
            [step, s.uid, s.tag, s.reward, s.outcome, s.num_turns, s.num_tokens, s.text]
            for s in samples
        ]
        self._run.log({"step": step, "rollouts": self._table(columns=list(COLUMNS), data=rows)})

    def close(self) -> None:
        self._run.finish()
