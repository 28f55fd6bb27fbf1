"""What looks at a run from outside, built beside it: trackers, and the metrics that scrapers read.

Owns: the trackers' feeds, the driver's exporter, and endpoints.json, which names every process' port in the form that
Prometheus' file_sd_configs read.
Life: 1 `check_watch` before anything is written. 2 `Watch.open` once there is a run directory. 3 Every row that the
writer writes comes to `on_row`. 4 `attach` once there are servers and episodes. 5 `close`, at the run's end.
Must not: wait for anything in a step, or end a run by its own failure.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rl_jax import schema
from rl_jax.advice import STEP
from rl_jax.asgi import cannot_listen
from rl_jax.config import ConfigError
from rl_jax.exporter import Exporter, open_exporter, read_token
from rl_jax.exposition import (
    Text,
    TurnTimes,
    tell_devices,
    tell_fleet,
    tell_process,
    tell_server,
)
from rl_jax.progress import Progress
from rl_jax.remote.spec import Spec
from rl_jax.settings import MetricsSettings, Settings
from rl_jax.trackers import TRACKERS, missing
from rl_jax.trackers.feed import Feeds
from rl_jax.trackers.tracker import RunInfo, Tracker

ENDPOINTS = "endpoints.json"
TRACKER_FILES = "trackers"
LAG_LIMIT_S = 1.0  # for the rollout's event loop to answer a scrape


def check_watch(settings: MetricsSettings) -> None:
    """Raises ConfigError: what only this machine can tell of packages, the port and the token's file."""
    errors = missing(settings.trackers)
    if settings.port:
        errors += _port_errors(settings)
    if errors:
        raise ConfigError(errors)


def _port_errors(settings: MetricsSettings) -> list[str]:
    errors = []
    try:
        read_token(settings.token_file)
    except ValueError as error:
        errors.append(str(error))
    if why := cannot_listen(settings.host, settings.port):
        errors.append(
            f"metrics.port={settings.port} cannot be had at {settings.host} ({why}); use another one,"
            " and as many free ones behind it as the run has processes"
        )
    return errors


