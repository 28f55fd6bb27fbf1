"""Sums over the slots of one sequence or one turn, in rows that hold several sequences.

Input is the packed form [B, K] of LossInputs: the slots of a sequence lie side by side, and so do those of a turn.
Unpacked rows, one sequence each with holes where the mask is 0, are the same thing. A result stands on every slot of
its run, so nothing here has a ragged shape and nothing is gathered or scattered.

Invariants: sums are pairwise, so thousands of log-probs lose no digits to their order; the
gradient is made of the same additions, the same on every run; what stands off the mask must be selected away before.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def run_starts(*ids: Int[Array, "B K"]) -> Bool[Array, "B K"]:
    """True on the first slot of each run of slots whose ids (one or several arrays) are all equal."""
    starts = jnp.zeros(ids[0].shape, bool).at[:, 0].set(True)
    for array in ids:
        starts = starts.at[:, 1:].set(starts[:, 1:] | (array[:, 1:] != array[:, :-1]))
    return starts


@jax.custom_vjp
def run_sum(values: Float[Array, "B K"], starts: Bool[Array, "B K"]) -> Float[Array, "B K"]:
    """The sum over each run, on each of its slots. As a matrix it is symmetric, so it is its own gradient."""
    return _scan(jnp.add, values, starts, 0.0) + _scan_back(jnp.add, values, starts, 0.0) - values


run_sum.defvjp(
    lambda values, starts: (run_sum(values, starts), starts),
    lambda starts, cotangent: (run_sum(cotangent, starts), None),
)


def run_max(values: Float[Array, "B K"], starts: Bool[Array, "B K"]) -> Float[Array, "B K"]:
    """The largest value of each run, on each of its slots."""
    ahead = _scan_back(jnp.maximum, values, starts, -jnp.inf)
    return jnp.maximum(_scan(jnp.maximum, values, starts, -jnp.inf), ahead)


def run_mean(
    values: Float[Array, "B K"], mask: Bool[Array, "B K"], starts: Bool[Array, "B K"]
) -> Float[Array, "B K"]:
    """Mean over the masked slots of each run, on each of its slots; 0 where a run has none."""
    total = run_sum(jnp.where(mask, values, 0.0), starts)
    count = run_sum(mask.astype(total.dtype), starts)
    return total / jnp.maximum(count, 1.0)


def _scan(combine: Callable, values: jax.Array, starts: jax.Array, neutral: float) -> jax.Array:
    """Inclusive scan of each run from its left end, by doubling: log2(K) shifts."""
    step, width = 1, values.shape[1]
    begun = starts  # a start stands among the last `step` slots
    while step < width:
        before = jnp.pad(values[:, :-step], [(0, 0), (step, 0)], constant_values=neutral)
        values = jnp.where(begun, values, combine(values, before))
        begun = begun | jnp.pad(begun[:, :-step], [(0, 0), (step, 0)], constant_values=True)
        step *= 2
    return values


def _scan_back(
    combine: Callable, values: jax.Array, starts: jax.Array, neutral: float
) -> jax.Array:
    """The same from the right end."""
    ends = jnp.concatenate([starts[:, 1:], jnp.ones_like(starts[:, :1])], axis=1)
    return _scan(combine, values[:, ::-1], ends[:, ::-1], neutral)[:, ::-1]
