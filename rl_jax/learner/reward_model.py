"""A reward model under training (trained.py): a value model read after the last token of each sequence.

Its trained tokens are the last ones (data/examples.py, kind "ends"); the algorithm's advantages there hold the slope of
each pair's loss (algorithms/rm.py). A step is therefore `score` for the rewards that the slopes are taken at, then
`step`; nothing asks where the two sequences of a pair lie.
Must not: know pairs.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rl_jax.algorithms.algorithm import Algorithm
from rl_jax.learner.batch import Batch
from rl_jax.learner.learner import batch_metrics
from rl_jax.learner.rows import Rows
from rl_jax.learner.scorer import Scorer
from rl_jax.learner.step import (
    DeviceBatch,
    TrainState,
    Update,
    ValueForward,
    accumulate,
    apply_update,
    weighted_loss,
)
from rl_jax.learner.trained import TrainedModel
from rl_jax.mesh import RulesLike
from rl_jax.metrics import Metric
from rl_jax.models.model import Params
from rl_jax.models.value import ValueModel
from rl_jax.settings import LearnerSettings


class RewardModel(TrainedModel):
    what, section, gives = "reward model", "learner", "rewards"

    def __init__(
        self,
        model: ValueModel,
        mesh: Mesh,
        rules: RulesLike,
        algorithm: Algorithm,
        settings: LearnerSettings,
        *,
        max_rows: int,
        total_steps: int,
        dump_dir: Path | str | None = None,
    ):
        """As Learner."""
        rows = Rows(model, mesh, rules, settings, max_rows=max_rows)
        forward = rows.values(lookback=0)
        super().__init__(
            rows,
            settings,
            partial(make_reward_step, forward, algorithm),
            total_steps=total_steps,
            dump_dir=dump_dir,
        )
        self.algorithm = algorithm
        self.scorer = Scorer(rows, forward)

    def score(self, batch: Batch, needs: Iterable[str]) -> dict[str, np.ndarray]:
        """{"rewards": f32[B, T]} on the trained tokens, 0 elsewhere. Raises: ValueError for another need."""
        needs = set(needs)
        if unknown := sorted(needs - {self.gives}):
            raise ValueError(
                f"the algorithm needs {', '.join(unknown)}; a reward model gives {self.gives}"
            )
        return {self.gives: self.scorer(self.params, batch)} if needs else {}

    def step(self, batch: Batch, version: int = 0) -> dict[str, Metric]:
        """One optimizer step. Raises: as Learner.step."""
        metrics, _ = self.update(batch, version)
        return {**metrics, **batch_metrics(batch, version, samples=False)}


def make_reward_step(
    forward: ValueForward, algorithm: Algorithm, update: Update
) -> Callable[[TrainState, DeviceBatch], tuple[TrainState, dict[str, Any]]]:
    """step(state, batch) -> (next state, {"sums": (sum, count) by name})."""

    def loss(params: Params, micro: DeviceBatch):
        rewards = forward.score(params, micro)
        total, sums = weighted_loss(algorithm, micro, rewards, jnp.zeros_like(rewards))
        return total, (sums, jax.lax.stop_gradient(rewards))

    def step(state: TrainState, batch: DeviceBatch):
        out = accumulate(loss, forward.cast(state.params), batch)
        state_after, sums = apply_update(update, state, out, batch)
        return state_after, {"sums": sums}

    return step
