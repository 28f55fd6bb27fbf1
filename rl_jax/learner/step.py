"""The learner's programs, as pure functions to be jitted: one optimizer step, and log-probs or values without one.

All run the model over the used microbatches of a fixed-capacity batch in a `fori_loop` whose trip
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
from rl_jax.algorithms.algorithm import Algorithm, LossInputs, Sums
from rl_jax.algorithms.contract import check_token_loss
from rl_jax.learner.attention import RowAttention
from rl_jax.learner.divergence import chunked_divergence, head_of
from rl_jax.learner.logprobs import target_logprobs
from rl_jax.learner.mismatch import mismatch_totals
from rl_jax.learner.optimizer import Schedule
from rl_jax.models.model import Constrain, Model, Params
from rl_jax.models.value import ValueModel

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
    # of the critic, beside the policy's in a checkpoint; no step ever sees both
    critic: "TrainState | None" = None


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

    def __call__(
        self, params: Params, micro: DeviceBatch, hidden: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """(log-probs, entropy), f32[R, K], 0 on empty slots; over the sampled support where the batch has one.

        hidden: the rows' hidden_states, where they are at hand.
        """
        logprobs, entropy = target_logprobs(
            hidden_states(self, params, micro) if hidden is None else hidden,
            self.model.head(params),
            micro["target_index"],
            micro["target_tokens"],
            micro["num_chunks"],
            chunk=self.chunk,
            temperature=self.temperature,
            softcap=self.model.settings.logit_softcap,
            split=self.split,
            hopper=self.hopper,
            support=micro.get("support"),
        )
        valid = micro["target_mask"]
        return jnp.where(valid, logprobs, 0.0), jnp.where(valid, entropy, 0.0)

    def score(self, params: Params, micro: DeviceBatch) -> jax.Array:
        """The log-probs alone."""
        return self(params, micro)[0]


@dataclass(frozen=True)
class ValueForward:
    """A value for each trained token of one microbatch, read `lookback` columns before it.

    1: of the state before the token, where its logits would be (a critic). 0: of the state that it makes (a reward
    model).
    """

    model: ValueModel
    constrain: Constrain
    attention: RowAttention
    remat: str
    lookback: int = 1

    def cast(self, params: Params) -> Params:
        """The trunk in the compute dtype, once a step."""
        return self.model.cast(params, self.model.settings.dtype)

    def score(self, params: Params, micro: DeviceBatch) -> jax.Array:
        """f32[R, K], 0 on empty slots."""
        hidden = hidden_states(self, params, micro)
        at = jnp.maximum(micro["target_index"] - self.lookback, 0)  # an empty slot has column 0
        picked = jnp.take_along_axis(hidden, at[..., None], axis=1)  # [R, K, D]
        return jnp.where(micro["target_mask"], self.model.values(params, picked), 0.0)


def hidden_states(forward: Forward | ValueForward, params: Params, micro: DeviceBatch) -> jax.Array:
    """[R, T, D] of the rows of one microbatch."""
    positions = micro["positions"]
    attend = forward.attention(positions, micro["sample_ids"])
    return forward.model.hidden(
        params, micro["tokens"], positions, attend, forward.remat, forward.constrain
    )


@dataclass(frozen=True)
class Figures:
    """What the figures of one model's updates are called."""

    loss: str = "policy/loss"
    grad_norm: str = "optim/grad_norm"
    grad_norm_clipped: str = "optim/grad_norm_clipped"
    learning_rate: str = "optim/learning_rate"
    skipped: str = "optim/skipped"


@dataclass(frozen=True)
class Update:
    """What turns summed gradients into the next state."""

    optimizer: optax.GradientTransformation
    schedule: Schedule
    grad_clip: float  # gradients are scaled down to this global norm
    figures: Figures


# (params in the compute dtype, microbatch) -> (loss, (metrics, f32[R, K] to keep of the forward))
Loss = Callable[[Params, DeviceBatch], tuple[jax.Array, tuple[Sums, jax.Array]]]


