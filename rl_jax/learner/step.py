"""The learner's two programs, as pure functions to be jitted: one optimizer step, and log-probs without one.

Both run the model over the used microbatches of a fixed-capacity batch in a `fori_loop` whose trip
count is data: one compile, no work for padding. Gradients are summed in float32; `loss_weights`
already hold the aggregation, so nothing is divided here. The step's own forward is at the weights
of the step's start, so its log-probs give the mismatch metrics without a second pass. A loss or
gradient that is not finite, or a batch with nothing to train, leaves params and optimizer state as
they are, on the device; the host learns of it from the metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from kernels.linear_logprob import Hopper, Split
from rl_jax.algorithms.algorithm import Algorithm, LossInputs
from rl_jax.learner.attention import RowAttention
from rl_jax.learner.logprobs import target_logprobs
from rl_jax.learner.mismatch import mismatch_totals
from rl_jax.learner.optimizer import Schedule
from rl_jax.models.model import Constrain, Model, Params

DeviceBatch = dict[str, jax.Array]  # microbatches.py


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that training carries; donated to every step, so a reference to an old one is dead after it."""

    params: Params  # master weights in model.settings.param_dtype
    opt_state: optax.OptState
    step: jax.Array  # i32[] batches consumed
    skipped: jax.Array  # i32[] of these, without an update; step - skipped updates were applied
    skipped_in_row: jax.Array  # i32[] non-finite updates since the last good one


@dataclass(frozen=True)
class Forward:
    """The policy's log-probs of the trained tokens of one microbatch, from params in the compute dtype."""

    model: Model
    constrain: Constrain
    attention: RowAttention
    remat: str
    chunk: int  # trained tokens of a row whose logits are live at once
    temperature: float
    split: Split | None = None  # of rows and vocabulary on the train mesh
    hopper: Hopper | None = None  # cards whose kernels compute log-probs

    def cast(self, params: Params) -> Params:
        """What servers hold too, so numbers are theirs; once a step, not a microbatch."""
        return self.model.cast(params, self.model.settings.dtype)

    def __call__(self, params: Params, micro: DeviceBatch) -> tuple[jax.Array, jax.Array]:
        """(log-probs, entropy), f32[R, K], 0 on empty slots."""
        positions = micro["positions"]
        attend = self.attention(positions, micro["segment_ids"])
        hidden = self.model.hidden(
            params, micro["tokens"], positions, attend, self.remat, self.constrain
        )
        logprobs, entropy = target_logprobs(
            hidden,
            self.model.head(params),
            micro["target_index"],
            micro["target_tokens"],
            micro["num_chunks"],
            chunk=self.chunk,
            temperature=self.temperature,
            split=self.split,
            hopper=self.hopper,
        )
        valid = micro["target_mask"]
        return jnp.where(valid, logprobs, 0.0), jnp.where(valid, entropy, 0.0)


