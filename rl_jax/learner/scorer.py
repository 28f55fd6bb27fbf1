"""Values of the trained tokens without a step: the scoring program, and the frozen policies that use it.

A Scorer is one compiled program; its weights are an argument, so that a frozen policy of the learner's own model on the
learner's own mesh is scored by the very program that gives old_logprobs.
"""

from collections.abc import Mapping

import jax
import numpy as np

from rl_jax.learner.batch import Batch
from rl_jax.learner.microbatches import to_rows
from rl_jax.learner.rows import Rows
from rl_jax.learner.step import Forward, ValueForward, make_score
from rl_jax.models.model import Params


class Scorer:
    def __init__(self, rows: Rows, forward: Forward | ValueForward):
        """Compiles at the first call."""
        self.rows = rows
        self._run = jax.jit(make_score(forward), out_shardings=rows.sharding)

    def __call__(self, params: Params, batch: Batch) -> np.ndarray:
        """f32[B, T] of the trained tokens, 0 elsewhere: log-probs, or values of a ValueForward."""
        version = int(batch.versions.max(initial=0))
        return to_rows(batch, jax.device_get(self._run(params, self.rows.put(batch, version))))


class FrozenPolicy:
    """A policy that scores and never changes, a reference or a teacher; holds its weights in the compute dtype."""

    def __init__(self, scorer: Scorer, params: Mapping[str, jax.Array]):
        """params: of the scorer's model; they are copied."""
        self._scorer, self._params = scorer, scorer.rows.cast(params)

    def score(self, batch: Batch) -> np.ndarray:
        """Log-probs of the trained tokens at the temperature of sampling, f32[B, T]."""
        return self._scorer(self._params, batch)