# (hidden states of the policy, its params, microbatch) -> f32[R, K], 0 on empty slots
TeacherDivergence = Callable[[jax.Array, Params, DeviceBatch], jax.Array]


def teacher_divergence(
    forward: Forward, algorithm: Algorithm, teacher: Forward, teacher_params: Params
) -> TeacherDivergence:
    """Of each trained token, as the algorithm's `divergence` has it; the teacher's forward is part of it."""

    def divergence(hidden: jax.Array, params: Params, micro: DeviceBatch) -> jax.Array:
        theirs = jax.lax.stop_gradient(hidden_states(teacher, teacher_params, micro))
        out = chunked_divergence(
            algorithm.divergence,
            head_of(forward, params, micro, hidden),
            head_of(teacher, teacher_params, micro, theirs),
            micro["num_chunks"],
            chunk=forward.chunk,
        )
        return jnp.where(micro["target_mask"], out, 0.0)

    return divergence


def policy_loss(
    forward: Forward, algorithm: Algorithm, divergence: TeacherDivergence | None = None
) -> Loss:
    """The algorithm's loss of a microbatch; keeps the log-probs."""

    def loss(params: Params, micro: DeviceBatch):
        hidden = hidden_states(forward, params, micro)
        logprobs, entropy = forward(params, micro, hidden)
        given = micro
        if divergence is not None:
            given = {**micro, "teacher_divergence": divergence(hidden, params, micro)}
        total, sums = weighted_loss(algorithm, given, logprobs, entropy)
        sums = {**sums, "policy/entropy": masked_sum(entropy, micro["target_mask"])}
        return total, (sums, jax.lax.stop_gradient(logprobs))

    return loss


def weighted_loss(
    algorithm: Algorithm, micro: DeviceBatch, logprobs: jax.Array, entropy: jax.Array
) -> tuple[jax.Array, Sums]:
    """(the algorithm's loss of a microbatch under loss_weights, its metrics).

    Raises: ContractError, while tracing, for a loss that is not one of each token: broadcast, it would train something.
    """
    mask = micro["target_mask"]
    given = algorithm.token_loss(loss_inputs(micro, logprobs, entropy))
    token_loss, sums = check_token_loss(algorithm, given, mask.shape)
    return jnp.where(mask, micro["loss_weights"] * token_loss, 0.0).sum(), sums


def accumulate(loss: Loss, params: Params, batch: DeviceBatch) -> dict:
    """{"loss", "grads" (float32), "sums", "kept" f32[M, R, K]} over the used microbatches; params in compute dtype."""
    gradient = jax.value_and_grad(loss, has_aux=True)

    def add(i, carry):
        (value, (sums, kept)), grads = gradient(params, microbatch(batch, i))
        total = jax.tree.map(
            lambda a, b: a + b.astype(a.dtype),
            (carry["loss"], carry["grads"], carry["sums"]),
            (value, grads, sums),
        )
        kept = jax.lax.dynamic_update_index_in_dim(carry["kept"], kept, i, 0)
        return dict(zip(("loss", "grads", "sums"), total), kept=kept)

    sums_of = jax.eval_shape(loss, params, microbatch(batch, 0))[1][0]
    zeros = {
        "loss": jnp.float32(0),
        "grads": jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
        "sums": jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), sums_of),
        "kept": jnp.zeros(batch["target_mask"].shape, jnp.float32),
    }
    return jax.lax.fori_loop(0, batch["num_microbatches"], add, zeros)


