"""Injected failures at each point of a sync, under traffic: `--failures 100` for a long run (about 2.5 s each)."""

import asyncio
import itertools
import logging
import os
import random
import signal
import threading
import time
from collections import Counter

import pytest

from rl_jax.types import TurnError

pytestmark = [pytest.mark.slow(seconds=12), pytest.mark.timeout(1800)]

POINTS = ("before stage", "after stage", "before digest", "after digest", "before commit", "after commit")  # fmt: skip
CLIENTS = 4
ATTEMPT_S, TURN_S = 20.0, 60.0  # deadlines of one attempt at a turn, and of all of them


class Traffic:
    """Clients of a router on a loop of their own: each turn is tried again until it is there, as rollout does."""

    def __init__(self, world, kit):
        self.world, self.kit = world, kit
        self.turns, self.lost, self.counts = [], [], Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(TURN_S + 10)
        assert not self._thread.is_alive(), "a turn never ended"

    async def _run(self):
        router = self.world.router(prefill=(self.world.prefill,))
        await asyncio.gather(*[self._client(router, i) for i in range(CLIENTS)])

    async def _client(self, router, client):
        for number in itertools.count():
            if self._stop.is_set():
                return
            await self._turn(router, f"storm{client}.{number}", 1 + number % 9)

    async def _turn(self, router, uid, num_tokens):
        until = time.monotonic() + TURN_S
        for attempt in itertools.count():
            request = self.kit.ask(
                uid, range(1, 2 + num_tokens), attempt=attempt, max_new_tokens=30, deadline_s=ATTEMPT_S
            )  # fmt: skip
            self.counts["asked"] += 1
            try:
                turn = await asyncio.wait_for(router.generate(request), ATTEMPT_S + 5)
            except TurnError as error:
                self.counts["failed"] += 1
                if not error.retryable or time.monotonic() > until:
                    self.lost.append((uid, error))
                    return
                await asyncio.sleep(0.05)
            else:
                self.counts["answered"] += 1
                self.turns.append((request, turn, self.world.version))
                router.release(request.session)
                return


def until_fenced(kit, server):
    kit.until(lambda: server.fenced is not None, "the fence")


def is_whole(world, request, turn) -> bool:
    """Whether each token is what its version's weights, all of them, give in that place."""
    versions = turn.versions.tolist()
    want = world.engine.expected(
        request.tokens.tolist(), len(versions), offset=versions, seed=request.seed
    )
    return turn.tokens.tolist() == want and versions == sorted(versions)


def test_no_token_of_an_unknown_version_gets_out_whenever_a_server_is_lost(local, kit, request):
    num, seed = int(request.config.getoption("--failures")), random.randrange(1 << 30)
    rng, world = random.Random(seed), local
    world.heal()
    first, restarts, states = world.version, sum(s._lives.num for s in world.servers), Counter()
    slowest_s = 0.0
    with Traffic(world, kit) as traffic:
        for i in range(num):
            point, fault = POINTS[i % len(POINTS)], rng.choice((signal.SIGKILL, signal.SIGSTOP))
            victim = rng.choice(world.servers)
            world.hooks[point] = lambda v=victim, f=fault: os.kill(v.pid, f)
            time.sleep(rng.random() * 0.3)
            start = time.monotonic()
            result = world.publish()
            slowest_s = max(slowest_s, time.monotonic() - start)
            states[result.state] += 1
            assert result.state in ("PUBLISHED", "PARTIAL"), (seed, point, fault, result)
            until_fenced(kit, victim)
            for server in world.servers:
                server.wait_ready(kit.PATIENCE_S)
        world.heal()
        time.sleep(0.5)  # all serve again
    world.hooks.clear()
    logging.getLogger(__name__).warning(
        "%d failures: syncs %s, slowest %.1f s; turns %s", num, dict(states), slowest_s, dict(traffic.counts)
    )  # fmt: skip
    assert sum(s._lives.num for s in world.servers) - restarts == num, (
        "not every fault was injected"
    )
    assert traffic.lost == [], (seed, traffic.lost[:3])
    assert traffic.counts["asked"] == traffic.counts["answered"] + traffic.counts["failed"]
    for asked, turn, published in traffic.turns:
        assert is_whole(world, asked, turn), (seed, asked.key, turn.spans)
        assert set(turn.versions.tolist()) <= set(range(first - 1, published + 1)), (
            seed,
            turn.spans,
        )
    assert slowest_s < kit.LEASE_S + kit.WEIGHTS.deadline_s
    assert {turn.server for _, turn, _ in traffic.turns} == {"decode.0", "decode.1"}
