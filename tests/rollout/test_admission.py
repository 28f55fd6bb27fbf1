"""How many groups and episodes a running rollout admits: what the run still takes, what the slots hold, what is not
too old."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from rl_jax.testing.envs import EchoEnv
from rl_jax.testing.fake_pool import FakePool
from rl_jax.testing.fake_sampler import FakeSampler
from tests.rollout.doubles import SETTINGS, echo_script, echo_tasks, running


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_run_that_knows_its_end_starts_what_it_takes_and_replaces_what_is_dropped(
    tmp_path, staleness
):
    def select(groups):
        drops = [(g.uid, "too easy") for g in groups if g.index == 2 and g.epoch == 0]
        return [g for g in groups if g.uid not in dict(drops)], drops

    with running(tmp_path, settings=replace(SETTINGS, max_staleness=staleness)) as world:
        world.buffer.select = select
        world.publish(0)
        for step in (1, 2, 3):
            world.rollout.want(step, 2, last_step=3)
            groups = world.buffer.take(step)
            world.rollout.consumed(step, groups)
            world.publish(step)
        assert world.rollout.in_flight() == 0  # before the drain
        counts = world.ledger.counts()
        assert (counts["TRAINED"], counts["DROPPED"]) == (4 * 3, 2)
        assert world.rollout.counts()["episodes/issued"] == 4 * 3 + 2
        idle_s = world.rollout.counts()["time/wait_for_policy_s"]
        time.sleep(0.05)
        world.publish(4)
        world.rollout.check()  # the loop has seen it
        assert world.rollout.counts()["time/wait_for_policy_s"] - idle_s < 0.05


def test_tags_that_share_slots_hold_no_more_than_there_are_and_none_starves(tmp_path):
    settings = replace(SETTINGS, batch_groups=4, group_size=4, max_staleness=1)
    tasks = {tag: echo_tasks(tag, 4, turns=1 + 3 * (tag == "b")) for tag in ("a", "b")}
    sampler = FakeSampler(
        script=echo_script,
        slots={"own": 2, "both": 3},
        tag_places={"a": ("own", "both"), "b": ("both",)},
        latency=lambda r: 0.001,
    )
    with running(tmp_path, settings=settings, tasks=tasks, sampler=sampler) as world:
        world.publish(0)
        for step in range(1, 6):
            assert sorted(g.tag for g in world.step(step)) == ["a", "a", "b", "b"]
        assert sampler.peak_live <= 5
        placed = {}
        for request in sampler.requests:
            placed.setdefault(request.tag, set()).add(request.place)
        assert "own" in placed["a"] and "both" in placed["b"]


@pytest.mark.parametrize("age_of", ["oldest", "start"])
def test_an_episode_that_started_beyond_the_bound_is_cancelled_where_ages_count_from_the_start(
    tmp_path, age_of
):
    """Group 1 starts at version 0, its first reset takes until version 2, and what it then samples is fresh."""
    started, release = threading.Event(), threading.Event()

    def latency(verb, uid):
        if verb == "reset" and uid == "r/0/1/0" and not started.is_set():
            started.set()
            return 1.0
        return 0.0

    async def sleep(seconds):
        while seconds and not release.is_set():
            await asyncio.sleep(0.001)

    settings = replace(SETTINGS, batch_groups=1, group_size=1, max_staleness=1, age_of=age_of)
    pool = FakePool({"echo": EchoEnv}, latency=latency, sleep=sleep)
    tasks = {"echo": echo_tasks(num=8)}
    with running(tmp_path, settings=settings, pool=pool, tasks=tasks) as world:
        world.publish(0)
        assert world.step(1)[0].index == 0
        assert started.wait(5)
        assert world.step(2)[0].index == 2
        release.set()
        while world.buffer.num_waiting < 2:
            time.sleep(0.001)
        trained = {g.index: g.trajectories[0] for step in (3, 4) for g in world.step(step)}
        ends = [r["state"] for r in world.records() if r["uid"] == "r/0/1/0"]
        if age_of == "oldest":
            assert sorted(trained) == [1, 3]
            assert (trained[1].start_version, trained[1].oldest_version) == (0, 2)
            assert ends == ["ISSUED", "RUNNING", "COMPLETED", "TRAINED"]
        else:
            assert sorted(trained) == [3, 4]
            assert ends == ["ISSUED", "CANCELLED"]
