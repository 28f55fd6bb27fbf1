"""Values of the trained tokens without a step: the scoring program, and the frozen policies that use it.

Rows come again, and a frozen policy says the same of them each time: Remembered asks it once a row.

A Scorer is one compiled program; its weights are an argument, so that a frozen policy of the learner's own model on the
learner's own mesh is scored by the very program that gives old_logprobs.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rl_jax.learner.batch import Batch
from rl_jax.learner.microbatches import to_rows
from rl_jax.learner.rows import Rows
from rl_jax.learner.step import Forward, ValueForward, make_score
from rl_jax.lowering import Program, lower
from rl_jax.models.model import Params


class Scorer:
    def __init__(self, rows: Rows, forward: Forward | ValueForward):
        """Compiles at the first call."""
        self.rows, self.forward = rows, forward
        # Of a mesh that processes share, each of them gets all values: it could not read the others'.
        where = rows.replicated if rows.is_shared else rows.sharding
        self._run = jax.jit(make_score(forward), out_shardings=where)

    def __call__(self, params: Params, batch: Batch) -> np.ndarray:
        """f32[B, T] of the trained tokens, 0 elsewhere: log-probs, or values of a ValueForward."""
        version = int(batch.versions.max(initial=0))
        return to_rows(batch, jax.device_get(self._run(params, self.rows.put(batch, version))))

    def lower(self, name: str, params: Any, batch: Batch) -> Program:
        """The program for params of these shapes and batches as this one. Raises: LoweringError."""
        arrays = self.rows.abstract(replace(batch, extras={}))  # which scoring finds
        return name, lower(name, self._run, params, arrays)


class FrozenPolicy:
    """A model that scores and never changes, a reference, a teacher or a reward model; in the compute dtype."""

    def __init__(self, scorer: Scorer, params: Mapping[str, jax.Array]):
        """params: of the scorer's model; they are copied."""
        self.scorer, self.params = scorer, scorer.rows.cast(params)

    def score(self, batch: Batch) -> np.ndarray:
        """f32[B, T] of the trained tokens: log-probs at the temperature of sampling, or a reward model's scores."""
        return self.scorer(self.params, batch)


class Remembered:
    """A frozen policy's scores of rows that come again, a row known by its tokens and what of them is trained.

    Once every row was scored, `close` lets go of the weights.
    """

    def __init__(self, role: FrozenPolicy):
        self._role: FrozenPolicy | None = role
        self._known: dict[bytes, np.ndarray] = {}  # f32 of the trained tokens

    def score(self, batch: Batch) -> np.ndarray:
        """As FrozenPolicy.score. Raises: RuntimeError for a row that is new after close()."""
        places = batch.gather(
            np.arange(batch.tokens.size).reshape(batch.tokens.shape), self._most(batch)
        )
        rows = [(place, self._key(batch, place)) for place in places if len(place)]
        if any(key not in self._known for _, key in rows):
            if self._role is None:
                raise RuntimeError("a row is new after all were scored and the weights let go")
            fresh = self._role.score(batch).ravel()
            for place, key in rows:
                trained = place[batch.targets_mask.ravel()[place]]
                self._known.setdefault(key, fresh[trained])
        out = np.zeros(batch.tokens.size, np.float32)
        for place, key in rows:
            out[place[batch.targets_mask.ravel()[place]]] = self._known[key]
        return out.reshape(batch.tokens.shape)

    def close(self) -> None:
        """No row is new from now on."""
        self._role = None

    @staticmethod
    def _most(batch: Batch) -> int:
        return int(batch.trajectory_ids.max(initial=-1)) + 1

    @staticmethod
    def _key(batch: Batch, place: np.ndarray) -> bytes:
        said = batch.tokens.ravel()[place].tobytes() + batch.targets_mask.ravel()[place].tobytes()
        return hashlib.blake2b(said, digest_size=16).digest()
