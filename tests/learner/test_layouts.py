"""L13: 64 trajectories give one gradient, for every loss of the table and the critic's, in every layout.

Layouts are (data 1, 2, 4) x (tensor 1, 2) x (1, 2, 8 microbatches) x (packed, one trajectory a row); all go through the
learner's own packing, advantages, weights, microbatches, forward and accumulation. A loss enters a layout as its
gradient with respect to the log-probs and entropies that the layout itself computed, and leaves it as the gradient of
every weight: so one program a mesh serves all losses, and one program all meshes' losses. Rows are dealt to
microbatches of 64 by leaving rows empty: how many microbatches is data. Microbatches of other shapes, and a loss traced
into the step, are in test_learner.py and test_step_layouts.py; losses over rows that are split over devices in
test_cases.py.
Each mesh costs about 9 s of CPU, nearly all of it compiling: the slow ones 35 s.
"""

import importlib
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import ALGORITHMS
from rl_jax.algorithms.value import value_loss
from rl_jax.learner.batch import Batch, pack, with_advantages
from rl_jax.learner.microbatches import microbatches
from rl_jax.learner.rows import Rows
from rl_jax.learner.step import accumulate, loss_inputs
from rl_jax.mesh import TRAIN_RULES, make_mesh
from rl_jax.models.decoder import build_model
from rl_jax.models.value import BIAS, WEIGHT, value_model
from rl_jax.settings import AlgorithmSettings, KlSettings, LearnerSettings, ModelSettings
from rl_jax.testing.trajectories import fake_group
from tests.algorithms.test_common import following

VOCAB, NUM, ROW = 32, 64, 16
MODEL = ModelSettings(
    num_layers=1, embed_size=8, num_heads=2, num_kv_heads=2, head_dim=4, mlp_size=8
)
SETTINGS = LearnerSettings(row_tokens=ROW, microbatch_rows=NUM, logprob_chunk=NUM * ROW)
FAST = {"xla_backend_optimization_level": 0}
PER_ALGORITHM = ("advantages", "loss_weights", "selected")
NAMES = tuple(ALGORITHMS)


@cache
def algorithms():
    """Every entry of the table, with the terms that its options can add."""
    made = []
    for name, entry in ALGORITHMS.items():
        module, attribute = entry.target.split(":")
        extra = {"entropy_coef": 0.01, "kl": KlSettings(coef=0.1)} if entry.policy else {}
        settings = AlgorithmSettings(name=name, **extra)
        made.append(getattr(importlib.import_module(module), attribute)(settings))
    return tuple(made)