def make_step(
    forward: Forward,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    grad_clip: float,
) -> Callable[[TrainState, DeviceBatch], tuple[TrainState, dict]]:
    """step(state, batch) -> (next state, {"sums": (sum, count) by name, "mismatch": totals}).

    Args: grad_clip: gradients are scaled down to this global norm.
    """

    def loss(params: Params, micro: DeviceBatch):
        logprobs, entropy = forward(params, micro)
        token_loss, sums = algorithm.token_loss(loss_inputs(micro, logprobs, entropy))
        weighted = jnp.where(micro["target_mask"], micro["loss_weights"] * token_loss, 0.0)
        sums = {**sums, "policy/entropy": _total(entropy, micro["target_mask"])}
        return weighted.sum(), (sums, jax.lax.stop_gradient(logprobs))

    gradient = jax.value_and_grad(loss, has_aux=True)

    def step(state: TrainState, batch: DeviceBatch) -> tuple[TrainState, dict]:
        params = forward.cast(state.params)

        def add(i, carry):
            (value, (sums, logprobs)), grads = gradient(params, microbatch(batch, i))
            total = jax.tree.map(
                lambda a, b: a + b.astype(a.dtype),
                (carry["loss"], carry["grads"], carry["sums"]),
                (value, grads, sums),
            )
            kept = jax.lax.dynamic_update_index_in_dim(carry["logprobs"], logprobs, i, 0)
            return dict(zip(("loss", "grads", "sums"), total), logprobs=kept)

        sums_of = jax.eval_shape(loss, params, microbatch(batch, 0))[1][0]
        zeros = {
            "loss": jnp.float32(0),
            "grads": jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            "sums": jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), sums_of),
            "logprobs": jnp.zeros(batch["target_mask"].shape, jnp.float32),
        }
        out = jax.lax.fori_loop(0, batch["num_microbatches"], add, zeros)

        num_trained = batch["target_mask"].sum()
        squares = [jnp.square(g).sum() for g in jax.tree.leaves(out["grads"])]
        norm = jnp.sqrt(sum(squares))
        finite = jnp.isfinite(out["loss"]) & jnp.isfinite(norm)
        applied = finite & (num_trained > 0)
        # A multiplication fuses into the update; optax's clip divides, which costs a pass of its own.
        scale = jnp.minimum(1.0, grad_clip / norm)
        grads = jax.tree.map(lambda g: g * scale, out["grads"])
        state_after = _update(state, grads, optimizer, finite, applied)
        one = jnp.float32(1)
        mismatch = {}
        if algorithm.samples:
            mismatch = mismatch_totals(
                out["logprobs"],
                batch["behaviour_logprobs"],
                batch["target_mask"],
                batch["lag"],
                batch["context_mixed"],
            )
        sums = {
            **out["sums"],
            "policy/loss": (out["loss"], one),
            "policy/advantage": _total(batch["advantages"], batch["target_mask"]),
            "optim/grad_norm": (norm, one),
            "optim/learning_rate": (schedule(state.step - state.skipped), one),
            "optim/skipped": ((~finite).astype(jnp.float32), one),
        }
        return state_after, {"sums": sums, "mismatch": mismatch}

    return step


def make_score(forward: Forward) -> Callable[[Params, DeviceBatch], jax.Array]:
    """score(params, batch) -> log-probs of the trained tokens, f32[M, R, K]."""

    def score(params: Params, batch: DeviceBatch) -> jax.Array:
        params = forward.cast(params)

        def one(i, out):
            logprobs, _ = forward(params, microbatch(batch, i))
            return jax.lax.dynamic_update_index_in_dim(out, logprobs, i, 0)

        empty = jnp.zeros(batch["target_mask"].shape, jnp.float32)
        return jax.lax.fori_loop(0, batch["num_microbatches"], one, empty)

    return score


def microbatch(batch: DeviceBatch, i: jax.Array | int) -> DeviceBatch:
    """Microbatch i of [M, ...] arrays."""
    return {
        name: jax.lax.dynamic_index_in_dim(array, i, 0, keepdims=False)
        for name, array in batch.items()
        if name != "num_microbatches"
    }


def loss_inputs(micro: DeviceBatch, logprobs: jax.Array, entropy: jax.Array) -> LossInputs:
    return LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        behaviour_logprobs=micro["behaviour_logprobs"],
        advantages=micro["advantages"],
        mask=micro["target_mask"],
        segment_ids=micro["target_segments"],
        turn_ids=micro["target_turns"],
        old_logprobs=micro.get("old_logprobs"),
        reference_logprobs=micro.get("reference_logprobs"),
        teacher_logprobs=micro.get("teacher_logprobs"),
        lag=micro["lag"],
    )


def _update(state, grads, optimizer, finite, applied) -> TrainState:
    """The next state; params and optimizer state change only where applied."""
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    def choose(new, old):
        return jnp.where(applied, new, old)

    return TrainState(
        params=jax.tree.map(choose, params, state.params),
        opt_state=jax.tree.map(choose, opt_state, state.opt_state),
        step=state.step + 1,
        skipped=state.skipped + jnp.where(applied, 0, 1),
        skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1),
    )


def _total(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.where(mask, values, 0.0).sum(), mask.sum().astype(jnp.float32)
