"""MLflow: into RUN/trackers/mlflow, or wherever its option `tracking_uri` says.

    metrics.tracker_options = {"mlflow": {"tracking_uri": "http://host:5000", "experiment": "name"}}

A store of files makes a directory for each slash of a name and breaks on a/b beside a/b/c: names are made flat.
A resume goes on with the MLflow run whose tag rl_jax.run_id is the run's.
Must not: use mlflow's global run, which belongs to the caller of a notebook.
"""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rl_jax.trackers.tracker import FlatNames, RunInfo, Sample

RUN_TAG = "rl_jax.run_id"
MAX_METRICS, MAX_PARAMS, MAX_VALUE = 1000, 100, 500  # of one call, as MLflow's servers bound them


class MlflowTracker:
    def __init__(self, run: RunInfo, tracking_uri: str = "", experiment: str = "rl_jax"):
        # Read while mlflow is imported. It reports its use to its makers, and version 3 wants a database, unless told.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow.entities as entities
        from mlflow.tracking import MlflowClient

        tracking_uri = tracking_uri or run.directory.absolute().as_uri()
        self._entities, self._names = entities, FlatNames()
        self._client = client = MlflowClient(tracking_uri=tracking_uri)
        found = client.get_experiment_by_name(experiment)
        where = found.experiment_id if found else client.create_experiment(experiment)
        mine = client.search_runs([where], f"tags.`{RUN_TAG}` = '{run.run_id}'", max_results=1)
        if not mine:
            mine = [client.create_run(where, tags={RUN_TAG: run.run_id}, run_name=run.run_id)]
        self._run = mine[0].info.run_id
        client.update_run(self._run, status="RUNNING")

    def log_hparams(self, hparams: Mapping[str, Any]) -> None:
        """A parameter cannot change in MLflow: those of a resume that differ are tags."""
        have = self._client.get_run(self._run).data.params
        new = {_param(key): str(value)[:MAX_VALUE] for key, value in hparams.items()}
        for key, value in new.items():
            if key in have and have[key] != value:
                self._client.set_tag(self._run, f"changed.{key}", value)
        params = [self._entities.Param(k, v) for k, v in new.items() if k not in have]
        for part in _parts(params, MAX_PARAMS):
            self._client.log_batch(self._run, params=part)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = time.time_ns() // 1_000_000
        metrics = [
            self._entities.Metric(self._names.of(name), value, now_ms, step)
            for name, value in values.items()
        ]
        for part in _parts(metrics, MAX_METRICS):
            self._client.log_batch(self._run, metrics=part)

    def log_rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        text = "".join(json.dumps(asdict(sample)) + "\n" for sample in samples)
        self._client.log_text(self._run, text, f"rollouts/step_{step}.jsonl")

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _param(key: str) -> str:
    """mesh.pools[0].name -> mesh.pools.0.name; brackets are refused, and so is most else."""
    return re.sub(r"[^\w./ -]", "_", key.replace("[", ".").replace("]", ""))


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