def make_step(
    forward: Forward, algorithm: Algorithm, update: Update, teacher: Forward | None = None
) -> Callable[..., tuple[TrainState, dict]]:
    """step(state, batch) -> (next state, {"sums": (sum, count) by name, "mismatch": totals}).

    With a teacher a third argument are its params, in its compute dtype.
    """

    def step(state: TrainState, batch: DeviceBatch, *beside: Params) -> tuple[TrainState, dict]:
        of_teacher = None
        if teacher is not None:
            of_teacher = teacher_divergence(forward, algorithm, teacher, *beside)
        loss = policy_loss(forward, algorithm, of_teacher)
        out = accumulate(loss, forward.cast(state.params), batch)
        state_after, sums = apply_update(update, state, out, batch)
        sums["policy/advantage"] = masked_sum(batch["advantages"], batch["target_mask"])
        mismatch = {}
        if algorithm.samples:
            mismatch = mismatch_totals(
                out["kept"],
                batch["behaviour_logprobs"],
                batch["target_mask"],
                batch["lag"],
                batch["context_mixed"],
                batch["target_segments"],
            )
        return state_after, {"sums": sums, "mismatch": mismatch}

    return step


def apply_update(
    update: Update, state: TrainState, out: dict, batch: DeviceBatch
) -> tuple[TrainState, Sums]:
    """(next state, sums): params and optimizer state change only if all is finite and something is trained."""
    num_trained = batch["target_mask"].sum()
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(out["grads"])))
    finite = jnp.isfinite(out["loss"]) & jnp.isfinite(norm)
    applied = finite & (num_trained > 0)
    # A multiplication fuses into the update; optax's clip divides, which costs a pass of its own.
    scale = jnp.minimum(1.0, update.grad_clip / norm)
    grads = jax.tree.map(lambda g: g * scale, out["grads"])
    changes, opt_state = update.optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, changes)

    def choose(new, old):
        return jnp.where(applied, new, old)

    state_after = TrainState(
        params=jax.tree.map(choose, params, state.params),
        opt_state=jax.tree.map(choose, opt_state, state.opt_state),
        step=state.step + 1,
        skipped=state.skipped + jnp.where(applied, 0, 1),
        skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1),
    )
    one, names = jnp.float32(1), update.figures
    return state_after, {
        **out["sums"],
        names.loss: (out["loss"], one),
        names.grad_norm: (norm, one),
        names.grad_norm_clipped: (norm * scale, one),
        names.learning_rate: (update.schedule(state.step - state.skipped), one),
        names.skipped: ((~finite).astype(jnp.float32), one),
    }


def make_grad_norms(
    forward: Forward, algorithm: Algorithm, teacher: Forward | None = None
) -> Callable[..., dict[str, jax.Array]]:
    """norms(params, batch) -> f32[] by parameter: of the step's summed gradient, before clipping.

    With a teacher a third argument are its params, in its compute dtype.
    """

    def norms(params: Params, batch: DeviceBatch, *beside: Params) -> dict[str, jax.Array]:
        of_teacher = None
        if teacher is not None:
            of_teacher = teacher_divergence(forward, algorithm, teacher, *beside)
        loss = policy_loss(forward, algorithm, of_teacher)
        grads = accumulate(loss, forward.cast(params), batch)["grads"]
        return jax.tree.map(lambda g: jnp.sqrt(jnp.square(g).sum()), grads)

    return norms


def make_score(forward: Forward | ValueForward) -> Callable[[Params, DeviceBatch], jax.Array]:
    """score(params, batch) -> f32[M, R, K] of the trained tokens: log-probs of a Forward, values of a ValueForward."""

    def score(params: Params, batch: DeviceBatch) -> jax.Array:
        params = forward.cast(params)

        def one(i, out):
            return jax.lax.dynamic_update_index_in_dim(
                out, forward.score(params, microbatch(batch, i)), i, 0
            )

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
        teacher_divergence=micro.get("teacher_divergence"),
        lag=micro["lag"],
        kept=micro.get("kept"),
        selected=micro.get("selected"),
        entropy_coef=micro.get("entropy_coef"),
    )


def masked_sum(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum over the mask, its count), f32[] each."""
    return jnp.where(mask, values, 0.0).sum(), mask.sum().astype(jnp.float32)
