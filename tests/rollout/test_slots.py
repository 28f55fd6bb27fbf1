"""Slots: training takes what is free, evaluation waits in line and goes first."""

import asyncio

import pytest

from rl_jax.rollout.slots import Slots


def slots_of(capacity, max_live=10, places=None, tags=("a", "b", "own", "x"), limits=None):
    """places: tag -> its places; absent = the place of its name, else ""."""
    places = places or {}

    def places_of(tag):
        return places.get(tag) or ((tag,) if tag in capacity else ("",))

    return Slots(lambda: capacity, places_of, tags, max_live, limits)


def test_free_slots_are_limited_by_servers_and_by_environments():
    slots = slots_of({"": 4, "own": 2}, max_live=5)
    assert slots.free() == {"": 4, "own": 2}
    assert [slots.try_acquire("x") for _ in range(3)] == ["", "", ""]
    assert [slots.try_acquire("own") for _ in range(3)] == ["own", "own", None]
    assert slots.free() == {"": 0, "own": 0}
    slots.release("own", "own")
    assert slots.free() == {"": 1, "own": 1}
    slots.check()
    with pytest.raises(ValueError, match="no server takes episodes of tag 'x'"):
        slots_of({"own": 2}, 4, tags=("own", "x")).check()


def test_who_waits_in_line_goes_before_training():
    async def scenario():
        slots = slots_of({"": 2})
        assert slots.try_acquire("a") == slots.try_acquire("a") == ""
        waiters = [asyncio.create_task(slots.acquire("b")) for _ in range(3)]
        await asyncio.sleep(0)
        slots.release("", "a")
        assert slots.free() == {"": 0}
        assert slots.try_acquire("a") is None  # it belongs to the first in line
        await asyncio.wait_for(waiters[0], 1)
        waiters[1].cancel()
        await asyncio.sleep(0)
        slots.release("", "a")
        await asyncio.wait_for(waiters[2], 1)
        slots.release("", "b"), slots.release("", "b")
        assert slots.free() == {"": 2} and slots.num_live == 0

    asyncio.run(scenario())


def test_slot_given_to_a_cancelled_waiter_is_given_back():
    async def scenario():
        slots = slots_of({"": 1})
        assert slots.try_acquire("a") == ""
        waiter = asyncio.create_task(slots.acquire("a"))
        await asyncio.sleep(0)
        slots.release("", "a")  # now the waiter's, who has not run yet
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert slots.free() == {"": 1}

    asyncio.run(scenario())


def test_slot_goes_back_to_the_pool_it_came_from_though_that_was_fenced():
    capacity = {"": 1, "own": 1}
    slots = slots_of(capacity)
    key = slots.try_acquire("own")
    del capacity["own"]
    slots.release(key, "own")
    assert slots.free() == {"": 1} and slots.num_live == 0


def test_slot_that_several_tags_may_use_is_counted_once():
    slots = slots_of({"both": 3}, places={"a": ("both",), "b": ("both",)}, tags=("a", "b"))
    taken = [slots.try_acquire(tag) for tag in ("a", "b", "a", "b", "a")]
    assert taken == ["both"] * 3 + [None] * 2
    assert slots.free() == {"both": 0} and slots.num_live == 3


def test_tag_with_a_choice_leaves_room_for_one_without():
    slots = slots_of(
        {"both": 2, "own": 2}, places={"a": ("both", "own"), "b": ("both",)}, tags=("a", "b")
    )
    assert slots.places() == {"a": ("own", "both"), "b": ("both",)}
    assert [slots.try_acquire("a") for _ in range(3)] == ["own", "own", "both"]
    assert [slots.try_acquire("b") for _ in range(2)] == ["both", None]
    slots.release("own", "a")
    assert slots.try_acquire("a") == "own"


def test_tag_whose_places_are_full_goes_elsewhere_at_once_and_comes_back_when_they_are_not():
    slots = slots_of({"p": 2, "q": 1}, places={"a": ("p",), "b": ("q",)}, tags=("a", "b"))
    assert [slots.try_acquire("a") for _ in range(4)] == ["p", "p", "q", None]
    assert slots.try_acquire("b") is None
    slots.release("p", "a")
    assert slots.try_acquire("b") == "p"
    slots.release("q", "a"), slots.release("p", "a")
    assert (slots.try_acquire("b"), slots.try_acquire("a")) == ("q", "p")


def test_equal_places_fill_evenly():
    slots = slots_of({"p": 4, "q": 2}, places={"a": ("p", "q")}, tags=("a",))
    taken = [slots.try_acquire("a") for _ in range(6)]
    assert sorted(taken[:3]) == ["p", "p", "q"] and sorted(taken) == ["p"] * 4 + ["q"] * 2


def test_who_waits_takes_the_first_slot_of_any_of_its_places():
    async def scenario():
        slots = slots_of({"p": 1, "q": 1, "r": 1}, places={"a": ("p", "q"), "b": ("r",)})
        assert {slots.try_acquire("a"), slots.try_acquire("a")} == {"p", "q"}
        assert slots.try_acquire("b") == "r"
        waiter = asyncio.create_task(slots.acquire("a"))
        await asyncio.sleep(0)
        slots.release("q", "a")
        assert await asyncio.wait_for(waiter, 1) == "q"

    asyncio.run(scenario())


def test_a_tag_with_a_limit_takes_no_more_and_leaves_the_rest_to_others():
    slots = slots_of({"": 5}, tags=("a", "b"), limits={"a": 2})
    assert slots.limits() == {"a": 2}
    assert [slots.try_acquire("a") for _ in range(3)] == ["", "", None]
    assert slots.limits() == {"a": 0} and slots.free() == {"": 3}
    assert [slots.try_acquire("b") for _ in range(4)] == ["", "", "", None]
    slots.release("", "b")
    assert slots.try_acquire("a") is None
    slots.release("", "a")
    assert slots.try_acquire("a") == "" and slots.num_live == 4


def test_an_evaluation_that_waits_for_its_tags_limit_holds_back_that_tags_training_alone():
    async def scenario():
        slots = slots_of({"": 4}, tags=("a", "b"), limits={"a": 1})
        waiters = [asyncio.create_task(slots.acquire("a")) for _ in range(2)]
        await asyncio.sleep(0)
        assert waiters[0].done() and not waiters[1].done()
        assert slots.free() == {"": 3} and slots.try_acquire("b") == ""
        slots.release("", "a")
        await asyncio.wait_for(waiters[1], 1)
        late = asyncio.create_task(slots.acquire("a"))
        await asyncio.sleep(0)
        assert slots.limits() == {"a": 0} and slots.free() == {"": 2}
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        slots.release("", "a")
        assert slots.limits() == {"a": 1} and slots.try_acquire("a") == ""

    asyncio.run(scenario())
