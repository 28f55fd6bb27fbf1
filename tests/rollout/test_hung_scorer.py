"""L23: one regex that never comes back costs its own episode an attempt, and nobody else's reward."""

import time
from dataclasses import replace

import pytest

from rl_jax.rollout.worker import EnvPool
from rl_jax.settings import RewardSettings, TaskSource
from rl_jax.testing.fake_sampler import FakeSampler
from tests.rollout.doubles import SETTINGS, running, say

BACKTRACKS = "a" * 40  # in the pattern below: 2^40 ways to divide it, and none that ends with b
PATTERN = "(a+)+b|ok"
LIMIT_S = 2.0  # rewards.timeout_s


@pytest.mark.slow(seconds=6)
def test_a_regex_that_backtracks_without_end_is_killed_and_every_other_reward_arrives(tmp_path):
    """The real scorer, in real workers: reward_timeout, charged to infra, played again; never a zero."""
    settings = replace(SETTINGS, batch_groups=3, group_size=2, max_new_tokens=64)
    source = TaskSource(
        "echo", "rl_jax.testing.envs:EchoEnv", "regex_match", config={"num_tasks": 3, "turns": 1}
    )
    rewards = RewardSettings(timeout_s=LIMIT_S, workers=2)
    pool = EnvPool([source], settings, rewards)
    pool.prepare()
    tasks = [
        replace(task, payload={**task.payload, "pattern": PATTERN})
        for task in pool.list_tasks("echo", "train")
    ]
    hung = "r/0/0/0"  # the first episode of the first group, in its first attempt

    def script(request):
        return say(BACKTRACKS if (request.uid, request.attempt) == (hung, 0) else "ok")

    start_s = time.monotonic()
    with running(
        tmp_path, settings=settings, tasks={"echo": tasks}, pool=pool,
        sampler=FakeSampler(script=script), context=512, rewards=rewards,
    ) as world:  # fmt: skip
        pids = {w.pid for w in pool.scorers.workers.values()}
        groups = world.step(1)
        records = [(r["uid"], r["attempt"], r["state"], r["reason"]) for r in world.records()]
        assert len({w.pid for w in pool.scorers.workers.values()} - pids) == 1  # killed, replaced
    assert time.monotonic() - start_s < 60
    members = [t for group in groups for t in group.trajectories]
    assert [t.reward.value for t in members] == [1.0] * 6
    assert {t.uid: t.attempt for t in members if t.attempt} == {hung: 1}
    errored = [record for record in records if record[2] == "ERRORED"]
    assert errored == [(hung, 0, "ERRORED", "reward_timeout")]
    rest = {t.uid for t in members} - {hung}  # by then the next batch may have records, too
    others = [i for i, r in enumerate(records) if r[2] == "COMPLETED" and r[0] in rest]
    assert len(others) == 5 and max(others) < records.index(errored[0])  # while it was still at it
    assert pool.counts["reward_env_timeout"] == 1 and pool.counts["reward_restarts"] == 1
