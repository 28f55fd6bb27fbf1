"""Batched stepping: turn k + 1 of any episode begins when all have ended turn k; nobody waits for who is gone."""

import asyncio
from dataclasses import replace

import pytest

from rl_jax.rollout.scheduler.batch import BatchScheduler
from rl_jax.rollout.turn_barrier import TurnBarrier
from rl_jax.rollout.worker import EnvError
from rl_jax.testing.envs import EchoEnv
from rl_jax.testing.fake_pool import FakePool
from rl_jax.testing.fake_sampler import FakeSampler
from tests.rollout.doubles import SETTINGS, echo_script, echo_tasks, running


def test_all_go_on_together_and_who_leaves_is_not_waited_for():
    async def main():
        barrier, order = TurnBarrier(), []

        async def turns(name, num):
            for turn in range(num):
                await barrier.wait(name)
                order.append((turn, name))
            barrier.leave(name)

        for name in "abc":
            barrier.join(name)
        tasks = [asyncio.create_task(turns(*args)) for args in (("a", 3), ("b", 1))]
        await asyncio.sleep(0.01)
        assert order == []  # c is missing
        late = asyncio.create_task(turns("c", 2))
        await asyncio.gather(*tasks, late)
        assert [turn for turn, _ in order] == [0, 0, 0, 1, 1, 2]

    asyncio.run(main())


def test_a_cancelled_waiter_does_not_count_as_waiting():
    async def main():
        barrier = TurnBarrier()
        for name in "ab":
            barrier.join(name)
        gone = asyncio.create_task(barrier.wait("a"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        other = asyncio.create_task(barrier.wait("b"))
        await asyncio.sleep(0.01)
        assert not other.done()  # a has not left yet
        barrier.leave("a")
        await asyncio.wait_for(other, 5)

    asyncio.run(main())


@pytest.mark.parametrize("staleness", [0, 1])
def test_nobody_waits_for_who_failed_or_has_no_turn_left(tmp_path, staleness):
    """One member fails in its second turn and is played again, others take 1, 2 or 3 turns; few slots, so that members
    begin while others are at their last turn. A wait for one that is gone would end in a TakeTimeout."""
    failed = []

    def fail(verb, uid):
        if verb == "step" and uid == "r/0/0/1" and not failed:
            failed.append(uid)
            return EnvError("env_error", "broken")

    settings = replace(
        SETTINGS, scheduler="batch", env_stepping="batch", max_staleness=staleness, batch_groups=3
    )
    tasks = {"echo": [t for n in (1, 2, 3) for t in echo_tasks(num=2, turns=n)]}
    pool = FakePool({"echo": EchoEnv}, fail=fail)
    sampler = FakeSampler(script=echo_script, slots={"": 4})
    with running(
        tmp_path,
        settings=settings,
        pool=pool,
        sampler=sampler,
        policy=BatchScheduler(),
        tasks=tasks,
    ) as world:
        world.publish(0)
        for step in (1, 2, 3):
            assert [len(group.trajectories) for group in world.step(step)] == [2, 2, 2]
    assert failed
