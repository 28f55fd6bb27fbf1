"""One model under training: its TrainState on a mesh and one jitted, donated step. The policy is one, a critic another.

Owns: params (master weights), optimizer state and the counters beside them; it is their sole writer.
Invariants: one program for every batch; an update that is not finite changes nothing, is counted, and its batch is
written to dump_dir; after settings.max_skipped of them in a row the run stops.
Life of a step: 1 cut, pad and put on the mesh (rows.py). 2 the jitted step (step.py). 3 one fetch of the metrics, which
is also what waits for the device.
Must not: keep a reference to a donated state.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rl_jax.disk import naming
from rl_jax.learner.batch import Batch
from rl_jax.learner.optimizer import learning_rate, make_optimizer
from rl_jax.learner.rows import Rows
from rl_jax.learner.scorer import Scorer
from rl_jax.learner.step import Figures, TrainState, Update
from rl_jax.lowering import Program, lower
from rl_jax.metrics import Metric
from rl_jax.models.model import Model, Params
from rl_jax.models.value import ValueModel
from rl_jax.settings import LearnerSettings
from rl_jax.timeline import OFF, Track

LOG = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """Too many updates in a row had a loss or gradient that is not finite."""


class TrainedModel:
    what, section = "policy", "learner"  # what it is, and where its settings stand
    gives = "old_logprobs"  # the extra that its scorer computes
    figures = Figures()
    scorer: Scorer  # for any weights of this model on this mesh
    track: Track = OFF

    def __init__(
        self,
        rows: Rows,
        settings: LearnerSettings,
        make_step: Callable[[Update], Callable],
        *,
        total_steps: int,
        dump_dir: Path | str | None = None,
    ):
        """No device work and no compile; call init, reset or load next.

        Args: settings: rates, moments and limits of this model's optimizer.  make_step: of step.py.
              total_steps: length of the schedule.  dump_dir: where non-finite batches go; None = nowhere.
        """
        self.rows, self.settings = rows, settings
        self._dump_dir = Path(dump_dir) if dump_dir is not None else None
        schedule = learning_rate(settings, total_steps)
        self._optimizer = make_optimizer(settings, schedule)
        self._state: TrainState | None = None
        self._state_shardings = self._shard_state()
        self._update = Update(self._optimizer, schedule, settings.grad_clip, self.figures)
        self._beside: tuple[Params, ...] = ()  # frozen weights that the step reads
        self._set_step(make_step)
        self._fresh_state = jax.jit(
            partial(fresh_state, self._optimizer), out_shardings=self._state_shardings
        )
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
    def has_weights(self) -> bool:
        return self._state is not None

    @property
    def params(self) -> Params:
        """Master weights, sharded as rows.param_shardings; valid until the next step."""
        return self.state.params

    def init(self, key: jax.Array) -> None:
        """Fresh weights, made where they live; they depend on the key and not on the mesh."""
        make = jax.jit(self.rows.model.init, out_shardings=self.rows.param_shardings)
        self.reset(make(key))

    def reset(self, params: Mapping[str, jax.Array]) -> None:
        """Start a new optimizer on a copy of these weights (after a warm start, or from a checkpoint of weights)."""
        self._state = self._fresh_state(self._placed(dict(params), self.rows.param_shardings))

    def start(self, policy: Mapping[str, jax.Array]) -> None:
        """As reset, with a policy's weights, which may lie on another mesh: a value model takes its trunk, and a head
        that says 0."""
        model = self.rows.model
        self.reset(model.from_policy(policy) if isinstance(model, ValueModel) else policy)

    def load(self, state: TrainState) -> None:
        """Go on from a state of abstract_state()'s structure; its arrays are copied."""
        self._state = self._copy(self._placed(state, self._state_shardings))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, for a checkpoint to restore into."""
        shapes = jax.eval_shape(
            partial(fresh_state, self._optimizer), dict(self.rows.model.abstract)
        )
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes,
            self._state_shardings,
        )

    def lower(self, batch: Batch) -> Iterator[Program]:
        """The programs of a step on batches with the extras of this one, from shapes alone. Raises: LoweringError."""
        state, name = self.abstract_state(), f"{self.what} step"
        if self.gives in batch.extras:
            yield self.scorer.lower(f"{self.what}'s {self.gives}", state.params, batch)
        yield name, lower(name, self._step, state, self.rows.abstract(batch), *self._beside)

    # --- work ----------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, version: int) -> tuple[dict[str, Metric], dict[str, Any]]:
        """(metrics, all that the step gave) of one optimizer step on the whole batch; blocks until it is done.

        Raises: ValueError if the batch does not fit; NonFiniteError after settings.max_skipped bad updates in a row.
        """
        with self.track.span("update", model=self.what, version=version):
            arrays = self.rows.put(batch, version)
            self._state, out = self._step(self.state, arrays, *self._beside)
            out, in_row = jax.device_get((out, self._state.skipped_in_row))
        metrics = {name: Metric(float(s), float(n)) for name, (s, n) in out["sums"].items() if n}
        if metrics[self.figures.skipped].sum:
            self._report_skip(batch, version, metrics, int(in_row))
        return metrics, out

    def _set_step(self, make_step: Callable[[Update], Callable]) -> None:
        self._step = jax.jit(
            make_step(self._update),
            donate_argnums=0,
            out_shardings=(self._state_shardings, self.rows.replicated),
        )

    # --- parts ---------------------------------------------------------------------------------------------------

    def _shard_state(self) -> TrainState:
        """Moments lie as their weights do; everything else is replicated."""
        params, scalar = dict(self.rows.model.abstract), self.rows.replicated
        opt_state = optax.tree_utils.tree_map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self._optimizer.init, params),
            self.rows.param_shardings,
            transform_non_params=lambda _: scalar,
        )
        return TrainState(self.rows.param_shardings, opt_state, scalar, scalar, scalar)

    def _placed(self, tree: Any, target: Any) -> Any:
        got, want = jax.tree.structure(tree), jax.tree.structure(target)
        if got != want:
            raise ValueError(
                f"the state to load has another structure than this model and optimizer: {got}, wanted {want}"
            )
        return jax.device_put(tree, target)

    def _report_skip(self, batch: Batch, version: int, metrics, in_row: int) -> None:
        """Write the batch down; raise when there have been too many."""
        where = "nowhere (no dump_dir)"
        if self._dump_dir is not None and jax.process_index() == 0:
            self._dump_dir.mkdir(parents=True, exist_ok=True)
            kind = "nonfinite" if self.what == "policy" else f"nonfinite_{self.what}"
            path = self._dump_dir / f"{kind}_step_{version + 1}.npz"
            arrays = {n: v for n, v in vars(batch).items() if n != "extras" and v is not None}
            with naming(path):
                np.savez_compressed(path, version=version, **arrays, **batch.extras)
            where = str(path)
        message = (
            f"step {version + 1}: {self.what} loss {metrics[self.figures.loss].sum} or gradient norm "
            f"{metrics[self.figures.grad_norm].sum} is not finite; update skipped ({in_row} in a row), "
            f"batch in {where}"
        )
        LOG.warning(message)
        if in_row >= self.settings.max_skipped:
            raise NonFiniteError(
                f"{message}; learner.max_skipped={self.settings.max_skipped} reached: lower "
                f"{self.section}.learning_rate, or look at the batch and at mismatch metrics"
            )


def fresh_state(optimizer: optax.GradientTransformation, params: Params) -> TrainState:
    """The state before the first step on these weights."""
    params = jax.tree.map(jnp.copy, params)  # the state is donated: it must own its arrays
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=jnp.int32(0),
        skipped=jnp.int32(0),
        skipped_in_row=jnp.int32(0),
    )


def state_bytes(model: Model | ValueModel, settings: LearnerSettings) -> int:
    """Of a model's whole TrainState, from shapes alone."""
    optimizer = make_optimizer(settings, learning_rate(settings, settings.warmup_steps + 1))
    state = jax.eval_shape(partial(fresh_state, optimizer), dict(model.abstract))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
