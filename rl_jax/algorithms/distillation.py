"""Distillation: a teacher's log-probs on the student's samples, or its whole distribution."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.ratios import difference, log_ratio
from rl_jax.algorithms.token_losses import TokenLoss


def opd_pg(x: LossInputs, *, cap: float = 2.0) -> TokenLoss:
    """-sg(min(p / behaviour, cap) (log p_teacher - log p)) log p: reverse KL to the teacher on the student's tokens.

    The advantage is the token's own; nothing is summed over the future and no reward is read.
    parts: token_advantages; reverse_kl, log p - log p_teacher, whose mean is the value to log.
    Source:  on-policy distillation as in ROLL, NeMo-RL, AReaL; MiMo arXiv:2601.02780.
    """
    assert x.teacher_logprobs is not None, "opd needs teacher_logprobs"
    advantages = jax.lax.stop_gradient(difference(x.teacher_logprobs, x.logprobs, x.mask))
    ratio = jnp.exp(log_ratio(x.logprobs, x.behaviour_logprobs, x.mask))
    weights = jax.lax.stop_gradient(jnp.minimum(ratio, cap))
    loss = -weights * advantages * jnp.where(x.mask, x.logprobs, 0.0)
    return TokenLoss(loss, {"token_advantages": advantages, "reverse_kl": -advantages})


def forward_kl(student: Float[Array, "*B V"], teacher: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """KL(teacher || student) from logits, per token; gradient s - t."""
    s, t = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    return (jnp.exp(t) * (t - s)).sum(axis=-1)


def reverse_kl(student: Float[Array, "*B V"], teacher: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """KL(student || teacher) from logits, per token; gradient s ((log s - log t) - KL)."""
    return forward_kl(teacher, student)


def generalised_jsd(
    student: Float[Array, "*B V"], teacher: Float[Array, "*B V"], beta: float
) -> Float[Array, "*B"]:
    """beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S; 0 means forward KL, 1 reverse KL.

    Source:  GKD arXiv:2306.13649.
    """
    if beta == 0:
        return forward_kl(student, teacher)
    if beta == 1:
        return reverse_kl(student, teacher)
    s, t = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    mixed = jnp.logaddexp(jnp.log(beta) + t, jnp.log1p(-beta) + s)
    from_teacher = (jnp.exp(t) * (t - mixed)).sum(axis=-1)
    from_student = (jnp.exp(s) * (s - mixed)).sum(axis=-1)
    return beta * from_teacher + (1 - beta) * from_student
