"""What rows train, against plain forwards with the loss written out: sft packed and not, dpo and rm in any layout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_jax.algorithms.dpo import Dpo
from rl_jax.algorithms.preference import Side, pair_loss
from rl_jax.algorithms.rm import Rm
from rl_jax.algorithms.sft import Sft
from rl_jax.data.examples import ExampleRules, make_example
from rl_jax.data.rows import Row
from rl_jax.learner.batch import pack, with_advantages
from rl_jax.learner.learner import Learner
from rl_jax.learner.reward_model import RewardModel
from rl_jax.learner.scorer import FrozenPolicy, Remembered
from rl_jax.mesh import TRAIN_RULES, make_mesh
from rl_jax.models.attention import attention, causal_segment_mask
from rl_jax.models.decoder import build_model
from rl_jax.models.value import BIAS, WEIGHT, value_model
from rl_jax.settings import AlgorithmSettings, LearnerSettings
from rl_jax.testing.tiny_model import TINY_VOCAB, tiny_model, tiny_settings
from rl_jax.tokens import ByteTokenizer, ChatRenderer
from rl_jax.types import Message

RENDERER = ChatRenderer(ByteTokenizer())
SMALL = {"num_layers": 1, "embed_size": 16, "num_heads": 2, "num_kv_heads": 2, "mlp_size": 32}
# Two rows a microbatch over two shards: the members of a pair, which are longer than half a row, never lie together.
SETTINGS = LearnerSettings(row_tokens=24, microbatch_rows=2, logprob_chunk=16, grad_clip=1e9)
ASK = Message("user", "ask")
ANSWERS = [("yes it is", "no"), ("maybe", "not at all"), ("y", "never never")]


def groups_of(kind):
    rows = [
        Row(tuple((ASK, Message("assistant", text)) for text in pair), 1)
        if kind != "chat"
        else Row(((ASK, Message("assistant", pair[0])),), 1)
        for pair in ANSWERS
    ]
    rules = ExampleRules(kind, "all", SETTINGS.row_tokens)
    return [make_example(row, i, RENDERER, rules).group for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def policy():
    return tiny_model(**SMALL)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 2}, jax.devices()[:2])


def learner_of(model, mesh, algorithm):
    return Learner(
        model, mesh, TRAIN_RULES, algorithm, SETTINGS, max_rows=6, temperature=1.0, total_steps=9
    )


def padded(groups, side=None):
    """(tokens i32[S, T], mask bool[S, T]) of the members, or of one side of each pair."""
    members = [t for g in groups for t in g.trajectories]
    members = members if side is None else members[side::2]
    width = SETTINGS.row_tokens
    tokens = np.array([np.pad(t.tokens, (0, width - len(t.tokens))) for t in members])
    return tokens, np.array([np.pad(t.loss_mask, (0, width - len(t.tokens))) for t in members])


def hidden(model, params, tokens):
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    visible = causal_segment_mask(positions, positions, *[np.ones_like(tokens)] * 2)
    return model.hidden(params, tokens, positions, lambda _, q, k, v: attention(q, k, v, visible))


def logprobs(model, params, tokens):
    """f32[S, T], of the token at t."""
    table = jax.nn.log_softmax(model.logits(params, hidden(model, params, tokens)))[:, :-1]
    found = jnp.take_along_axis(table, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(found, ((0, 0), (1, 0)))


def batch_of(trained, groups, extras=None):
    algorithm = trained.algorithm
    batch = pack(groups, SETTINGS, trained.rows.balance)
    extras = extras(batch) if extras else {}
    batch, _ = with_advantages(batch, groups, extras, algorithm, None, algorithm.settings)
    per_member = {n: batch.gather(a, sum(len(g.trajectories) for g in groups)) for n, a in extras.items()}  # fmt: skip
    return batch, per_member


def gradient_after(trained, batch):
    """Of one step, from Adam's first moment; the state is used up."""
    trained.step(batch)
    moments = optax.tree_utils.tree_get(trained.state.opt_state, "mu")
    return {n: np.asarray(m) / (1 - SETTINGS.adam_b1) for n, m in jax.device_get(moments).items()}


