"""Each token's divergence of the policy's whole distribution from a teacher's: [B, T, V] never exists.

Life, inside a step: 1 the teacher's trunk runs over the rows of the microbatch, without a gradient. 2 Hidden states
before the trained tokens are gathered from both models. 3 Chunk by chunk both heads give logits, the algorithm compares
them, and nothing of [B, chunk, V] outlives its chunk: backward computes it again (jax.checkpoint). Chunks that hold no
trained token are not computed.
Logits are float32, soft-capped where a model caps them, over the temperature of sampling. A teacher's head may have
more columns (padding of its vocabulary): it is read over the policy's ids alone.
Must not: know which divergence it is (Algorithm.divergence).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.linear_logprob import soft_capped
from rl_jax.models.model import Params

if TYPE_CHECKING:
    from rl_jax.learner.step import DeviceBatch, Forward

Divergence = Callable[[Float[Array, "... V"], Float[Array, "... V"]], Float[Array, "..."]]


@dataclass(frozen=True)
class Head:
    """Where logits come from: hidden states before the scored tokens, and the head's columns."""

    hidden: Float[Array, "B K D"]
    columns: Float[Array, "D V"]
    temperature: float
    softcap: float


def head_of(forward: "Forward", params: Params, micro: "DeviceBatch", hidden: jax.Array) -> Head:
    """hidden: [R, T, D] of the microbatch's rows."""
    before = jnp.maximum(micro["target_index"] - 1, 0)  # an empty slot has column 0
    picked = jnp.take_along_axis(hidden, before[..., None], axis=1)
    softcap = forward.model.settings.logit_softcap
    return Head(picked, forward.model.head(params), forward.temperature, softcap)


def chunked_divergence(
    divergence: Divergence, student: Head, teacher: Head, num_chunks: Int[Array, ""], *, chunk: int
) -> Float[Array, "B K"]:
    """divergence(student's logits, teacher's) of each slot; gradient to the student alone.

    Args:    K is a multiple of chunk.  num_chunks: chunks from here on hold nothing and give 0.
    """
    B, K, _ = student.hidden.shape
    assert K % chunk == 0, f"{K} slots are not whole chunks of {chunk}"
    size = student.columns.shape[1]
    theirs = jax.lax.stop_gradient(teacher.columns[:, :size])
    # Float32, so that its gradient adds up over the chunks without rounding to the compute dtype.
    ours = student.columns.astype(jnp.float32)

    def one(hidden, of_teacher, ours, theirs):
        columns = ours.astype(student.columns.dtype)
        return divergence(
            _logits(student, hidden, columns),
            jax.lax.stop_gradient(_logits(teacher, of_teacher, theirs)),
        )

    # The branch is inside: else some JAX versions keep a copy of both heads for each chunk.
    @partial(jax.checkpoint, prevent_cse=False)
    def guarded(i, *arrays):
        empty = jnp.zeros(arrays[0].shape[:2], jnp.float32)
        return jax.lax.cond(i < num_chunks, one, lambda *_: empty, *arrays)

    def step(_, x):
        return None, guarded(*x, ours, theirs)

    def chunks(x):  # [B, K, D] -> [K / chunk, B, chunk, D]
        return x.reshape(B, K // chunk, chunk, x.shape[-1]).swapaxes(0, 1)

    of_teacher = jax.lax.stop_gradient(teacher.hidden)
    xs = (jnp.arange(K // chunk), chunks(student.hidden), chunks(of_teacher))
    return jax.lax.scan(step, None, xs)[1].swapaxes(0, 1).reshape(B, K)


def _logits(head: Head, hidden: jax.Array, columns: jax.Array) -> jax.Array:
    z = jnp.einsum("bcd,dv->bcv", hidden, columns, preferred_element_type=jnp.float32)
    return soft_capped(z, head.softcap) / head.temperature
