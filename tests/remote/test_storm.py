"""Injected failures, at each point of a sync under traffic, and of any process of a run: `--failures 100` for a long
one (about 2.5 s each)."""

import asyncio
import itertools
import logging
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.ledger import NEXT
from rl_jax.rollout.episode import sample_seed
from rl_jax.rollout.worker import EnvPool
from rl_jax.settings import RewardSettings, TaskSource
from rl_jax.types import TurnError
from tests.rollout.doubles import SETTINGS, World

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
        # All serve again, whoever was lost how often, and turns come to both.
        both = {server.name for server in world.decode}
        kit.until(lambda: {turn.server for _, turn, _ in list(traffic.turns)} == both)
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


STEPS, RUN_SEED = 100, 7  # RUN_SEED: doubles.World's


class Killer:
    """Kills processes of a run, one in `every` steps, at a random moment of the step; counts whom, and what was there
    to be killed."""

    def __init__(self, rng, pool, servers, num):
        self.counts, self.timers = Counter(), []
        self._rng, self._pool, self._servers = rng, pool, servers
        self._kinds = ["env", "reward", "env", "server", "reward", "env"] * (num // 6 + 1)
        self._killed, self._lock = set(), threading.Lock()
        self.every = max(1, STEPS // num)

    def step(self, step):
        if step % self.every == 0 and self._kinds:
            timer = threading.Timer(self._rng.random() * 0.1, self._kill, (self._kinds.pop(0),))
            timer.start()
            self.timers.append(timer)

    def _kill(self, kind):
        if kind == "server":
            living = [s for s in self._servers if s.fenced is None and s.pid is not None]
        else:
            workers = [*self._pool._workers.items(), *self._pool.scorers.workers.items()]
            living = [w for name, w in workers if name.startswith(kind) and w.is_usable]
        with self._lock:  # a process that was killed just now may not be known as dead yet
            pids = {one.pid for one in living} - self._killed
            if pids:
                pid = self._rng.choice(sorted(pids))
                self._killed.add(pid)
                self.counts[kind] += 1
                os.kill(pid, signal.SIGKILL)


def assert_sampled(engine, trajectory):
    """Every token that was trained is what the weights of its version give there, for this episode's own seed."""
    t = trajectory
    for turn in set(t.turn_ids[t.loss_mask].tolist()):
        places = np.flatnonzero((t.turn_ids == turn) & t.loss_mask)
        seed = sample_seed(RUN_SEED, t.epoch, t.index, t.sample, turn)
        versions = t.versions[places].tolist()
        prompt = t.tokens[: places[0]].tolist()
        want = engine.expected(prompt, len(places), offset=versions, seed=seed)
        assert t.tokens[places].tolist() == want, (t.uid, turn)


def test_run_of_a_hundred_steps_loses_nothing_while_its_processes_are_killed(
    local, kit, request, tmp_path
):
    """L24: whichever process dies, no episode is lost, duplicated or trained twice, and the run ends by itself."""
    num, seed = int(request.config.getoption("--failures")), random.randrange(1 << 30)
    local.heal()
    source = TaskSource("echo", "rl_jax.testing.envs:EchoEnv", "exact_match")
    settings = replace(
        SETTINGS, batch_groups=2, group_size=2, max_staleness=1, max_new_tokens=5, env_workers=2,
        envs_per_worker=8, max_env_failures=100, take_timeout_s=60.0,
    )  # fmt: skip
    pool = EnvPool([source], settings, RewardSettings(workers=2))
    pool.prepare()
    tasks = {"echo": pool.list_tasks("echo", "train")}
    router = local.router(prefill=(local.prefill,))
    world = World(
        tmp_path, settings, tasks, router, pool, context=kit.ENGINE.context, vocab_size=97
    )
    killer = Killer(random.Random(seed), pool, local.servers, 2 * num)
    restarts = lambda: sum(server.stats()["restarts"] for server in local.servers)
    before, first, trained, slowest_s = restarts(), local.version, [], 0.0
    try:
        world.rollout.start()
        world.rollout.published(first)
        for step in range(first + 1, first + 1 + max(STEPS, 2 * num)):
            start_s = time.monotonic()
            killer.step(step)
            world.rollout.want(step, settings.batch_groups)
            groups = world.buffer.take(step)
            world.rollout.consumed(step, groups)
            result = local.publish(step)
            assert result.state in ("PUBLISHED", "PARTIAL"), (seed, result)
            world.rollout.published(step)
            world.rollout.check()  # the law, at each step
            assert [len(group.trajectories) for group in groups] == [settings.group_size] * 2
            trained += [t for group in groups for t in group.trajectories]
            slowest_s = max(slowest_s, time.monotonic() - start_s)
        for timer in killer.timers:
            timer.join()
        names = {"env": "envs/restarts", "reward": "rewards/restarts"}
        for kind, name in names.items():
            kit.until(lambda k=kind, n=name: world.rollout.counts()[n] == killer.counts[k], name)
        world.rollout.drain()
        counts, records = world.rollout.counts(), world.records()
    finally:
        world.rollout.close()
        world.ledger.check(in_flight=0)
        world.ledger.close()
    for server in local.servers:
        server.wait_ready(kit.PATIENCE_S)
    logging.getLogger(__name__).warning(
        "killed %s; %d of %d attempts errored; slowest step %.1f s",
        dict(killer.counts), counts["episodes/errored"], counts["episodes/issued"], slowest_s,
    )  # fmt: skip
    kills = killer.counts
    assert all(kills[kind] for kind in ("env", "reward", "server")), kills
    assert restarts() - before == kills["server"]
    assert counts.get("episodes/errored.reward_error", 0) == 0, "a scorer's end costs no score"
    assert len({t.uid for t in trained}) == len(trained) == 4 * max(STEPS, 2 * num)
    for trajectory in trained:
        assert_sampled(local.engine, trajectory)
    history = defaultdict(list)
    for record in records:
        history[record["uid"], record["attempt"]].append(record["state"])
    ends = Counter(states[-1] for states in history.values())
    assert not any(NEXT[state] for state in ends) and ends["TRAINED"] == len(trained), (seed, ends)
    assert sum(ends.values()) == counts["episodes/issued"]
    assert sum("TRAINED" in states for states in history.values()) == len(trained)
    assert local.engine.vocab_size == 97 and pool.num_live == 0
