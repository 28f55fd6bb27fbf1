"""The critic: a value model under training (trained.py), regressed on the returns of the policy's episodes.

Its value at a token is of the state before it, so advantages compare what was expected there with what came. Life of a
step: 1 `score` gives the values that GAE reads. 2 The algorithm's targets stand in batch.extras["returns"], the values
of step 1 in ["values"]. 3 `step` minimises the clipped squared error (algorithms/value.py) under the policy's own
loss_weights, so both count tokens alike, `updates` times: the clip bounds what they add up to.
explained_variance = 1 - Var(return - value) / Var(return) over the step's tokens, with the values GAE saw: 1 is a
perfect critic, 0 one that says the mean, below 0 worse than that.
Must not: see rewards, or know gamma and lambda.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rl_jax.algorithms.algorithm import Sums
from rl_jax.algorithms.value import value_loss
from rl_jax.learner.batch import Batch
from rl_jax.learner.rows import Rows
from rl_jax.learner.scorer import Scorer
from rl_jax.learner.step import (
    DeviceBatch,
    Figures,
    Loss,
    TrainState,
    Update,
    ValueForward,
    accumulate,
    apply_update,
    masked_sum,
)
from rl_jax.learner.trained import TrainedModel
from rl_jax.mesh import RulesLike
from rl_jax.metrics import Metric
from rl_jax.models.model import Params
from rl_jax.models.value import ValueModel
from rl_jax.settings import LearnerSettings


class Critic(TrainedModel):
    what, section, gives = "critic", "critic", "values"
    figures = Figures(
        "critic/loss", "critic/grad_norm", "critic/grad_norm_clipped", "critic/learning_rate",
        "critic/skipped",
    )  # fmt: skip

    def __init__(
        self,
        model: ValueModel,
        mesh: Mesh,
        rules: RulesLike,
        settings: LearnerSettings,
        *,
        value_clip: float,
        updates: int = 1,
        max_rows: int,
        total_steps: int,
        dump_dir: Path | str | None = None,
    ):
        """As Learner.

        Args: settings: the learner's, with the critic's own rates.  value_clip: 0 = none.  updates: on each batch.
        """
        rows = Rows(model, mesh, rules, settings, max_rows=max_rows)
        forward = rows.values()
        super().__init__(
            rows,
            settings,
            partial(make_value_step, forward, value_clip or None),
            total_steps=total_steps,
            dump_dir=dump_dir,
        )
        self.updates = updates
        self.scorer = Scorer(rows, forward)

    def score(self, batch: Batch) -> np.ndarray:
        """Value of the state before each trained token, f32[B, T], 0 elsewhere."""
        return self.scorer(self.params, batch)

    def step(self, batch: Batch, version: int = 0) -> dict[str, Metric]:
        """`updates` optimizer steps towards batch.extras["returns"]. Raises: as Learner.step.

        Figures are of the first, whose values are those that GAE saw; clip_frac of the last, skipped of all.
        """
        runs = [self.update(batch, version)[0] for _ in range(self.updates)]
        skipped = Metric(sum(run["critic/skipped"].sum for run in runs), len(runs))
        last = {n: m for n, m in runs[-1].items() if n == "critic/clip_frac"}
        return {**runs[0], **last, "critic/skipped": skipped}

    @property
    def num_batches(self) -> int:
        """Batches trained on so far."""
        return int(self.state.step) // self.updates


def value_objective(forward: ValueForward, clip: float | None) -> Loss:
    """The value loss of a microbatch; keeps the values."""

    def loss(params: Params, micro: DeviceBatch):
        values, mask = forward.score(params, micro), micro["target_mask"]
        old, returns = micro["values"], micro["returns"]
        token_loss = value_loss(values, old, returns, mask, clip=clip)
        weighted = jnp.where(mask, micro["loss_weights"] * token_loss, 0.0)
        values = jax.lax.stop_gradient(values)
        sums: Sums = {
            "critic/value": masked_sum(values, mask),
            "critic/return": masked_sum(returns, mask),
        }
        if clip is not None:
            sums["critic/clip_frac"] = masked_sum(jnp.abs(values - old) > clip, mask)
        return weighted.sum(), (sums, values)

    return loss


def make_value_step(
    forward: ValueForward, clip: float | None, update: Update
) -> Callable[[TrainState, DeviceBatch], tuple[TrainState, dict[str, Any]]]:
    """step(state, batch) -> (next state, {"sums": (sum, count) by name})."""
    loss = value_objective(forward, clip)

    def step(state: TrainState, batch: DeviceBatch):
        out = accumulate(loss, forward.cast(state.params), batch)
        state_after, sums = apply_update(update, state, out, batch)
        sums["critic/explained_variance"] = explained_variance(
            out["kept"], batch["returns"], batch["target_mask"]
        )
        return state_after, {"sums": sums}

    return step


def explained_variance(
    values: jax.Array, returns: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(1 - Var(returns - values) / Var(returns) over the mask, 1); count 0 where all returns are equal."""
    count = jnp.maximum(mask.sum(), 1)

    def variance(x: jax.Array) -> jax.Array:
        mean = jnp.where(mask, x, 0.0).sum() / count
        return jnp.square(jnp.where(mask, x - mean, 0.0)).sum() / count

    whole = variance(returns)
    known = whole > 0
    value = 1.0 - variance(returns - values) / jnp.where(known, whole, 1.0)
    return jnp.where(known, value, 0.0), known.astype(jnp.float32)
