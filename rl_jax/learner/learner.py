"""The Learner: TrainState on the train mesh, and one jitted, donated step.

Owns: params (float32 masters), optimizer state and the counters beside them; it is their sole
writer. Knows no environment, text or reward: a Batch comes in, metrics come out.
Invariants: one program for every batch (capacity max_rows rows of settings.row_tokens); rows are
split over the mesh's batch axes, weights as the rules say; the result does not depend on either, on
packing or on microbatches beyond float32 summation order. An update that is not finite changes
nothing, is counted, and its batch is written to dump_dir; after settings.max_skipped of them in a
row the run stops.
Life of a step: 1 cut and pad on the host (microbatches.py). 2 put on the mesh. 3 the jitted step
(step.py). 4 one fetch of the metrics, which is also what waits for the device.
Must not: average over devices or microbatches; keep a reference to a donated state.
"""

import logging
from collections.abc import Iterable, Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.linear_logprob import Hopper, Split
from rl_jax.algorithms.algorithm import Algorithm
from rl_jax.learner.attention import choose_attention
from rl_jax.learner.batch import Batch
from rl_jax.learner.microbatches import Arrays, microbatches, to_rows
from rl_jax.learner.mismatch import mismatch_metrics
from rl_jax.learner.optimizer import learning_rate, make_optimizer
from rl_jax.learner.step import Forward, TrainState, make_score, make_step
from rl_jax.mesh import RulesLike, constrainer, mesh_axes, named_sharding, shardings
from rl_jax.metrics import Metric
from rl_jax.models.model import Model, Params
from rl_jax.settings import LearnerSettings

LOG = logging.getLogger(__name__)
SCORES = ("old_logprobs",)  # what score() can compute


class NonFiniteError(RuntimeError):
    """Too many updates in a row had a loss or gradient that is not finite."""