class Watch:
    """Of one run. `on_row` belongs to the driver's thread, `text` to any."""

    def __init__(self, settings: Settings, run: Any, progress: Progress):
        """run: rl_jax.run_dir.RunDir."""
        self._settings, self._run, self._progress = settings, run, progress
        self._row: Mapping[str, float] = {}  # of the last step
        self._others: dict[str, float] = {}  # of evaluations and warm starts, by name
        self._step, self._row_s = run.decision.resume_step, time.monotonic()
        self._servers: Sequence[Any] = ()
        self._is_here = False  # whether they are threads of this process
        self._rollout: Any = None
        self._pool: Any = None
        self._turns, self._lock = TurnTimes(), threading.Lock()
        self._exporter: Exporter | None = None
        self.is_paused: Callable[[], bool] = lambda: False
        self.feeds: Feeds = None  # type: ignore[assignment]  # by `open`

    @classmethod
    def open(
        cls,
        settings: Settings,
        run: Any,
        progress: Progress,
        render: Callable[[np.ndarray], str],
        resolve: Callable[[str, Mapping[str, str]], Any],
    ) -> "Watch":
        """render: tokens i32[n] -> text. resolve: a name of a table -> the object."""
        watch, metrics = cls(settings, run, progress), settings.metrics
        makers = {
            name: partial(watch._make_tracker, name, partial(resolve, name, TRACKERS))
            for name in metrics.trackers
        }
        watch.feeds = Feeds(
            makers, watch._tell, render, metrics.tracker_samples, metrics.tracker_sample_bytes
        )
        watch.feeds.hparams(hparams(settings))
        if metrics.port:
            scrape = {"host": metrics.host, "port": metrics.port, "token_file": metrics.token_file}
            watch._exporter = open_exporter(scrape, watch.text)
        watch.name_endpoints(())
        return watch

    def attach(self, cluster: Any, rollout: Any, specs: Sequence[Spec]) -> None:
        """specs: of every process of the run."""
        self._servers, self._rollout, self._pool = cluster.targets, rollout, rollout.pool
        self._is_here = not cluster.specs
        cluster.router.on_turn = lambda turn: self._turns.add(turn.times_s, len(turn.tokens))
        self.name_endpoints(specs)

    def name_endpoints(self, specs: Sequence[Spec]) -> None:
        """endpoints.json; none where nothing is exported."""
        if self._exporter is None:
            return
        own = {"host": self._exporter.address[0], "port": self._exporter.address[1]}
        places = [("driver", own), *((spec.name, spec.scrape) for spec in specs if spec.scrape)]
        listed = [
            {
                "targets": [f"{_reached(place['host'])}:{place['port']}"],
                "labels": {"process": name, "run": self._settings.run_id},
            }
            for name, place in dict(places).items()
        ]
        self._run.write_json(ENDPOINTS, listed)

    def on_row(self, step: int, values: Mapping[str, float]) -> None:
        """As of MetricsWriter."""
        self.feeds.metrics(step, values)
        with self._lock:
            # What a step's row lacks was not measured: its old value would be told for good.
            if STEP in values:
                self._row, self._step, self._row_s = values, step, time.monotonic()
            else:
                self._others.update(values)

    def text(self) -> str:
        """What the driver's process tells."""
        text = Text(process="driver")
        tell_process(text)
        text.add("rl_jax:info", 1.0, run=self._settings.run_id)
        text.add("rl_jax:attempt", self._run.attempt)
        with self._lock:
            row, step, row_s = {**self._others, **self._row}, self._step, self._row_s
        text.add("rl_jax:step", step)
        text.add("rl_jax:steps", self._progress.total_steps)
        text.add("rl_jax:seconds_since_row", time.monotonic() - row_s)
        text.add("rl_jax:paused", float(self.is_paused()))
        for name, lost in self.feeds.lost().items():
            text.add("rl_jax:tracker_lost_total", lost, tracker=name)
        tell_fleet(text, self._servers)
        if self._is_here:
            for server in self._servers:
                tell_server(text, server)
        self._turns.tell(text)
        tell_devices(text, jax.local_devices())
        if self._rollout is not None:
            text.add("rl_jax:driver_lag_seconds", self._rollout.lag_s(LAG_LIMIT_S))
            for state, num in self._rollout.ledger.counts().items():
                text.add("rl_jax:episode_states", num, state=state.lower())
            for what, num in sorted(self._pool.counts.items()):
                text.add("rl_jax:pool_events_total", num, event=what)
        text.row(row)
        return str(text)

    def close(self) -> None:
        self.feeds.close()
        if self._exporter is not None:
            self._exporter.close()

    def _make_tracker(self, name: str, load: Callable[[], type]) -> Tracker:
        directory = Path(self._run.path) / TRACKER_FILES / name.replace(":", ".")
        directory.mkdir(parents=True, exist_ok=True)
        info = RunInfo(
            self._settings.run_id, directory, self._run.attempt, self._run.decision.resume_step
        )
        return load()(info, **self._settings.metrics.tracker_options.get(name, {}))

    def _tell(self, text: str, **fields: Any) -> None:
        self._progress.note(text)
        self._run.event("tracker", **fields)


def hparams(settings: Settings) -> dict[str, Any]:
    """Dotted key -> number, text or bool of the whole config; sequences as text."""
    leaves = schema.leaves(schema.to_tree(settings))
    simple = lambda value: isinstance(value, (bool, int, float, str)) or value is None
    return {key: value if simple(value) else str(value) for key, value in leaves.items()}


def _reached(host: str) -> str:
    """By which others know an address that stands for all of a host."""
    if host in ("0.0.0.0", "::", ""):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
