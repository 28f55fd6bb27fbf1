"""Critic, reference and teacher beside the policy: what they compute, what they cost, what a bad batch does to them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rl_jax.algorithms.ppo import Ppo
from rl_jax.algorithms.rm import Rm
from rl_jax.learner.batch import empty_batch, pack, with_advantages
from rl_jax.learner.critic import Critic
from rl_jax.learner.learner import Learner
from rl_jax.learner.reward_model import RewardModel
from rl_jax.learner.roles import Roles
from rl_jax.learner.rows import Rows
from rl_jax.learner.scorer import FrozenPolicy, Scorer
from rl_jax.learner.trained import NonFiniteError, state_bytes
from rl_jax.mesh import TRAIN_RULES, make_mesh
from rl_jax.models.decoder import build_model
from rl_jax.models.value import BIAS, WEIGHT, value_model
from rl_jax.settings import AlgorithmSettings, LearnerSettings
from rl_jax.testing.tiny_model import TINY_VOCAB, tiny_model
from rl_jax.testing.trajectories import fake_group

SETTINGS = LearnerSettings(
    row_tokens=24, microbatch_rows=2, logprob_chunk=16, learning_rate=0.02, max_skipped=2
)
ONE = make_mesh({}, jax.devices()[:1])
SIZE = {"max_rows": 8, "total_steps": 10}
PPO = AlgorithmSettings(name="ppo", gamma=0.9, lam=0.8)


def groups_of(num=2):
    return [fake_group(g, [0.0, 1.0, -1.0], [12, 20, 9]) for g in range(num)]


@pytest.fixture(scope="module")
def model_and_params():
    return tiny_model(num_layers=1, embed_size=16, num_heads=2, num_kv_heads=2, mlp_size=32)


@pytest.fixture(scope="module")
def learner(model_and_params):
    return Learner(
        model_and_params[0], ONE, TRAIN_RULES, Ppo(PPO), SETTINGS, temperature=1.0, **SIZE
    )


@pytest.fixture(scope="module")
def critic_program(model_and_params, tmp_path_factory):
    model = value_model(build_model, model_and_params[0].settings, TINY_VOCAB)
    return Critic(
        model, ONE, TRAIN_RULES, SETTINGS,
        value_clip=0.2, dump_dir=tmp_path_factory.mktemp("dump"), **SIZE,
    )  # fmt: skip


@pytest.fixture
def roles(learner, critic_program, model_and_params):
    learner.reset(model_and_params[1])
    critic_program.start(model_and_params[1])
    return Roles(learner, critic_program)


def batch_for(roles, groups):
    batch = pack(groups, SETTINGS)
    algorithm = roles.policy.algorithm
    extras = roles.score(batch, algorithm.needs)
    return with_advantages(batch, groups, extras, algorithm, None, algorithm.settings)[0]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.slow
def test_programs_lowered_from_shapes_are_those_that_a_step_runs(roles):
    live = len(jax.live_arrays())
    lowered = dict(roles.lower(empty_batch(SETTINGS, roles.policy.algorithm.needs)))
    assert len(jax.live_arrays()) == live
    assert list(lowered) == ["critic's values", "critic step", "policy step"]
    batch = batch_for(roles, groups_of())
    arrays = roles.policy.rows.put(batch, 3)
    bare = {name: x for name, x in arrays.items() if name not in batch.extras}
    ran = {
        "critic's values": roles.critic.scorer._run.lower(roles.critic.params, bare),
        "critic step": roles.critic._step.lower(roles.critic.state, arrays),
        "policy step": roles.policy._step.lower(roles.policy.state, arrays),
    }
    for name, program in lowered.items():
        assert program.as_text() == ran[name].as_text(), name


def test_bytes_of_a_state_are_counted_from_shapes(roles):
    for role in (roles.policy, roles.critic):
        held = sum(x.nbytes for x in jax.tree.leaves(role.state))
        assert state_bytes(role.rows.model, SETTINGS) == held


def test_frozen_policy_is_lowered_for_the_weights_it_holds(learner, model_and_params):
    model = replace(
        model_and_params[0], settings=replace(model_and_params[0].settings, dtype="bfloat16")
    )
    rows = Rows(model, ONE, TRAIN_RULES, SETTINGS, max_rows=8)
    held = rows.cast(model_and_params[1])
    for name, x in rows.abstract_cast().items():
        assert (x.shape, x.dtype) == (held[name].shape, held[name].dtype) and x.dtype == "bfloat16"
        assert x.sharding.is_equivalent_to(held[name].sharding, x.ndim)


# --- frozen policies ---


@pytest.mark.slow
def test_frozen_policy_scores_as_the_learner_does_by_its_program_and_on_another_mesh(
    learner, model_and_params
):
    model, params = model_and_params
    learner.reset(params)
    batch = pack(groups_of(), SETTINGS)
    want = learner.score(batch, {"old_logprobs"})["old_logprobs"]
    here = FrozenPolicy(learner.scorer, params)
    np.testing.assert_array_equal(here.score(batch), want)
    assert learner.scorer._run._cache_size() == 1  # one program for both

    pool = make_mesh({"data": 2}, jax.devices()[4:6])
    rows = Rows(model, pool, TRAIN_RULES, SETTINGS, max_rows=8)
    there = FrozenPolicy(Scorer(rows, rows.log_probs(1.0)), params)
    np.testing.assert_allclose(there.score(batch), want, atol=1e-5)
    roles = Roles(learner, frozen={"reference_logprobs": here, "teacher_logprobs": there})
    scored = roles.score(batch, {"teacher_logprobs", "old_logprobs"})
    assert set(scored) == {"teacher_logprobs", "old_logprobs"}  # the other is not computed
    with pytest.raises(ValueError, match="needs values; this learner computes old_logprobs"):
        roles.score(batch, {"values"})


@pytest.mark.slow
def test_frozen_policy_keeps_its_weights_while_the_learner_moves(learner, model_and_params):
    learner.reset(model_and_params[1])
    reference = FrozenPolicy(learner.scorer, learner.params)
    groups = groups_of()
    batch = pack(groups, SETTINGS)
    before = reference.score(batch)
    extras = {"values": np.zeros(batch.tokens.shape, np.float32)}
    learner.step(with_advantages(batch, groups, extras, learner.algorithm, None, PPO)[0])
    np.testing.assert_array_equal(reference.score(batch), before)
    assert np.abs(learner.score(batch, {"old_logprobs"})["old_logprobs"] - before).max() > 1e-3


@pytest.mark.slow
def test_frozen_reward_model_says_what_it_said_in_training_on_this_mesh_and_another(
    model_and_params,
):
    """Of whole rows, read at each trajectory's last sampled token; the policy's learner asks it by name."""
    model = value_model(build_model, model_and_params[0].settings, TINY_VOCAB)
    rm = RewardModel(model, ONE, TRAIN_RULES, Rm(AlgorithmSettings(name="rm")), SETTINGS, **SIZE)
    head = np.linspace(-1, 1, 16, dtype=np.float32)
    rm.reset({**model.from_policy(model_and_params[1]), WEIGHT: head, BIAS: np.float32(0.25)})
    groups = groups_of()
    batch = pack(groups, SETTINGS)
    want = rm.score(batch, {"rewards"})["rewards"]
    for mesh in (ONE, make_mesh({"data": 2}, jax.devices()[4:6])):
        rows = Rows(model, mesh, TRAIN_RULES, SETTINGS, max_rows=8)
        frozen = FrozenPolicy(Scorer(rows, rows.values(lookback=0)), rm.params)
        roles = Roles(SimpleNamespace(score=lambda *_: {}), frozen={"reward_scores": frozen})
        scored = roles.score(batch, {"reward_scores"})["reward_scores"]
        np.testing.assert_allclose(scored, want, atol=1e-5)
    ends = [values[-1] for _, values in batch.trained(want)]
    found = batch.gather(want, 6)
    members = [t for g in groups for t in g.trajectories]
    said = {i: found[i][members[i].loss_mask][-1] for i in batch.trajectory_ids.tolist()}
    assert ends == pytest.approx(list(said.values())) and len(set(ends)) == 6


# --- the critic ---


@pytest.mark.slow
def test_critic_learns_the_returns_and_says_how_well(roles):
    groups = groups_of()
    first = roles.step(batch_for(roles, groups))
    assert first["critic/value"].mean == 0.0 and first["critic/explained_variance"].mean == 0.0
    assert first["critic/learning_rate"].mean == pytest.approx(0.02)
    for _ in range(12):
        batch = batch_for(roles, groups)
        last = roles.critic.step(batch)
    assert last["critic/loss"].mean < 0.3 * first["critic/loss"].mean
    assert last["critic/explained_variance"].mean > 0.6
    members = [t for g in groups for t in g.trajectories]
    returns = batch.gather(batch.extras["returns"], len(members))
    for values, member in zip(returns, members, strict=True):
        assert values[member.loss_mask][-1] == pytest.approx(member.reward.value)
        assert not values[~member.loss_mask].any()


@pytest.mark.slow
def test_more_updates_on_a_batch_go_further_until_the_clip_holds_them(roles, monkeypatch):
    batch = batch_for(roles, groups_of())
    roles.critic.step(batch)
    once = np.abs(roles.critic.score(batch)).max()
    roles.critic.start(roles.params)
    monkeypatch.setattr(roles.critic, "updates", 8)
    metrics = roles.critic.step(batch)
    assert np.abs(roles.critic.score(batch)).max() > 2 * once
    assert metrics["critic/clip_frac"].mean > 0 and metrics["critic/value"].mean == 0.0
    assert metrics["critic/skipped"].count == 8 and roles.critic.num_batches == 1


def test_head_start_moves_the_critic_alone_and_counts_the_batch(roles, model_and_params):
    roles = replace(roles, head_start=1)
    batch = batch_for(roles, groups_of())
    metrics = roles.step(batch)
    assert same(jax.device_get(roles.params), jax.device_get(model_and_params[1]))
    assert "policy/loss" not in metrics and metrics["batch/trained_tokens"].mean > 0
    state = jax.device_get(roles.state)
    assert (state.step, state.skipped, state.critic.step, state.critic.skipped) == (1, 1, 1, 0)
    metrics = roles.step(batch)
    assert not same(jax.device_get(roles.params), jax.device_get(model_and_params[1]))
    assert metrics["policy/loss"].count == metrics["critic/loss"].count == 1
    assert roles.policy._step._cache_size() == 1  # the pause compiled nothing anew


def test_state_with_a_critic_goes_on_as_if_nothing_had_happened(roles):
    batch = batch_for(roles, groups_of())
    roles.step(batch)
    saved = jax.device_get(roles.state)
    assert jax.tree.structure(roles.abstract_state()) == jax.tree.structure(saved)
    assert jax.tree.structure(roles.abstract_state(has_critic=False)) == jax.tree.structure(
        replace(saved, critic=None)
    )
    roles.step(batch)
    want = jax.device_get(roles.state)
    roles.load(saved)
    roles.step(batch)
    assert same(jax.device_get(roles.state), want)


def test_nonfinite_critic_update_is_skipped_counted_dumped_and_stops_the_run_at_its_limit(roles):
    batch = batch_for(roles, groups_of())
    bad = np.where(batch.targets_mask, np.float32(np.nan), 0)
    bad = replace(batch, extras={**batch.extras, "returns": bad})
    before = jax.device_get(roles.critic.state)
    metrics = roles.critic.step(bad, version=3)
    assert metrics["critic/skipped"].mean == 1.0
    assert same(jax.device_get(roles.critic.params), before.params)
    with np.load(roles.critic._dump_dir / "nonfinite_critic_step_4.npz") as dump:
        assert np.isnan(dump["returns"]).any()
    with pytest.raises(NonFiniteError, match=r"critic loss nan.*lower critic\.learning_rate"):
        roles.critic.step(bad, version=4)
