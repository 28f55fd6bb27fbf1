"""The Learner: the policy under training (trained.py) with the loss of an algorithm.

Knows no environment, text or reward: a Batch comes in, metrics come out.
Invariants: rows are split over the mesh's batch axes, weights as the rules say; the result does not depend on either,
on packing or on microbatches beyond float32 summation order.
Must not: average over devices or microbatches.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from rl_jax.algorithms.algorithm import Algorithm
from rl_jax.algorithms.staleness import token_ages, version_mix
from rl_jax.learner.batch import Batch
from rl_jax.learner.flops import train_flops
from rl_jax.learner.mismatch import mismatch_metrics
from rl_jax.learner.rows import Rows
from rl_jax.learner.scorer import Scorer
from rl_jax.learner.step import Forward, make_grad_norms, make_step
from rl_jax.learner.trained import TrainedModel
from rl_jax.lowering import Program
from rl_jax.mesh import RulesLike
from rl_jax.metrics import Metric
from rl_jax.models.model import Model, Params
from rl_jax.settings import LearnerSettings

SQUARES = "sum_squares"  # what score() gives beside the log-probs


class Learner(TrainedModel):
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
        rows = Rows(model, mesh, rules, settings, max_rows=max_rows)
        self._forward = forward = rows.log_probs(temperature)
        self._teacher: Forward | None = None
        super().__init__(
            rows,
            settings,
            partial(make_step, forward, algorithm),
            total_steps=total_steps,
            dump_dir=dump_dir,
        )
        self.model, self.mesh, self.algorithm = model, mesh, algorithm
        self.param_shardings, self.attention = rows.param_shardings, rows.attention
        self._count = jax.jit(
            lambda counts: jax.tree.map(lambda n: n + 1, counts), out_shardings=rows.replicated
        )
        self.scorer = Scorer(rows, forward)
        # Log-probs at half the temperature: log p = z - lse(z), so with theirs, 2z - lse(2z), the sum of squares is
        # exp(lse(2z) - 2 lse(z)) = exp(2 log p - theirs).
        self._sharp_scorer = Scorer(rows, rows.log_probs(temperature / 2))

    def learn_from(self, teacher: Forward, params: Params) -> None:
        """The teacher that the step runs beside the policy, where the algorithm needs teacher_divergence.

        params: in the teacher's compute dtype, on this learner's mesh; or their shapes, to lower the step from.
        """
        self._teacher = teacher
        self._set_step(partial(make_step, self._forward, self.algorithm, teacher=teacher))
        self._beside = (params,)

    def step(self, batch: Batch, version: int = 0) -> dict[str, Metric]:
        """One optimizer step on the whole batch, which version `version` consumes; blocks until it is done.

        Raises: ValueError if the batch does not fit; NonFiniteError after settings.max_skipped bad updates in a row.
        """
        metrics, out = self.update(batch, version)
        flops = train_flops(self.model, batch.sample_lengths, int(batch.targets_mask.sum()))
        return {
            **metrics,
            **mismatch_metrics(out["mismatch"]),
            **batch_metrics(batch, version, self.algorithm.samples),
            "batch/tflops": Metric(flops / 1e12, 1),
        }

    def score(self, batch: Batch, needs: Iterable[str]) -> dict[str, np.ndarray]:
        """The extras an algorithm needs, f32[B, T] each, 0 where not trained.

        old_logprobs: log-probs of the current weights. sum_squares: the sum of the squared probabilities of all tokens
        that could have stood there. With needs empty nothing is computed.
        Raises: ValueError for a name this learner cannot compute.
        """
        needs = set(needs)
        if unknown := sorted(needs - {self.gives, SQUARES}):
            raise ValueError(
                f"the algorithm needs {', '.join(unknown)}; this learner computes {self.gives} and {SQUARES}"
            )
        if not needs:
            return {}
        logprobs = self.scorer(self.params, batch)
        out = {self.gives: logprobs}
        if SQUARES in needs:
            sharp = self._sharp_scorer(self.params, batch)
            out[SQUARES] = np.where(batch.targets_mask, np.exp(2 * logprobs - sharp), 0)
        return {name: out[name] for name in needs}

    def grad_norms(self, batch: Batch, version: int) -> dict[str, float]:
        """By parameter, the norm of the gradient that step(batch, version) would clip and apply; nothing changes.

        A program of its own: its sums may round otherwise than the step's.
        """
        norms = jax.jit(make_grad_norms(self._forward, self.algorithm, self._teacher))
        found = norms(self.params, self.rows.put(batch, version), *self._beside)
        return {name: float(norm) for name, norm in jax.device_get(found).items()}

    def lower(self, batch: Batch) -> Iterator[Program]:
        """As TrainedModel.lower."""
        if SQUARES in batch.extras:
            params = self.abstract_state().params
            yield self._sharp_scorer.lower(f"policy's {SQUARES}", params, batch)
        yield from super().lower(batch)

    def hold(self) -> None:
        """Let a batch pass without an update, as a skipped one does: the schedule stands still, the version goes on."""
        state = self.state
        step, skipped = self._count((state.step, state.skipped))
        self._state = replace(state, step=step, skipped=skipped)


def batch_metrics(batch: Batch, version: int, samples: bool) -> dict[str, Metric]:
    """What the host knows of a batch without the device; of sampled tokens also their age, in versions."""
    tokens = int(batch.seq_len.sum())
    trained = int(batch.targets_mask.sum())
    metrics = {
        "batch/trajectories": Metric(len(batch.seq_len), 1),
        "batch/tokens": Metric(tokens, 1),
        "batch/trained_tokens": Metric(trained, 1),
    }
    if batch.tokens.size:
        metrics["batch/fill"] = Metric(tokens, batch.tokens.size)
    if (scores := batch.extras.get("reward_scores")) is not None:
        metrics["reward/model"] = Metric.of(values[-1] for _, values in batch.trained(scores))
    ages = [token_ages(versions, version) for _, versions in batch.trained(batch.versions)]
    if samples and ages:
        mix, every = version_mix(ages), np.concatenate(ages)
        low, high = float(mix["newest"].min()), float(mix["oldest"].max())
        metrics["staleness/mean"] = Metric(float(every.sum()), len(every), low, high)
        metrics["staleness/max"] = Metric(high, 1)
        metrics["staleness/start"] = Metric.of(mix["start_age"])
        metrics["staleness/versions"] = Metric.of(mix["num_versions"])
    return metrics