class Learner:
    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        rules: RulesLike,
        algorithm: Algorithm,
        settings: LearnerSettings,
        *,
        max_rows: int,
        temperature: float,
        total_steps: int,
        dump_dir: Path | str | None = None,
    ):
        """No device work and no compile; call init, reset or load next.

        Args:   max_rows: most rows a batch may have; at worst one trajectory a row.  temperature: of sampling.
                total_steps: length of the schedule.  dump_dir: where non-finite batches go; None = nowhere.
        Raises: ValueError for a temperature of 0 (greedy samples carry no gradient) or rows the mesh does not divide.
        """
        if not temperature > 0:
            raise ValueError(
                f"rollout.temperature={temperature} cannot be trained; log-probs need one above 0"
            )
        self.model, self.mesh, self.algorithm, self.settings = model, mesh, algorithm, settings
        self._dump_dir = Path(dump_dir) if dump_dir is not None else None
        self._rows = named_sharding((None, "batch", None), rules, mesh)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._check_rows(rules)
        self._capacity = max(ceil(max_rows / settings.microbatch_rows), 1)
        self._chunk = min(
            max(settings.logprob_chunk // settings.microbatch_rows, 1), settings.row_tokens
        )

        schedule = learning_rate(settings, total_steps)
        self._optimizer = make_optimizer(settings, schedule)
        self.param_shardings: dict[str, NamedSharding] = shardings(model.logical_axes, rules, mesh)
        self._state_shardings = self._shard_state()
        self._state: TrainState | None = None
        self.attention, attention = choose_attention(
            settings.attention, model.settings, rules, mesh
        )
        forward = Forward(
            model,
            constrainer(rules, mesh),
            attention,
            settings.remat,
            self._chunk,
            temperature,
            split=_split(rules, mesh),
            hopper=_hopper(mesh),
        )
        self._step = jax.jit(
            make_step(forward, algorithm, self._optimizer, schedule, settings.grad_clip),
            donate_argnums=0,
            out_shardings=(self._state_shardings, self._replicated),
        )
        self._score = jax.jit(make_score(forward), out_shardings=self._rows)
        self._fresh_state = jax.jit(self._fresh, out_shardings=self._state_shardings)
        self._copy = jax.jit(
            lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=self._state_shardings
        )

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """Valid until the next step, which donates it."""
        if self._state is None:
            raise RuntimeError("the learner has no weights yet; call init, reset or load first")
        return self._state

    @property
    def params(self) -> Params:
        """Master weights, sharded as param_shardings; valid until the next step."""
        return self.state.params

    def init(self, key: jax.Array) -> None:
        """Fresh weights, made where they live; they depend on the key and not on the mesh."""
        make = jax.jit(self.model.init, out_shardings=self.param_shardings)
        self.reset(make(key))

    def reset(self, params: Mapping[str, jax.Array]) -> None:
        """Start a new optimizer on a copy of these weights (after a warm start, or from a checkpoint of weights)."""
        self._state = self._fresh_state(self._placed(dict(params), self.param_shardings))

    def load(self, state: TrainState) -> None:
        """Go on from a state of abstract_state()'s structure; its arrays are copied."""
        self._state = self._copy(self._placed(state, self._state_shardings))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, for a checkpoint to restore into."""
        shapes = jax.eval_shape(self._fresh, dict(self.model.abstract))
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes,
            self._state_shardings,
        )

    # --- work ----------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, version: int = 0) -> dict[str, Metric]:
        """One optimizer step on the whole batch, which version `version` consumes; blocks until it is done.

        Raises: ValueError if the batch does not fit; NonFiniteError after settings.max_skipped bad updates in a row.
        """
        arrays = self._put(batch, version)
        self._state, out = self._step(self.state, arrays)
        out, in_row = jax.device_get((out, self._state.skipped_in_row))
        metrics = {name: Metric(float(s), float(n)) for name, (s, n) in out["sums"].items() if n}
        metrics |= mismatch_metrics(out["mismatch"])
        if metrics["optim/skipped"].sum:
            self._report_skip(batch, version, metrics, int(in_row))
        metrics |= _batch_metrics(batch)
        return {**metrics, **_staleness(batch, version)} if self.algorithm.samples else metrics

    def score(self, batch: Batch, needs: Iterable[str]) -> dict[str, np.ndarray]:
        """The extras an algorithm needs, f32[B, T] each, 0 where not trained.

        old_logprobs: log-probs of the current weights. With needs empty nothing is computed.
        Raises: ValueError for a name this learner cannot compute.
        """
        needs = sorted(needs)
        if unknown := [name for name in needs if name not in SCORES]:
            raise ValueError(
                f"the algorithm needs {', '.join(unknown)}; this learner computes {', '.join(SCORES)}"
            )
        if not needs:
            return {}
        version = int(batch.versions.max(initial=0))
        logprobs = jax.device_get(self._score(self.params, self._put(batch, version)))
        return {"old_logprobs": to_rows(batch, logprobs)}

    # --- parts ---------------------------------------------------------------------------------------------------

    def _fresh(self, params: Params) -> TrainState:
        params = jax.tree.map(jnp.copy, params)  # the state is donated: it must own its arrays
        return TrainState(
            params=params,
            opt_state=self._optimizer.init(params),
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            skipped_in_row=jnp.int32(0),
        )

    def _shard_state(self) -> TrainState:
        """Moments lie as their weights do; everything else is replicated."""
        params = dict(self.model.abstract)
        opt_state = optax.tree_utils.tree_map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self._optimizer.init, params),
            self.param_shardings,
            transform_non_params=lambda _: self._replicated,
        )
        scalar = self._replicated
        return TrainState(self.param_shardings, opt_state, scalar, scalar, scalar)

    def _placed(self, tree: Any, target: Any) -> Any:
        got, want = jax.tree.structure(tree), jax.tree.structure(target)
        if got != want:
            raise ValueError(
                f"the state to load has another structure than this model and optimizer: {got}, wanted {want}"
            )
        return jax.device_put(tree, target)

    def _put(self, batch: Batch, version: int) -> dict[str, jax.Array]:
        if batch.row_tokens != self.settings.row_tokens:
            raise ValueError(
                f"the batch was packed into rows of {batch.row_tokens} tokens, the learner takes "
                f"learner.row_tokens={self.settings.row_tokens}; pack with the same settings"
            )
        arrays: Arrays = microbatches(
            batch,
            version,
            capacity=self._capacity,
            microbatch_rows=self.settings.microbatch_rows,
            chunk=self._chunk,
        )
        target = {n: self._rows if np.ndim(a) == 3 else self._replicated for n, a in arrays.items()}
        return jax.device_put(arrays, target)

    def _check_rows(self, rules: RulesLike) -> None:
        (axes,) = mesh_axes(("batch",), rules)
        shards = prod(self.mesh.shape[axis] for axis in axes)
        if self.settings.microbatch_rows % shards:
            n = self.settings.microbatch_rows
            raise ValueError(
                f"learner.microbatch_rows={n} is not divisible by mesh axes {'*'.join(axes)}={shards}; "
                f"use {max(n - n % shards, shards)}"
            )

    def _report_skip(self, batch: Batch, version: int, metrics, in_row: int) -> None:
        """Write the batch down; raise when there have been too many."""
        where = "nowhere (no dump_dir)"
        if self._dump_dir is not None:
            self._dump_dir.mkdir(parents=True, exist_ok=True)
            path = self._dump_dir / f"nonfinite_step_{version + 1}.npz"
            arrays = {name: value for name, value in vars(batch).items() if name != "extras"}
            np.savez_compressed(path, version=version, **arrays, **batch.extras)
            where = str(path)
        message = (
            f"step {version + 1}: loss {metrics['policy/loss'].sum} or gradient norm "
            f"{metrics['optim/grad_norm'].sum} is not finite; update skipped ({in_row} in a row), batch in {where}"
        )
        LOG.warning(message)
        if in_row >= self.settings.max_skipped:
            raise NonFiniteError(
                f"{message}; learner.max_skipped={self.settings.max_skipped} reached: lower "
                "learner.learning_rate, or look at the batch and at mismatch metrics"
            )


def _split(rules: RulesLike, mesh: Mesh) -> Split | None:
    """How rows and the vocabulary lie on the mesh, by the rules; None on one device."""
    if mesh.size == 1:
        return None
    batch, vocab = mesh_axes(("batch", "vocab"), rules)
    return Split(mesh, batch, vocab)


def _hopper(mesh: Mesh) -> Hopper | None:
    """The cards of the mesh, if they are Hopper GPUs."""
    device: Any = mesh.devices.flat[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        return None
    return Hopper(device.core_count)


def _batch_metrics(batch: Batch) -> dict[str, Metric]:
    """What the host knows of a batch without the device."""
    tokens = int(batch.seq_len.sum())
    trained = int(batch.targets_mask.sum())
    metrics = {
        "batch/trajectories": Metric(len(batch.seq_len), 1),
        "batch/tokens": Metric(tokens, 1),
        "batch/trained_tokens": Metric(trained, 1),
    }
    if batch.tokens.size:
        metrics["batch/fill"] = Metric(tokens, batch.tokens.size)
    return metrics


def _staleness(batch: Batch, version: int) -> dict[str, Metric]:
    """Age of the trained tokens, in versions."""
    ages = version - batch.versions[batch.targets_mask]
    if not len(ages):
        return {}
    low, high = float(ages.min()), float(ages.max())
    return {
        "staleness/mean": Metric(float(ages.sum()), len(ages), low, high),
        "staleness/max": Metric(high, 1),
    }
