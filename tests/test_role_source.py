"""Which checkpoint a role means, and which roles of a config are refused."""

import json
from dataclasses import replace

import pytest

from rl_jax import schema
from rl_jax.config import ConfigError, parse
from rl_jax.role_source import find_source, role_errors, vocabulary_error
from rl_jax.settings import (
    AlgorithmSettings,
    CriticSettings,
    FrozenSettings,
    KlSettings,
    MeshSettings,
    ModelSettings,
    PoolSettings,
    Settings,
)

PPO = Settings(algorithm=AlgorithmSettings(name="ppo"))
KL = Settings(algorithm=AlgorithmSettings(kl=KlSettings(coef=0.1)))
OPD = Settings(algorithm=AlgorithmSettings(name="opd"))
MIXED = Settings(algorithm=AlgorithmSettings(name="opd_mixed"))
WITHOUT = Settings(algorithm=AlgorithmSettings(name="opd_mixed", teacher_coef=0.0))
SCORED = Settings(algorithm=AlgorithmSettings(reward_model_coef=0.5))
POOLS = MeshSettings("apart", (PoolSettings(), PoolSettings("judge", "role", 2, axes={"fsdp": 2})))


@pytest.fixture
def teacher(tmp_path):
    """What a run of a wider model leaves: its config, and two checkpoints."""
    run = tmp_path / "teacher"
    for step in (2, 10):
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
    settings = replace(Settings(), model=ModelSettings(embed_size=128))
    (run / "config.json").write_text(json.dumps({**schema.to_tree(settings), "run_id": "t"}))
    return run


def test_a_run_means_its_last_checkpoint_and_brings_its_own_model(teacher):
    own = ModelSettings()
    source = find_source("teacher", str(teacher), own)
    assert source.checkpoint.name == "step_10" and source.model.embed_size == 128
    named = find_source("teacher", str(teacher / "checkpoints" / "step_2"), own)
    assert named.checkpoint.name == "step_2" and named.model == source.model
    (teacher / "config.json").unlink()
    assert find_source("teacher", str(teacher), own).model == own


def test_a_role_that_cannot_score_the_policys_tokens_is_refused(teacher):
    own = ModelSettings(tokenizer="my.pkg:Tokenizer")
    with pytest.raises(ValueError, match="model.tokenizer=, the policy my.pkg:Tokenizer"):
        find_source("teacher", str(teacher), own)
    with pytest.raises(ValueError, match="reference.checkpoint=nowhere has no checkpoint; give a"):
        find_source("reference", "nowhere", own)
    (teacher / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        find_source("teacher", str(teacher), own)
    small, large = ModelSettings(vocab_size=264), ModelSettings(vocab_size=300)
    assert "a vocabulary of 264, the policy of 300" in vocabulary_error(
        "teacher", small, large, 264
    )
    assert vocabulary_error("teacher", large, small, 264) == ""
    assert vocabulary_error("teacher", ModelSettings(), small, 264) == ""


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (OPD, "algorithm.name=opd needs a teacher; set teacher.checkpoint"),
        (MIXED, "algorithm.teacher_coef=1.0 needs a teacher; set teacher.checkpoint"),
        (replace(WITHOUT, teacher=FrozenSettings("x")), "(algorithm.teacher_coef above 0 does, and opd, and distill)"),
        (replace(OPD, teacher=FrozenSettings("nowhere")), "teacher.checkpoint=nowhere has no checkpoint"),
        (replace(KL, reference=FrozenSettings(pool="judge")), "judge is no pool of kind role of mesh one_device"),
        (replace(KL, mesh=POOLS), "mesh pool judge is of kind role and no role is on it"),
        (replace(PPO, critic=CriticSettings(head_start=100)), "critic.head_start=100 leaves nothing of steps=100"),
        (replace(PPO, critic=CriticSettings(warmup_steps=201)), "critic.warmup_steps=201 is beyond the critic's 200"),
        (replace(PPO, critic=CriticSettings(updates=1, value_clip=0.5)), "has no effect while critic.updates is 1"),
        (SCORED, "algorithm.reward_model_coef=0.5 needs a reward model; set reward_model.checkpoint"),
        (replace(PPO, reward_model=FrozenSettings("x")), "needs a reward_model (algorithm.reward_model_coef above 0"),
        (replace(KL, critic=CriticSettings(head_start=3)), "critic.head_start=3 is not read: no option of algorithm"),
        (
            replace(
                PPO, mesh=POOLS, critic=CriticSettings(pool="judge"),
                model=ModelSettings(embed_size=33, num_heads=1, num_kv_heads=1),
            ),
            "critic: mesh pool judge: fsdp=2 does not divide model.embed_size=33",
        ),
    ],
)  # fmt: skip
def test_roles_that_cannot_be_are_one_line(settings, line):
    errors = list(role_errors(settings))
    assert any(line in error for error in errors), errors
    assert len(errors) == 1


def test_a_policy_gives_no_score_and_a_reward_model_no_log_probs(teacher):
    (error,) = role_errors(replace(SCORED, reward_model=FrozenSettings(str(teacher))))
    assert f"reward_model.checkpoint={teacher} was trained by grpo, not by rm" in error
    stored = json.loads((teacher / "config.json").read_text())
    stored["algorithm"]["name"] = "rm"
    (teacher / "config.json").write_text(json.dumps(stored))
    assert list(role_errors(replace(SCORED, reward_model=FrozenSettings(str(teacher))))) == []
    (error,) = role_errors(replace(OPD, teacher=FrozenSettings(str(teacher))))
    assert f"teacher.checkpoint={teacher} is a reward model" in error


def test_a_teacher_that_does_not_fit_its_pool_is_refused_before_anything_is_built(teacher):
    mesh = replace(
        POOLS, pools=(POOLS.pools[0], PoolSettings("judge", "role", 3, axes={"tensor": 3}))
    )
    settings = replace(OPD, mesh=mesh, teacher=FrozenSettings(str(teacher), "judge"))
    error, *_ = role_errors(settings)
    assert error.startswith("teacher: mesh pool judge: tensor=3 does not divide")


def test_evaluation_needs_no_role():
    words = ["--config.algorithm.name=opd", "--config.teacher.checkpoint=gone"]
    assert parse(["--mode=eval", *words]).settings.teacher.checkpoint == "gone"
    with pytest.raises(ConfigError, match="teacher.checkpoint=gone has no checkpoint"):
        parse(words)


def test_roles_that_are_needed_pass(teacher):
    for settings in (
        PPO, KL, replace(OPD, teacher=FrozenSettings(str(teacher))), WITHOUT,
        replace(MIXED, teacher=FrozenSettings(str(teacher))),
        replace(KL, mesh=POOLS, reference=FrozenSettings(str(teacher), "judge")),
    ):  # fmt: skip
        assert list(role_errors(settings)) == []
    assert parse(["--config.algorithm.name=ppo", "--config.critic.head_start=5"]).settings.critic
