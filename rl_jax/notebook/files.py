"""A run as its directory tells it: figures, episodes, config; live, dead or finished.

Owns: `RunFiles`, what a notebook asks of any run; `Run` (run.py) adds what only a live one can do. Invariant: reading
locks nothing, writes nothing below the run, and needs neither its environments nor its devices.
Must not: import jax before a model is asked for.
"""

import contextlib
import importlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl_jax import backend, schema
from rl_jax.config import ConfigError, filled
from rl_jax.mesh import MeshPlan
from rl_jax.metrics import read_metrics
from rl_jax.names import resolve
from rl_jax.notebook.display import ConfigDiff, PlanView, facts_table, visible
from rl_jax.notebook.episodes import Decode, Episodes
from rl_jax.notebook.plot import Plot
from rl_jax.resume import CONFIG, METRICS, RunDirError, checkpoint_of, stored_config
from rl_jax.run_dir import STATUS
from rl_jax.settings import Settings
from rl_jax.tokens.load import load_tokenizer

# What plot() shows where nothing is named, of those that the run has; tags and evaluations with them.
SHOWN = (
    "reward/mean", "reward/success", "eval/success", "policy/loss", "policy/entropy", "optim/grad_norm",
    "mismatch/abs_mean", "staleness/mean", "length/response", "time/step_s", "preference/loss", "sft/loss",
)  # fmt: skip
MAX_SHOWN = 9


class RunFiles:
    """Of a run directory. Raises RunDirError if it holds no run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not (self.path / CONFIG).is_file():
            raise RunDirError(f"{path} holds no run (no {CONFIG}); name a run directory")

    @property
    def settings(self) -> Settings:
        """Its whole config, resolved."""
        return self._stored

    @cached_property
    def _stored(self) -> Settings:
        return schema.build(Settings, stored_config(self.path), "", [])

    @property
    def status(self) -> dict[str, Any]:
        """STATUS.json: state, step, time, error; {} before it is there."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.path / STATUS).read_text(encoding="utf-8"))
        return {}

    # --- figures ---

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one a step and one an evaluation, as they survive a resume."""
        return read_metrics(self.path) if (self.path / METRICS).is_file() else []

    def metric(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps i64[n], values f64[n]) of one figure. Raises KeyError, with the nearest names."""
        rows = self.metrics
        found = [(row["step"], row[name]) for row in rows if name in row]
        if not found:
            known = sorted({key for row in rows for key in row if "/" in key})
            near = ", ".join(schema.nearest(name, known))
            raise KeyError(
                f"no row has {name}; " + (f"did you mean {near}?" if near else "there is none yet")
            )
        steps, values = zip(*found)
        return np.array(steps, np.int64), np.array(values, np.float64)

    @property
    def evaluations(self) -> dict[str, list[tuple[int, float]]]:
        """Name of an evaluation -> (version, success) each time."""
        out: dict[str, list[tuple[int, float]]] = {}
        for row in self.metrics:
            for key, value in row.items():
                if key.startswith("eval/success."):
                    out.setdefault(key.removeprefix("eval/success."), []).append(
                        (row["step"], value)
                    )
        return out

    def plot(self, *names: str) -> Plot:
        """Curves of these figures, a name standing for those of its tags, too; without names of the usual ones."""
        rows, curves = self.metrics, {}
        present = dict.fromkeys(key for row in rows for key in row)
        for asked in names or SHOWN:
            matching = [key for key in present if key == asked or key.startswith(f"{asked}.")]
            if names and not matching:
                self.metric(asked)  # says which names there are
            curves |= {key: self._curve(rows, key) for key in matching}
        if not names:
            curves = dict(list(curves.items())[:MAX_SHOWN])
        return Plot(curves, self.path.name)

    @staticmethod
    def _curve(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
        found = [(row["step"], row[name]) for row in rows if name in row]
        return [step for step, _ in found], [value for _, value in found]

    # --- what it saved ---

    @cached_property
    def episodes(self) -> Episodes:
        """That were trained; [-1] is the last."""
        return Episodes(self.path, "train", self._decode, self._settle)

    @cached_property
    def eval_episodes(self) -> Episodes:
        """That were evaluated."""
        return Episodes(self.path, "eval", self._decode, self._settle)

    def export(self, out: str | Path, *, dtype: str = "", verify: bool = True) -> Path:
        """The policy of the last checkpoint as a Hugging Face directory, read back and compared where `verify`.

        Raises: RunDirError without a checkpoint; conversion.ERRORS.
        """
        checkpoint = checkpoint_of(self.path)
        if checkpoint is None:
            raise RunDirError(f"{self.path} has no checkpoint to export; train a step, or save()")
        backend.avoid_broken_fusions()
        conversion = importlib.import_module("rl_jax.tools.conversion")
        conversion.convert(checkpoint, Path(out), dtype=dtype, verify=verify)
        return Path(out)

    # --- what it is ---

    @property
    def plan(self) -> PlanView:
        """Which devices do what."""
        return PlanView(MeshPlan.from_settings(self.settings.mesh, self.settings.model))

    def diff(self, other: "RunFiles | Settings | str | Path | None" = None) -> ConfigDiff:
        """Config values that differ from another run's (a run, its directory or its settings), or from the defaults."""
        if other is None:
            return ConfigDiff.of(self.settings, filled(Settings()), (self.path.name, "default"))
        if isinstance(other, Settings):
            return ConfigDiff.of(self.settings, other, (self.path.name, "other"))
        theirs = other if isinstance(other, RunFiles) else RunFiles(other)
        return ConfigDiff.of(self.settings, theirs.settings, (self.path.name, theirs.path.name))

    def __repr__(self) -> str:
        return "\n".join(f"{name:<11} {visible(value)}" for name, value in self._facts())

    def _repr_html_(self) -> str:
        return facts_table(dict(self._facts()))

    def _facts(self) -> Iterator[tuple[str, str]]:
        """What it shows of itself."""
        s, status, rows = self.settings, self.status, self.metrics
        steps = [row for row in rows if "time/step_s" in row]
        yield "run", str(self.path)
        yield "state", self._state(status)
        yield "step", f"{steps[-1]['step'] if steps else 0} of {s.steps}"
        tags = ", ".join(source.tag for source in s.tasks.sources)
        m = s.model
        source = m.source or f"{m.family}, {m.num_layers} layers of {m.embed_size}"
        yield "trains", f"{source}, by {s.algorithm.name}, on {s.data.path or tags}"
        if steps and "reward/mean" in steps[-1]:
            first, last = steps[0]["reward/mean"], steps[-1]["reward/mean"]
            yield "reward", f"{first:.3f} at step {steps[0]['step']}, {last:.3f} at the last"
        for name, values in self.evaluations.items():
            (first, a), (last, b) = values[0], values[-1]
            yield f"eval {name}", f"success {a:.3f} at version {first}, {b:.3f} at {last}"
        if status.get("error"):
            yield "ended by", str(status["error"])

    def _state(self, status: dict[str, Any]) -> str:
        return str(status.get("state", "unknown"))

    def _settle(self) -> None:
        """Before files are read: a live run ends what it is writing."""

    @cached_property
    def _decode(self) -> Decode | None:
        """None where the tokenizer is gone: texts were saved beside the tokens."""
        try:
            return load_tokenizer(self.settings.model.tokenizer, resolve).decode
        except (ConfigError, ValueError, OSError):
            return None