def assert_close(got, want):
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=2e-6, rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_sft_loss_is_the_mean_over_assistant_tokens_packed_or_not(policy, mesh):
    model, params = policy
    learner, groups = learner_of(model, mesh, Sft(AlgorithmSettings(name="sft"))), groups_of("chat")
    tokens, mask = padded(groups)
    lp = np.asarray(jax.jit(lambda p: logprobs(model, p, tokens))(params))
    want = -lp[mask].mean()
    batch, _ = batch_of(learner, groups)
    learner.reset(params)
    assert learner.step(batch)["policy/loss"].mean == pytest.approx(want, rel=1e-5)
    alone = []
    for group in groups:  # one row each, nothing beside it
        learner.reset(params)
        alone.append(learner.step(batch_of(learner, [group])[0])["policy/loss"].mean)
    counts = mask.sum(axis=1)
    assert np.dot(alone, counts) / counts.sum() == pytest.approx(want, rel=1e-5)
    learner.reset(params)
    extras = learner.score(batch, {"old_logprobs"})
    found = learner.algorithm.measure(groups, {n: batch.gather(a, 3) for n, a in extras.items()})
    assert found["sft/loss"].mean == pytest.approx(want, rel=1e-5)
    assert found["sft/loss"].count == counts.sum()


@pytest.mark.slow
def test_dpo_of_rows_is_the_pair_loss_and_its_gradient_though_pairs_are_split(policy, mesh):
    model, params = policy
    algorithm = Dpo(AlgorithmSettings(name="dpo", beta=0.3))
    learner, groups = learner_of(model, mesh, algorithm), groups_of("pairs")
    frozen = jax.jit(model.init)(jax.random.key(5))
    reference = Remembered(FrozenPolicy(learner.scorer, frozen))
    sides = [padded(groups, side) for side in (0, 1)]
    refs = [np.asarray(logprobs(model, frozen, tokens)) for tokens, _ in sides]

    def loss(params):
        up, down = (
            Side(logprobs(model, params, tokens), ref, mask)
            for (tokens, mask), ref in zip(sides, refs)
        )
        out = pair_loss(up, down, beta=0.3)
        return out.loss.mean(), out.margin

    (want, margin), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    learner.reset(params)

    def extras(batch):
        return {
            **learner.score(batch, {"old_logprobs"}),
            "reference_logprobs": reference.score(batch),
        }

    reference.score(pack(groups, SETTINGS))  # another layout: a row is known by what it says
    reference.close()
    batch, per_member = batch_of(learner, groups, extras)
    rows = dict(zip(batch.trajectory_ids.tolist(), batch.rows.tolist()))
    assert any(rows[2 * i] != rows[2 * i + 1] for i in range(3))
    found = algorithm.measure(groups, per_member)
    assert found["preference/loss"].mean == pytest.approx(float(want), rel=1e-4)
    assert found["preference/margin"].mean == pytest.approx(float(margin.mean()), rel=1e-4)
    assert_close(gradient_after(learner, batch), gradient)
    with pytest.raises(RuntimeError, match="a row is new after all were scored"):
        reference.score(pack(groups_of("ends"), SETTINGS))  # other tokens of them are trained


@pytest.mark.slow
def test_rm_has_the_gradient_of_bradley_terry_on_last_tokens(mesh):
    model = value_model(build_model, tiny_settings(**SMALL), TINY_VOCAB)
    algorithm = Rm(AlgorithmSettings(name="rm", center_coef=0.1))
    trained = RewardModel(model, mesh, TRAIN_RULES, algorithm, SETTINGS, max_rows=6, total_steps=9)
    groups = groups_of("ends")
    params = jax.jit(model.init)(jax.random.key(0))
    params |= {WEIGHT: jax.random.normal(jax.random.key(1), (16,)), BIAS: jnp.float32(0.3)}
    sides = [padded(groups, side) for side in (0, 1)]

    def loss(params):
        up, down = (
            jnp.where(mask, model.values(params, hidden(model, params, tokens)), 0.0).sum(axis=1)
            for tokens, mask in sides
        )
        pairs = -jax.nn.log_sigmoid(up - down) + 0.1 * jnp.square(up + down)
        return pairs.mean(), (up > down).mean()

    (want, accuracy), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    trained.reset(params)
    batch, per_member = batch_of(trained, groups, lambda batch: trained.score(batch, {"rewards"}))
    found = algorithm.measure(groups, per_member)
    assert found["preference/loss"].mean == pytest.approx(float(want), rel=1e-4)
    assert found["preference/accuracy"].mean == pytest.approx(float(accuracy))
    assert_close(gradient_after(trained, batch), gradient)
