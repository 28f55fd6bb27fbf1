"""Redundant groups and members: who is kept, what becomes of the rest, and what the figures say of both."""

import time
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.rollout.scheduler import REDUNDANT
from rl_jax.rollout.scheduler.batch import BatchScheduler
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.rollout.worker import EnvError
from rl_jax.testing.envs import EchoEnv
from rl_jax.testing.fake_pool import FakePool
from tests.rollout.doubles import SETTINGS, World, echo_tasks, running

REDUNDANCY = replace(SETTINGS, extra_groups=2, extra_members=1)  # 4 groups of 3 for 2 of 2
SLOW_S = 0.1
FOREVER_S = 30.0


def slow_pool(is_slow, slow_s, **kwargs):
    """Environments whose step takes slow_s for the uids that are slow, or hardly any time."""

    def latency(verb, uid):
        return slow_s if verb == "step" and is_slow(uid) else 0.0

    return FakePool({"echo": EchoEnv}, latency=latency, **kwargs)


def sample_of(uid):
    return int(uid.rpartition("/")[2])


def index_of(uid):
    return int(uid.split("/")[2])


def by_state(records):
    out = defaultdict(set)
    for record in records:
        if record["reason"] == REDUNDANT or record["state"] == "TRAINED":
            out[record["state"]].add(record["uid"])
    return out


@pytest.mark.parametrize("policy", [TrajectoryScheduler, BatchScheduler])
def test_the_first_to_finish_are_kept_and_the_rest_is_cancelled_at_once(tmp_path, policy):
    # Member 0 of every group, all of group 1 and member 2 of group 3 would take 30 s: a step that waited for one would
    # time out. Member 1 of group 3 is done before groups 0 and 2 are.
    def latency(verb, uid):
        group, sample = index_of(uid), sample_of(uid)
        if verb != "step" or (group, sample) == (3, 1):
            return 0.0
        return FOREVER_S if sample == 0 or group in (1, 3) else SLOW_S

    pool = FakePool({"echo": EchoEnv}, latency=latency)
    with running(tmp_path, settings=REDUNDANCY, pool=pool, policy=policy()) as world:
        world.publish(0)
        world.rollout.want(1, 2)
        groups = world.buffer.take(1)
        world.rollout.check()
        assert world.sampler.live == () and pool.num_live == 0  # everybody has left, on time
        world.rollout.consumed(1, groups)
        world.rollout.check()
        figures = world.rollout.redundancy_metrics()
        counts = world.rollout.counts()
        records = world.records()
    assert {g.index for g in groups} == {0, 2}
    kept = {t.uid for g in groups for t in g.trajectories}
    assert [sorted(map(sample_of, (t.uid for t in g.trajectories))) for g in groups] == [[1, 2]] * 2
    ends = by_state(records)
    assert ends["TRAINED"] == kept
    assert len(kept | ends["CANCELLED"] | ends["DROPPED"]) == 12
    assert ends["DROPPED"] == {"r/0/3/1"}
    assert counts["episodes/cancelled_redundant"] == len(ends["CANCELLED"])
    assert counts["episodes/dropped_redundant"] == len(ends["DROPPED"])
    num_gone = len(ends["CANCELLED"] | ends["DROPPED"])
    assert figures["redundant/episodes"].sum == figures["redundant/turns_dropped"].count == num_gone
    # They had answered once, and their environments thought about it.
    sampled = sum(r["num_tokens"] for r in records if r["state"] == "CANCELLED")
    assert figures["redundant/tokens"].sum >= sampled > 0
    kept_lengths = [t.num_sampled for g in groups for t in g.trajectories]
    assert figures["redundant/length_kept"].sum >= sum(kept_lengths)
    assert figures["redundant/length_dropped"].mean < figures["redundant/length_kept"].mean
    assert figures["redundant/reward_kept"].mean == 2.0
    assert figures["redundant/reward_dropped"].sum == 2.0


