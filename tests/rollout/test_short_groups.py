"""A group that loses a member, because that failed or grew too old: replaced, gone on without, or dropped."""

import asyncio
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from rl_jax.rollout.worker import EnvError
from rl_jax.testing.envs import EchoEnv
from rl_jax.testing.fake_pool import FakePool
from rl_jax.testing.fake_sampler import FakeSampler
from tests.rollout.doubles import SETTINGS, echo_script, running


class CountingSampler(FakeSampler):
    num_sampled = 0  # tokens of turns that are over

    async def generate(self, request):
        turn = await super().generate(request)
        self.num_sampled += len(turn.tokens)
        return turn


@pytest.mark.parametrize(
    "rule, sizes, indices",
    [("survivors", [1, 2], [0, 1]), ("drop", [2, 2], [1, 2]), ("replace", [2, 2], [1, 2])],
)
def test_short_group_rules(tmp_path, rule, sizes, indices):
    def fail(verb, uid):
        return EnvError("env_error", "broken") if verb == "reset" and uid == "r/0/0/1" else None

    settings = replace(SETTINGS, short_group_infra=rule)
    with running(tmp_path, settings=settings, pool=FakePool({"echo": EchoEnv}, fail=fail)) as world:
        world.publish(0)
        groups = world.step(1)
        assert [len(g.trajectories) for g in groups] == sizes
        assert [g.index for g in groups] == indices
        tries = {"replace": 3}.get(rule, 1)
        assert world.ledger.counts()["ERRORED"] == tries
        other = [r for r in world.records() if r["uid"] == "r/0/0/0"][-1]
        if rule == "survivors":
            assert other["state"] == "TRAINED"
        else:
            assert (
                other["state"] in ("DROPPED", "CANCELLED") and other["reason"] == "short: env_error"
            )


@pytest.mark.parametrize(
    "rule, max_attempts", [("replace", 3), ("replace", 1), ("survivors", 3), ("drop", 3)]
)
@pytest.mark.parametrize("where", ["in flight", "buffered", "live"])
def test_short_group_rules_of_stale_members(tmp_path, rule, max_attempts, where):
    """Sample 0 plays at version 0. The others wait: for version 1, or (live) on, until at 2 all of the group is too
    old. Sample 2 waits in its second turn too, so that the group is in flight at version 2, or is buffered before."""
    gates = {1.0: threading.Event(), 2.0: threading.Event()}

    async def sleep(gate):
        while gate and not gates[gate].is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)

    def latency(request):
        first = {"1": 1.0, "2": 1.0}.get(request.uid[-1], 0.0)
        return first if request.turn == 0 else 2.0 * (request.uid[-1] == "2")

    def until(condition):
        end_s = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < end_s, world.rollout.status()
            time.sleep(0.001)

    settings = replace(
        SETTINGS, group_size=3, max_staleness=1, short_group_stale=rule, max_attempts=max_attempts
    )
    sampler = CountingSampler(script=echo_script, sleep=sleep, latency=latency)
    with running(tmp_path, settings=settings, sampler=sampler) as world:
        world.publish(0)
        world.rollout.want(1, 2)  # 2 batches of 2 groups are admitted
        until(lambda: world.ledger.counts()["COMPLETED"] == 4)
        until(lambda: len(sampler.requests) == 16)  # 2 turns, and the first of two waits
        world.publish(1)
        if where != "live":
            gates[1.0].set()
            until(lambda: world.ledger.counts()["COMPLETED"] == 8 and len(sampler.requests) == 24)
        if where == "buffered":
            gates[2.0].set()
            until(lambda: world.buffer.num_waiting == 4)
        assert world.rollout.counts()["open_tokens"] == sampler.num_sampled > 0  # nothing is lost
        world.publish(2)
        world.rollout.check()
        for gate in gates.values():
            gate.set()
        groups = world.buffer.take(3)
        until(lambda: not world.rollout.status().count("sampling"))
        counts, records = world.rollout.counts(), world.records()
        lost = sum(r["num_tokens"] for r in records if r["reason"] == "stale")
        assert counts["open_tokens"] == sampler.num_sampled - lost
        world.rollout.consumed(3, groups)
        world.publish(3)
        world.rollout.check()
    is_whole_gone = rule == "drop" or max_attempts == 1 or (rule, where) == ("survivors", "live")
    again = 0 if is_whole_gone else 1  # the tasks of the first four groups, or those after them
    assert {g.epoch for g in groups} == {1 - again}
    attempts = [[(t.sample, t.attempt) for t in g.trajectories] for g in groups]
    of_rule = {"replace": [(0, 1), (1, 0), (2, 0)], "survivors": [(1, 0), (2, 0)]}
    if is_whole_gone:
        assert attempts == [[(0, 0), (1, 0), (2, 0)]] * 2
    elif where == "live":
        assert attempts == [[(0, 1), (1, 1), (2, 1)]] * 2
    else:
        assert attempts == [of_rule[rule]] * 2
    assert all(2 - g.oldest_version <= 1 for g in groups)
    if rule != "survivors":
        assert all(len(g.trajectories) == settings.group_size for g in groups)
    # What was scored is DROPPED, what still ran is CANCELLED; each once, by attempt.
    scored = {"in flight": 2, "buffered": 3, "live": 1}[where] if is_whole_gone else 1
    ran = (3 - scored) if is_whole_gone or where == "live" else 0
    first = [r for r in records if r["uid"].startswith("r/0/") and r["attempt"] == 0]
    ends = Counter(r["state"] for r in first if r["reason"] == "stale")
    assert ends == {k: 4 * n for k, n in (("DROPPED", scored), ("CANCELLED", ran)) if n}
    assert counts["episodes/dropped_stale"] == ends["DROPPED"]