@cache
def groups():
    """16 groups of 4, of 5 to 8 tokens, with log-probs that a fresh model's are near to."""
    rng, out = np.random.default_rng(0), []
    for g in range(NUM // 4):
        group = fake_group(g, rng.normal(size=4).tolist(), rng.integers(5, 9, 4).tolist())
        members = tuple(
            replace(
                t,
                tokens=(8 + t.tokens % (VOCAB - 8)).astype(np.int32),
                logprobs=np.where(
                    t.loss_mask, rng.normal(-np.log(VOCAB), 0.3, len(t.tokens)), 0.0
                ).astype(np.float32),
            )
            for t in group.trajectories
        )
        out.append(replace(group, trajectories=members))
    return out


@cache
def batches(is_packed: bool) -> tuple[Batch, ...]:
    """The 64 trajectories with the advantages and weights of each algorithm, and all extras."""
    if is_packed:
        batch = pack(groups(), SETTINGS)
        assert batch.num_rows <= NUM / 2
    else:
        alone = pack(groups(), replace(SETTINGS, row_tokens=8))
        assert alone.num_rows == NUM
        wide = {
            n: np.pad(a, ((0, 0), (0, ROW - 8))) for n, a in vars(alone).items() if np.ndim(a) == 2
        }
        batch = replace(alone, **wide)
    members = [t for group in groups() for t in group.trajectories]
    extras = {
        name: batch.place([t.logprobs * np.float32(scale) for t in members], np.float32)
        for name, scale in (
            ("old_logprobs", 0.95), ("reference_logprobs", 1.1), ("teacher_logprobs", 0.8), ("values", 0.1),
            ("rewards", 0.3), ("sum_squares", -0.01), ("selected", 0.0),
            ("teacher_divergence", -0.2),
        )
    }  # fmt: skip
    out = [with_advantages(batch, groups(), extras, a, None, a.settings)[0] for a in algorithms()]
    assert all((b.targets_mask == out[0].targets_mask).all() for b in out)
    return tuple(out)


def spread(batch: Batch, num_microbatches: int) -> Batch:
    """The batch with its rows in equal parts at the start of each microbatch, the rest of it empty."""

    def rows(array: np.ndarray) -> np.ndarray:
        out = np.zeros((num_microbatches, NUM, ROW), array.dtype)
        for part, own in zip(out, np.array_split(array, num_microbatches), strict=True):
            part[: len(own)] = own
        return out.reshape(-1, ROW)

    arrays = {name: rows(a) for name, a in vars(batch).items() if np.ndim(a) == 2}
    return replace(batch, **arrays, extras={n: rows(a) for n, a in batch.extras.items()})


def device_form(batch: Batch):
    return microbatches(batch, 0, capacity=8, microbatch_rows=NUM, chunk=ROW)


def cotangents(logprobs, entropy, values, batch, own):
    """d loss / d (log-probs, entropies) of each algorithm, [A, M, R, K] each; d loss / d values of the critic."""

    def of(algorithm, mine):
        def one(micro):
            logp, ent, micro = micro

            def loss(logp, ent):
                x = following(loss_inputs(micro, logp, ent), logp)
                out = algorithm.token_loss(x)[0]
                return jnp.where(micro["target_mask"], micro["loss_weights"] * out, 0.0).sum()

            return jax.grad(loss, argnums=(0, 1))(logp, ent)

        return jax.lax.map(one, (logprobs, entropy, batch | mine))

    def squared(values):
        mask, weights = batch["target_mask"], own["loss_weights"][NAMES.index("ppo")]
        loss = value_loss(values, batch["values"], batch["returns"], mask, clip=0.2)
        return jnp.where(mask, weights * loss, 0.0).sum()

    found = [
        of(algorithm, {name: array[i] for name, array in own.items()})
        for i, algorithm in enumerate(algorithms())
    ]
    return *(jnp.stack(c) for c in zip(*found)), jax.grad(squared)(values)


COTANGENTS = jax.jit(cotangents, compiler_options=FAST)


@cache
def weights():
    """Of the policy, and of a critic on the same trunk with a head that says something."""
    params = jax.device_get(jax.jit(build_model(MODEL, VOCAB).init)(jax.random.key(0)))
    head = np.linspace(-1, 1, MODEL.embed_size, dtype=np.float32)
    return params, {**params, WEIGHT: head, BIAS: head[0]}


class Layout:
    """One mesh, its two programs and the weights on it."""

    def __init__(self, data: int, tensor: int):
        mesh = make_mesh({"data": data, "tensor": tensor}, jax.devices()[: data * tensor])
        model, critic = build_model(MODEL, VOCAB), value_model(build_model, MODEL, VOCAB)
        self.rows, values = (
            Rows(m, mesh, TRAIN_RULES, SETTINGS, max_rows=8 * NUM) for m in (model, critic)
        )
        self.params = tuple(rows.place(w) for rows, w in zip((self.rows, values), weights()))
        policy, value = self.rows.log_probs(0.9), values.values()

        def forwards(params, batch):
            def one(micro):
                return *policy(params[0], micro), value.score(params[1], micro)

            shapes = {n: a for n, a in batch.items() if n != "num_microbatches"}
            return jax.lax.map(one, shapes)

        def pulled(params, batch, of_logp, of_entropy, of_values):
            def policy_part(params, micro):
                logp, entropy = policy(params, micro)
                return (micro["logp"] * logp + micro["ent"] * entropy).sum(), ({}, logp)

            def value_part(params, micro):
                values = value.score(params, micro)
                return (micro["val"] * values).sum(), ({}, values)

            def of(logp, ent):
                return accumulate(policy_part, params[0], batch | {"logp": logp, "ent": ent})

            critic = accumulate(value_part, params[1], batch | {"val": of_values})
            return jax.vmap(of)(of_logp, of_entropy)["grads"], critic["grads"]

        self._forwards, self._pulled = (
            jax.jit(f, compiler_options=FAST) for f in (forwards, pulled)
        )

    def gradients(self, num_microbatches: int, is_packed: bool):
        """{algorithm or "critic": {weight: gradient}}"""
        each = [spread(batch, num_microbatches) for batch in batches(is_packed)]
        ppo = each[NAMES.index("ppo")]  # it has all extras, returns too
        there, here = self.rows.put(ppo, 0), device_form(ppo)
        del here["num_microbatches"], here["num_chunks"]
        own = {n: np.stack([device_form(batch)[n] for batch in each]) for n in PER_ALGORITHM}
        computed = jax.device_get(self._forwards(self.params, there))
        slopes = jax.device_get(COTANGENTS(*computed, here, own))
        of_all, of_critic = jax.device_get(self._pulled(self.params, there, *slopes))
        found = {name: {n: g[i] for n, g in of_all.items()} for i, name in enumerate(NAMES)}
        return found | {"critic": of_critic}


@cache
def layout(data: int, tensor: int) -> Layout:
    return Layout(data, tensor)


@cache
def reference():
    """One device, one microbatch, a trajectory a row."""
    return layout(1, 1).gradients(1, False)


def check(data: int, tensor: int) -> None:
    want = reference()
    for num_microbatches in (1, 2, 8):
        for is_packed in (False, True):
            got = layout(data, tensor).gradients(num_microbatches, is_packed)
            assert got.keys() == want.keys()
            for name, gradient in want.items():
                for weight, value in gradient.items():
                    where = f"{name} {weight}: {data=} {tensor=} {num_microbatches=} {is_packed=}"
                    scale = max(1.0, np.abs(value).max())
                    np.testing.assert_allclose(
                        got[name][weight], value, rtol=0, atol=1e-5 * scale, err_msg=where
                    )


@pytest.mark.slow
def test_every_loss_has_a_gradient_to_compare():
    want = reference()
    assert set(want) == {*ALGORITHMS, "critic"}
    for name, gradient in want.items():
        assert max(np.abs(g).max() for g in gradient.values()) > 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (4, 2)])
def test_every_loss_has_one_gradient_in_every_layout(data, tensor):
    check(data, tensor)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_every_loss_has_one_gradient_in_more_layouts(data, tensor):
    check(data, tensor)