@pytest.mark.parametrize("staleness", [0, 2])
def test_groups_stay_whole_under_failures_filters_and_tags(tmp_path, staleness):
    rng = np.random.default_rng(staleness)

    def fail(verb, uid):
        if rng.random() < 0.05:
            return EnvError("env_died", "chance")

    def picky(groups):
        gone = [g for g in groups if g.index % 5 == 0]
        kept = [g for g in groups if g.index % 5]
        return kept, [(g.uid, "equal_rewards") for g in gone]

    settings = replace(
        REDUNDANCY, batch_groups=4, group_size=3, extra_members=2, max_staleness=staleness,
        max_env_failures=10**6, max_filtered_batches=1000, short_group_infra="drop",
    )  # fmt: skip
    tasks = {"a": echo_tasks("a", 3), "b": echo_tasks("b", 5, turns=3)}
    pool = slow_pool(lambda uid: rng.random() < 0.3, 0.002, fail=fail)
    trained = []
    with running(tmp_path, settings=settings, tasks=tasks, pool=pool) as world:
        world.publish(0)
        for step in range(1, 7):
            groups = world.step(step, picky)  # checks the law
            assert Counter(g.tag for g in groups) == {"a": 2, "b": 2}
            assert world.buffer.num_waiting <= (1 + staleness) * settings.batch_groups
            trained += groups
        world.rollout.drain()
        ends = by_state(world.records())
    assert {len(g.trajectories) for g in trained} == {3}
    assert len({g.uid for g in trained}) == len(trained) == 24
    assert ends["CANCELLED"] and len(ends["TRAINED"]) == 72
    assert all(t.oldest_version >= 0 for g in trained for t in g.trajectories)


def test_spare_members_stand_in_for_failed_ones(tmp_path):
    """Under every rule: of 3 members one is lost for good, and the group is whole without it."""

    def fail(verb, uid):
        return EnvError("env_error", "broken") if verb == "reset" and sample_of(uid) == 0 else None

    for rule in ("survivors", "drop", "replace"):
        settings = replace(REDUNDANCY, short_group_infra=rule, max_attempts=1)
        (tmp_path / rule).mkdir()
        pool = FakePool({"echo": EchoEnv}, fail=fail)
        with running(tmp_path / rule, settings=settings, pool=pool) as world:
            world.publish(0)
            groups = world.step(1)
            lost = {r["group"] for r in world.records() if r["state"] == "ERRORED"}
        assert [len(g.trajectories) for g in groups] == [2, 2], rule
        assert {g.uid for g in groups} <= lost, rule


def test_resume_issues_what_was_in_flight_again_and_not_what_was_redundant(tmp_path):
    """The bound is two batches: groups 0 to 3. 4 and 5 are redundant when these are complete, and 6 to 9 run when the
    process ends: two that are needed, and two more."""
    settings = replace(REDUNDANCY, max_staleness=1)
    tasks = {"echo": echo_tasks(num=32)}
    pool = slow_pool(lambda uid: index_of(uid) > 3, FOREVER_S)
    with running(tmp_path, settings=settings, pool=pool, tasks=tasks) as world:
        world.publish(0)
        world.rollout.want(1, 2)
        groups = world.buffer.take(1)
        while world.buffer.num_waiting < 2:
            time.sleep(0.001)
        world.rollout.check()
        assert [index for _, index in world.rollout.pending()] == [0, 1, 2, 3]
        world.rollout.consumed(1, groups)
        world.publish(1)
        while len(pending := world.rollout.pending()) < 6:
            time.sleep(0.001)
        by_key = {(t.epoch, t.index): t for t in world.stream.issued}
    taken = {g.index for g in groups}
    assert {index for _, index in pending} == {0, 1, 2, 3, 6, 7, 8, 9} - taken  # 4 and 5: no
    again = World(tmp_path, settings=settings, tasks=tasks)
    again.ledger.void(1)
    again.sampler.publish(1)
    again.rollout.start()
    again.rollout.issue_again([by_key[key] for key in pending])
    again.rollout.published(1)
    again.rollout.want(2, 2)
    groups = again.buffer.take(2)
    again.rollout.check()
    again.rollout.consumed(2, groups)
    again.rollout.close()
    again.ledger.close()
    assert {(g.epoch, g.index) for g in groups} < set(pending)
    assert {t.attempt for g in groups for t in g.trajectories} == {1}
    assert [len(g.trajectories) for g in groups] == [2, 2]
