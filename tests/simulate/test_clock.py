"""The virtual clock: time jumps to the next timer, and moves by nothing else."""

import asyncio
import threading
import time

import pytest

from rl_jax.clock import now_s
from rl_jax.simulate import clock


def test_time_is_that_of_the_timers_and_takes_none():
    seen = []

    async def wait(name, seconds):
        await asyncio.sleep(seconds)
        seen.append((name, now_s() - clock.START_S))

    async def main():
        await asyncio.gather(wait("c", 3600.0), wait("a", 0.5), wait("b", 7.25))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.Event().wait()
        return now_s() - clock.START_S

    start = time.monotonic()
    assert clock.run(main()) == 3700.0
    assert seen == [("a", 0.5), ("b", 7.25), ("c", 3600.0)]
    assert time.monotonic() - start < 1.0


def test_the_clock_outside_of_a_loop_and_on_a_real_one_is_the_monotonic_one():
    async def main():
        return now_s() - time.monotonic()

    assert abs(asyncio.run(main())) < 0.1
    assert abs(now_s() - time.monotonic()) < 0.1


def test_what_runs_apart_has_its_own_time_and_is_heard_when_it_spoke():
    heard = []

    async def main():
        loop, begin_s = asyncio.get_running_loop(), now_s()

        def work():
            loop.spend(2.0)
            loop.call_soon_threadsafe(lambda: heard.append(("half", now_s() - clock.START_S)))
            loop.spend(1.0)
            assert now_s() == begin_s + 3.0

        assert loop.apart(work, from_s=0.0) == begin_s + 3.0
        assert now_s() == begin_s  # nobody else waits
        assert loop.apart(lambda: loop.spend(1.0), from_s=begin_s + 3.0) == begin_s + 4.0
        await asyncio.sleep(1.0)
        assert heard == []
        await asyncio.sleep(5.0)
        with pytest.raises(RuntimeError, match="outside of apart"):
            loop.spend(1.0)

    clock.run(main())
    assert heard == [("half", 2.0)]


def test_what_can_never_happen_is_told_with_who_waits_for_it():
    async def wait_for_nobody():
        await asyncio.Event().wait()

    with pytest.raises(clock.Stalled, match="no timer is set: .*wait_for_nobody"):
        clock.run(wait_for_nobody())

    async def for_ever():
        while True:
            await asyncio.sleep(1.0)

    with pytest.raises(clock.Stalled, match="the limit of 50 s"):
        clock.run(for_ever(), limit_s=50)


def test_threads_are_refused():
    async def in_executor():
        await asyncio.to_thread(time.monotonic)

    with pytest.raises(RuntimeError, match="runs no threads"):
        clock.run(in_executor())

    async def from_another():
        loop, errors = asyncio.get_running_loop(), []

        def call():
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join(10)
        return errors

    assert clock.run(from_another()) == ["a virtual loop has one thread; nothing else may call it"]
