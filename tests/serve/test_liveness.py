"""A server that has work and does none of it is given up; one that compiles, waits or was stopped with us is not."""

import asyncio
import threading
import time

import pytest

from rl_jax.serve import Router
from rl_jax.serve.liveness import Liveness, interval_s
from rl_jax.serve.loop import Progress
from rl_jax.settings import ServeSettings
from rl_jax.types import TurnError
from tests.serve.test_router import PLAN, play, run

QUICK = {"progress_timeout_s": 0.2}


def looks(*seen, settings, start_s=100.0):
    """What each look says; seen: (seconds since the last one, progress)."""
    liveness, now_s, out = Liveness(), start_s, []
    for after_s, progress in seen:
        now_s += after_s
        out.append(liveness.look("decode.0", progress, settings, now_s))
    return out


def test_what_counts_as_standing_still():
    settings = ServeSettings(progress_timeout_s=3.0, compile_deadline_s=8.0)
    step = interval_s(settings)
    assert step == 0.75
    block = lambda num: Progress(num, "generating", False, False)
    idle = Progress(7, "waiting for commands", False, True)
    compiling = lambda num: Progress(num, "compiling", True, False)
    dead = "no progress in serve.progress_timeout_s=3 s while generating"
    assert looks(*[(step, block(7))] * 5, settings=settings) == [None] * 4 + [dead]
    moving = [(step, block(num // 4)) for num in range(20)]
    assert looks(*moving, settings=settings) == [None] * 20
    assert looks(*[(step, idle)] * 20, settings=settings) == [None] * 20
    waits = [(step, block(7))] * 4 + [(step, idle)] + [(step, block(7))] * 4
    assert looks(*waits, settings=settings) == [None] * 8 + [dead]
    # A machine that was suspended for an hour: 1.5 s of it count.
    assert (
        looks((step, block(7)), (3600.0, block(7)), (1.4, block(7)), settings=settings)[2] is None
    )
    still = looks(*[(step, compiling(2))] * 12, settings=settings)
    assert still[:11] == [None] * 11
    assert still[11] == "no progress in serve.compile_deadline_s=8 s while compiling"
    steps = [(step, compiling(num // 10)) for num in range(40)]
    assert looks(*steps, settings=settings) == [None] * 40


def test_what_stands_still_is_told_before_it_counts_as_dead():
    liveness, settings = Liveness(), ServeSettings(progress_timeout_s=60.0)
    hung = Progress(7, "generating for 3 requests", False, False)
    liveness.look("decode.0", hung, settings, 100.0)
    assert liveness.waits() == []
    for now_s in (101.0, 102.0):
        liveness.look("decode.0", hung, settings, now_s)
    (wait,) = liveness.waits()
    assert wait.text(121.0) == (
        "progress of decode.0 for 21.0 s, generating for 3 requests (at most serve.progress_timeout_s=60)"
    )
    liveness.look("decode.0", hung._replace(num_done=8), settings, 103.0)
    assert liveness.waits() == []


def test_what_stands_still_for_half_of_its_bound_is_suspect_until_it_moves():
    liveness, settings = Liveness(), ServeSettings(progress_timeout_s=8.0, compile_deadline_s=40.0)
    hung = Progress(7, "generating", False, False)
    suspects = []
    for num in range(7):
        assert liveness.look("decode.0", hung, settings, 100.0 + num) is None
        suspects.append(liveness.suspects("decode.0") is not None)
    assert suspects == [False] * 4 + [True] * 3
    why = "no progress for 6 s while generating (serve.progress_timeout_s=8)"
    assert liveness.suspects("decode.0") == why and liveness.suspects("decode.1") is None
    liveness.look("decode.0", hung._replace(is_compiling=True), settings, 107.0)
    assert liveness.suspects("decode.0") is None, "what compiles has another bound"
    liveness.look("decode.0", hung._replace(num_done=8), settings, 108.0)
    assert liveness.suspects("decode.0") is None


@pytest.mark.slow
def test_a_hung_block_is_fenced_and_its_turns_finish_elsewhere(kit):
    servers = [kit.decode(name=f"decode.{i}", **QUICK) for i in range(2)]
    hung, other = servers
    router = Router([d.server for d in servers], [], PLAN)
    hung.gate.close()

    async def turn(uid):
        request = kit.request(uid, [1, 2, 3, int(uid)], max_new_tokens=9)
        start = time.monotonic()
        try:
            return await router.generate(request), None
        except TurnError as error:
            took_s = time.monotonic() - start
            return await router.generate(request), (error, took_s)  # as an episode does, once

    named = set()

    async def watch():
        while not hung.server.fenced:
            named.update(wait.what for wait in router.waits())
            await asyncio.sleep(0.01)

    async def main():
        return await asyncio.gather(*[turn(str(i)) for i in range(4)], watch())

    *answers, _ = run(main())
    assert named == {"progress of decode.0"}
    failed = [why for _, why in answers if why is not None]
    assert len(failed) == 2
    for error, took_s in failed:
        assert (error.kind, error.retryable, error.server) == ("engine", True, "decode.0")
        assert "no progress in serve.progress_timeout_s=0.2 s while generating for" in str(error)
        assert 0.1 < took_s < 2.0
    for i, (made, _) in enumerate(answers):
        assert made.server == "decode.1"
        assert made.tokens.tolist() == other.engine.expected([1, 2, 3, i], 9)
    assert router.stats()["stalled_servers"] == 1 and router.stats()["moved_sessions"] == 2
    assert router.capacity() == {"decode": 4} and "no progress" in hung.server.fenced
    # It comes back: what it held failed there, and a commit lifts the fence.
    hung.gate.open()
    kit.commit(hung.server, 1)
    assert hung.server.stats()["running"] == hung.server.stats()["waiting"] == 0
    assert router.capacity() == {"decode": 8} and hung.server.fenced is None
    assert run(play(router, kit, "a"))[0][0].server == "decode.0"


@pytest.mark.slow
def test_a_server_that_compiles_longer_is_alive_until_its_own_bound(kit):
    d = kit.decode(version=None, compiling=True, **QUICK)
    router = Router([d.server], [], PLAN)
    d.gate.close()
    d.server.start()
    d.gate.arrive()

    async def main(*, opens):
        task = asyncio.create_task(router.generate(kit.request()))
        await asyncio.sleep(0.8)  # four times the bound
        assert not task.done() and d.server.fenced is None
        if opens:
            d.gate.open()
            await asyncio.to_thread(kit.commit, d.server, 0)
        return await task

    assert run(main(opens=True)).tokens.tolist() == d.engine.expected([1, 2, 3], 6)
    stuck = kit.decode(version=None, compiling=True, compile_deadline_s=0.2)
    router = Router([stuck.server], [], PLAN)
    stuck.gate.close()
    stuck.server.start()
    stuck.gate.arrive()
    with pytest.raises(TurnError, match="compile_deadline_s=0.2 s while compiling"):
        run(router.generate(kit.request()))


@pytest.mark.slow
def test_a_server_that_may_do_nothing_is_alive(kit):
    """Paused, or without the version that is asked for: it waits, and says so."""
    d = kit.decode(**QUICK)
    router = Router([d.server], [], PLAN)
    d.server.pause()

    async def main():
        asks = [kit.request("a"), kit.request("b", min_version=1)]
        tasks = [asyncio.create_task(router.generate(ask)) for ask in asks]
        await asyncio.sleep(0.6)
        d.server.resume()
        await tasks[0]
        await asyncio.sleep(0.6)
        await asyncio.to_thread(kit.commit, d.server, 1)
        return await tasks[1]

    assert run(main()).tokens.tolist() == d.engine.expected([1, 2, 3], 6, offset=1)
    assert d.server.fenced is None and router.stats()["stalled_servers"] == 0


def test_a_hung_prefill_server_costs_its_bound_and_nothing_else(kit):
    d, p = kit.decode(), kit.prefill(**QUICK)
    router = Router([d.server], [p], PLAN)
    gate, inner = threading.Event(), p.engine.append

    def append(*args):
        assert gate.wait(kit.PATIENCE_S)
        return inner(*args)

    p.engine.append = append

    async def main():
        asks = [router.generate(kit.request(f"e{i}", [1, 2, i, 3])) for i in range(3)]
        return await asyncio.gather(*asks)

    for i, turn in enumerate(run(main())):
        assert turn.tokens.tolist() == d.engine.expected([1, 2, i, 3], 6)
    assert router.stats()["prefill_fallbacks"] == 3 and "no progress" in p.fenced
    assert all(line.tokens == 0 for line in router._lines.values())
    gate.set()
    kit.commit(p, 1)
    kit.commit(d.server, 1)
    run(router.generate(kit.request("again")))
    assert router.stats()["prefilled"] == 1
