"""How many groups and episodes a running rollout admits: what the run still takes, and what the slots hold."""

import time
from dataclasses import replace

import pytest

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
        assert placed["b"] == {"both"} and "own" in placed["a"] <= {"own", "both"}
