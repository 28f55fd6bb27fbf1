"""Slots: training takes what is free, evaluation waits in line and goes first."""

import asyncio

import pytest

from rl_jax.rollout.slots import Slots


def test_free_slots_are_limited_by_servers_and_by_environments():
    slots = Slots(lambda: {"": 4, "own": 2}, max_live=5)
    assert slots.free() == {"": 4, "own": 2}
    assert [slots.try_acquire("own") for _ in range(3)] == ["own", "own", None]
    assert [slots.try_acquire("x") for _ in range(4)] == ["", "", "", None]
    assert slots.free() == {"": 0, "own": 0}
    slots.release("own")
    assert slots.free() == {"": 1, "own": 1}
    slots.check(("own", "x"))
    with pytest.raises(ValueError, match="no server takes episodes of tag 'x'"):
        Slots(lambda: {"own": 2}, 4).check(("own", "x"))


def test_who_waits_in_line_goes_before_training():
    async def scenario():
        slots = Slots(lambda: {"": 2, "own": 1}, max_live=10)
        assert slots.try_acquire("a") == slots.try_acquire("a") == ""
        waiters = [asyncio.create_task(slots.acquire("b")) for _ in range(3)]
        await asyncio.sleep(0)
        assert slots.free() == {"": 0, "own": 1}
        slots.release("")
        assert slots.try_acquire("a") is None  # it belongs to the first in line
        await asyncio.wait_for(waiters[0], 1)
        waiters[1].cancel()
        await asyncio.sleep(0)
        slots.release("")
        await asyncio.wait_for(waiters[2], 1)
        slots.release(""), slots.release("")
        assert slots.free() == {"": 2, "own": 1} and slots.num_live == 0

    asyncio.run(scenario())


def test_slot_given_to_a_cancelled_waiter_is_given_back():
    async def scenario():
        slots = Slots(lambda: {"": 1}, max_live=10)
        assert slots.try_acquire("a") == ""
        waiter = asyncio.create_task(slots.acquire("a"))
        await asyncio.sleep(0)
        slots.release("")  # now the waiter's, who has not run yet
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert slots.free() == {"": 1}

    asyncio.run(scenario())


def test_slot_goes_back_to_the_pool_it_came_from_though_that_was_fenced():
    capacity = {"": 1, "own": 1}
    slots = Slots(lambda: capacity, max_live=10)
    key = slots.try_acquire("own")
    del capacity["own"]
    slots.release(key)
    assert slots.free() == {"": 1} and slots.num_live == 0
