"""Distillation from a teacher's whole distribution: its numbers, its gradient, and that no logits of a batch exist."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms.distill import Distill
from rl_jax.learner.batch import pack, with_advantages
from rl_jax.learner.divergence import Head, chunked_divergence
from rl_jax.learner.learner import Learner
from rl_jax.learner.roles import Roles
from rl_jax.learner.rows import Rows
from rl_jax.learner.step import hidden_states
from rl_jax.mesh import TRAIN_RULES, make_mesh
from rl_jax.settings import AlgorithmSettings, LearnerSettings
from rl_jax.testing.tiny_model import tiny_model
from rl_jax.testing.trajectories import fake_group
from tests.learner.test_logprobs import all_shapes

SETTINGS = LearnerSettings(row_tokens=24, microbatch_rows=4, logprob_chunk=16, learning_rate=0.02)
B, K, V, CHUNK = 2, 24, 50, 4


def heads(teacher_size=V):
    rng = np.random.default_rng(0)

    def head(d, size, temperature, softcap):
        hidden, columns = rng.normal(size=(B, K, d)), rng.normal(size=(d, size))
        return Head(jnp.asarray(hidden), jnp.asarray(columns), temperature, softcap)

    return head(6, V, 0.7, 0.0), head(9, teacher_size, 0.7, 3.0)


def algorithm(beta):
    return Distill(AlgorithmSettings(name="distill", jsd_beta=beta))


def plain_logits(head):
    z = head.hidden @ head.columns[:, :V]
    return (head.softcap * jnp.tanh(z / head.softcap) if head.softcap else z) / head.temperature


def run(beta, hidden, columns, student, teacher, num_chunks=K // CHUNK):
    student = replace(student, hidden=hidden, columns=columns)
    chunks = jnp.int32(num_chunks)
    return chunked_divergence(algorithm(beta).divergence, student, teacher, chunks, chunk=CHUNK)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_chunks_give_the_divergence_and_its_gradient(beta):
    """Against the definition over all logits at once; the teacher's head has columns more, which nobody reads."""
    with jax.enable_x64(True):
        student, teacher = heads(teacher_size=V + 7)

        def whole(hidden, columns):
            s = jax.nn.softmax(plain_logits(replace(student, hidden=hidden, columns=columns)))
            t = jax.nn.softmax(plain_logits(teacher))
            if beta in (0.0, 1.0):
                p, q = (t, s) if beta == 0.0 else (s, t)
                return (p * jnp.log(p / q)).sum(axis=-1)
            m = beta * t + (1 - beta) * s
            of_t, of_s = ((p * jnp.log(p / m)).sum(axis=-1) for p in (t, s))
            return beta * of_t + (1 - beta) * of_s

        weights = jnp.asarray(np.random.default_rng(1).normal(size=(B, K)))
        own = (student.hidden, student.columns)
        chunked = partial(run, beta, student=student, teacher=teacher)
        got, want = chunked(*own), whole(*own)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # logits are float32
        slopes = [
            jax.grad(lambda h, c, f=f: (weights * f(h, c)).sum(), argnums=(0, 1))(*own)
            for f in (chunked, whole)
        ]
    for a, b in zip(*slopes, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_chunks_that_hold_nothing_give_nothing():
    student, teacher = heads()
    out = run(0.5, student.hidden, student.columns, student, teacher, num_chunks=2)
    assert out[:, : 2 * CHUNK].all() and not out[:, 2 * CHUNK :].any()


def test_no_array_holds_the_logits_of_a_batch():
    student, teacher = heads()

    def total(hidden, columns):
        return run(0.5, hidden, columns, student, teacher).sum()

    program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(student.hidden, student.columns)
    sizes = [int(np.prod(shape)) for shape in all_shapes(program.jaxpr)]
    largest = max(
        B * CHUNK * V, *(x.size for h in (student, teacher) for x in (h.hidden, h.columns))
    )
    assert B * CHUNK * V in sizes and max(sizes) == largest < B * K * V


@pytest.fixture(scope="module")
def models():
    small, params = tiny_model(
        num_layers=1, embed_size=16, num_heads=2, num_kv_heads=2, mlp_size=32
    )
    large, theirs = tiny_model(
        num_layers=2, embed_size=24, num_heads=2, num_kv_heads=2, mlp_size=32, seed=5
    )
    return small, params, large, theirs


def learner_of(models, mesh):
    small, params, large, theirs = models
    policy = Learner(
        small,
        mesh,
        TRAIN_RULES,
        algorithm(0.5),
        SETTINGS,
        max_rows=8,
        temperature=0.9,
        total_steps=10,
    )
    policy.reset(params)
    rows = Rows(large, mesh, TRAIN_RULES, SETTINGS, max_rows=8)
    policy.learn_from(rows.log_probs(0.9), rows.cast(theirs))
    return policy


def batch_of(policy):
    groups = [fake_group(g, [0.0, None, -1.0], [12, 20, 9]) for g in range(2)]
    batch = pack(groups, SETTINGS)
    extras = Roles(policy).score(batch, policy.algorithm.needs)
    assert extras == {}  # the step computes it
    settings = policy.algorithm.settings
    return with_advantages(batch, groups, extras, policy.algorithm, None, settings)[0]


@pytest.mark.slow
def test_a_learner_comes_to_its_teacher(models):
    """On four devices: its loss at first is the definition's over whole logits, then it falls; any size may teach."""
    policy = learner_of(models, make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4]))
    batch = batch_of(policy)
    micro = {k: v[0] for k, v in policy.rows.put(batch, 0).items() if np.ndim(v)}
    forward, (theirs,) = policy._forward, policy._beside
    teacher = Rows(models[2], policy.mesh, TRAIN_RULES, SETTINGS, max_rows=8).log_probs(0.9)

    def logits(forward, params):
        hidden = hidden_states(forward, params, micro)
        before = jnp.maximum(micro["target_index"] - 1, 0)
        return (
            jnp.take_along_axis(hidden, before[..., None], axis=1)
            @ forward.model.head(params)
            / 0.9
        )

    ours = logits(forward, forward.cast(policy.params))
    s, t = jax.nn.softmax(ours), jax.nn.softmax(logits(teacher, theirs))
    m = (s + t) / 2
    each = ((s * jnp.log(s / m)).sum(-1) + (t * jnp.log(t / m)).sum(-1)) / 2
    assert int(policy.rows.put(batch, 0)["num_microbatches"]) == 1
    want = float(np.asarray(each)[np.asarray(micro["target_mask"])].mean())
    told = [policy.step(batch, version=i) for i in range(6)]
    losses = [one["policy/loss"].mean for one in told]
    assert losses[0] == pytest.approx(want, rel=1e-4) and want > 1e-3
    assert told[0]["policy/teacher_divergence"].mean == pytest.approx(losses[0], rel=1e-5)
    assert losses[-1] < 0.7 * losses[0]
