"""The rollout on real worker processes and the real task stream; only the sampler is a fake."""

from dataclasses import replace

import numpy as np
import pytest

from rl_jax.ledger import Ledger
from rl_jax.rollout.buffer import SampleBuffer
from rl_jax.rollout.rollout import Rollout
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.rollout.tasks import TaskStream
from rl_jax.rollout.worker import EnvPool
from rl_jax.settings import EvalSettings, RewardSettings, TaskSource
from rl_jax.testing.fake_sampler import FakeSampler
from tests.rollout.doubles import RENDERER, SETTINGS, echo_script

ECHO = TaskSource("echo", "rl_jax.testing.envs:EchoEnv")


def play(tmp_path, sources, settings, num_steps):
    """The driver's loop over `sources`; returns (batches, counts, the rollout's evaluation of echo)."""
    pool = EnvPool(sources, settings, RewardSettings(timeout_s=1.0))
    pool.prepare()
    tags = [source.tag for source in sources]
    stream = TaskStream({tag: pool.list_tasks(tag, "train") for tag in tags}, seed=0)
    ledger = Ledger(tmp_path / "ledger.jsonl", "r")
    buffer = SampleBuffer(settings, ledger, tags)
    sampler = FakeSampler(script=echo_script)
    rollout = Rollout(
        sampler, stream, pool, RENDERER, buffer, ledger, TrajectoryScheduler(), settings,
        run_id="r", seed=0, context=256,
    )  # fmt: skip
    try:
        rollout.start()
        rollout.published(0)
        batches = []
        for step in range(1, num_steps + 1):
            rollout.want(step, settings.batch_groups)
            batches.append(buffer.take(step))
            rollout.consumed(step, batches[-1])
            sampler.publish(step)
            rollout.published(step)
            rollout.check()
        result = rollout.evaluate("eval", pool.list_tasks("echo", "eval")[:4], EvalSettings())
        scripted = rollout.scripted(pool.list_tasks("echo", "train"), 16, 1.0)
        rollout.drain()
        counts = rollout.counts()
    finally:
        rollout.close()
    ledger.check(in_flight=0)
    ledger.close()
    assert pool.num_live == 0
    return batches, counts, result, scripted


@pytest.mark.slow
def test_two_tags_scored_by_environment_and_by_scorer(tmp_path):
    word = TaskSource("word", "rl_jax.testing.envs:EchoEnv", "exact_match", config={"turns": 1})
    settings = replace(SETTINGS, max_staleness=1)
    batches, counts, result, scripted = play(tmp_path, [ECHO, word], settings, 2)
    for groups in batches:
        by_tag = {g.tag: g for g in groups}
        assert {t.reward.value for t in by_tag["echo"].trajectories} == {2.0}
        rewards = [t.reward for t in by_tag["word"].trajectories]
        assert {(r.value, r.status) for r in rewards} == {(1.0, "scored")}
        assert rewards[0].parts == {"exact_match": 1.0, "env": 1.0}
    assert result.num_episodes == 4 and result.mean_reward == 2.0 and result.success == 0.0
    assert counts["episodes/errored"] == 0
    for group in scripted:
        assert group.trajectories[0].reward.value == 2.0


@pytest.mark.slow
def test_hanging_environment_costs_its_own_group_only(tmp_path):
    """Fault 1: step hangs; the worker is killed at step_timeout_s, its other episodes are issued again."""
    bad = TaskSource(
        "bad",
        "rl_jax.testing.envs:MisbehavingEnv",
        config={"fault": "hang", "every": 8, "num_tasks": 8},
    )
    settings = replace(
        SETTINGS,
        step_timeout_s=0.3,
        env_workers=2,
        max_attempts=2,
        group_size=1,
        max_env_failures=50,
    )
    batches, counts, _, _ = play(tmp_path, [ECHO, bad], settings, 9)
    assert counts["episodes/errored.env_timeout"] >= 2
    assert counts["episodes/trained"] == 18
    trained = [t for groups in batches for g in groups for t in g.trajectories]
    assert len({t.uid for t in trained}) == 18
    assert all(np.isfinite(t.turn_rewards).all() for t in trained)
    assert not any(t.task_id == "bad/train/0" for t in trained)
