"""The Algorithm protocol and the records that pass through it.

Life of a step: 1 `select` sees the raw groups, each as it completes; 2 `trains` says which trajectories' tokens may
enter the loss (packing leaves the others out, before anything is counted); 3 `advantages` runs on the host, in float64,
then `counted` and `token_inputs`, which few have (Base); 4 `token_loss` runs inside jit, once a microbatch, and returns
a loss per token that nobody has reduced: the learner multiplies it by loss_weights, which hold the aggregation and the
batch's global counts (aggregate.py). So no algorithm ever divides. 5 `learned` sees the step's figures.

An algorithm whose needs have "values" also has `targets(groups, extras, state)`, called before step 3 with its
arguments: one f32[T] per trajectory, the returns that the critic is to learn. One whose needs have
"teacher_divergence" also has `divergence(student, teacher)`: logits f32[..., V] of both -> [...], called inside jit, a
chunk of tokens at a time.

Must not: reduce over tokens, know the layout (rows, microbatches, devices), or keep state on
itself: what must survive a restart goes through `state`, which is JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rl_jax.algorithms.advantages import trains_scored
from rl_jax.metrics import Metric
from rl_jax.types import Group, Trajectory


class RewardPartError(ValueError):
    """An option names a part of the reward that the task's scorer does not give."""


Sums = dict[str, tuple[jax.Array, jax.Array]]  # metric name -> (sum f32[], count f32[])


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of one microbatch: B rows, K slots a row, filled from the left in the order of the text.

    Only trained tokens are here, so K says nothing about the length of the text; `mask` is False on the empty slots,
    whose other values are zeros. Only logprobs, entropy and teacher_divergence carry a gradient.
    """

    logprobs: Float[Array, "B K"]  # of the policy being trained, at the sampling temperature
    entropy: Float[Array, "B K"]  # of the same tempered distribution
    behaviour_logprobs: Float[Array, "B K"]  # of the policy that sampled
    advantages: Float[Array, "B K"]
    mask: Bool[Array, "B K"]
    segment_ids: Int[Array, "B K"]  # which trajectory of the row, from 1; 0 on empty slots
    turn_ids: Int[Array, "B K"]  # which turn of the trajectory
    old_logprobs: Float[Array, "B K"] | None = None  # at step start, if the algorithm needs them
    reference_logprobs: Float[Array, "B K"] | None = None  # of the frozen reference
    teacher_logprobs: Float[Array, "B K"] | None = None  # of the teacher
    # of the whole distribution from the teacher's, by the algorithm's `divergence`; it too carries a gradient
    teacher_divergence: Float[Array, "B K"] | None = None
    lag: Int[Array, "B K"] | None = None  # consuming version minus the token's
    # of mask and of what a correction left out of it: the tokens that loss_weights count; None = mask
    counted: Bool[Array, "B K"] | None = None
    # of token_inputs
    kept: Float[Array, "B K"] | None = None  # 0 on the tokens that a whole-batch correction drops
    selected: Float[Array, "B K"] | None = None  # 1 on the tokens that a loss treats apart
    entropy_coef: Float[Array, "B K"] | None = None  # of this step, where it adapts

    @property
    def old(self) -> Float[Array, "B K"]:
        """Log-probs of the policy that a ratio is taken against: old_logprobs, else those of the sampling policy."""
        return self.behaviour_logprobs if self.old_logprobs is None else self.old_logprobs


class Algorithm(Protocol):
    needs: frozenset[str]  # extras that learner.score must compute first, e.g. {"old_logprobs"}
    samples: bool  # trains on what the policy sampled, so behaviour log-probs and versions are real

    def trains(self, trajectory: Trajectory) -> bool:
        """Whether the trajectory's sampled tokens are trained and counted."""
        ...

    def select(self, groups: Sequence[Group]) -> tuple[list[Group], list[tuple[str, str]]]:
        """Groups to train on, and (uid, reason) of each that is dropped. Sees raw rewards only.

        A live run asks about each group by itself, as it completes. A member may be dropped too, by its own uid: its
        group comes back with that member's loss_mask empty, so that its reward still counts in the group's statistics.
        """
        ...

    def advantages(
        self, groups: Sequence[Group], extras: Mapping[str, Any], state: Any
    ) -> tuple[list[np.ndarray], Any]:
        """One f32[T] per trajectory, in the order of groups and their members; and the next state.

        Values where nothing is sampled are ignored. extras: one array per trajectory, by name.
        """
        ...

    def token_loss(self, x: LossInputs) -> tuple[Float[Array, "B K"], Sums]:
        """Unreduced loss, minimised; metrics as (sum, count). Runs inside jit."""
        ...

    def counted(
        self, groups: Sequence[Group], advantages: Sequence[np.ndarray], extras: Mapping[str, Any]
    ) -> Sequence[np.ndarray] | None:
        """The trained tokens that the aggregation counts, bool[T] per trajectory; None = all."""
        ...

    def token_inputs(
        self,
        groups: Sequence[Group],
        advantages: Sequence[np.ndarray],
        extras: Mapping[str, Any],
        state: Any,
    ) -> Mapping[str, Sequence[np.ndarray]]:
        """What else of the host token_loss reads: field of LossInputs -> one f32[T] per trajectory."""
        ...

    def learned(self, state: Any, metrics: Mapping[str, Metric]) -> Any:
        """The next state, now that the step is made and its figures are known."""
        ...


def missing_members(algorithm: Any) -> list[str]:
    """What an object lacks of the protocol; `targets` and `divergence` too, where its needs ask for them."""
    members = [*Algorithm.__annotations__, *vars(Algorithm)]
    if "values" in getattr(algorithm, "needs", ()):
        members.append("targets")
    if "teacher_divergence" in getattr(algorithm, "needs", ()):
        members.append("divergence")
    return [m for m in dict.fromkeys(members) if m[0] != "_" and not hasattr(algorithm, m)]


class Base:
    """What most algorithms say of the parts of the protocol that few have: the rest is advantages and token_loss."""

    needs: frozenset[str] = frozenset()
    samples = True

    def trains(self, trajectory: Trajectory) -> bool:
        return trains_scored(trajectory, overlong_filter=False)

    def select(self, groups: Sequence[Group]) -> tuple[list[Group], list[tuple[str, str]]]:
        return list(groups), []

    def counted(self, groups: Sequence[Group], advantages, extras) -> Sequence[np.ndarray] | None:
        return None

    def token_inputs(
        self, groups: Sequence[Group], advantages, extras, state
    ) -> Mapping[str, Sequence[np.ndarray]]:
        return {}

    def learned(self, state: Any, metrics: Mapping[str, Metric]) -> Any:
        return state


class RowAlgorithm(Algorithm, Protocol):
    """One that learns from rows (data/), and can say how well it does on rows that it does not train on."""

    measured: frozenset[str]  # extras that measure reads
    loss_name: str  # of the loss among its figures

    def measure(self, groups: Sequence[Group], extras: Mapping[str, Any]) -> dict[str, Metric]:
        """Loss and figures of the rows, whatever batch they come in. extras: as advantages()."""
        ...
