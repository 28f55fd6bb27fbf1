"""Faults 6 to 8: a reward service that fails, hangs and lies costs time and statuses, and never a reward of 0."""

import asyncio
import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.rewards import http_client
from rl_jax.rollout.http_scorers import HttpScorers, ServiceError
from rl_jax.rollout.worker import EnvError, EnvPool
from rl_jax.settings import RewardSettings, RolloutSettings, TaskSource
from rl_jax.testing.envs import EchoEnv
from rl_jax.testing.fake_pool import FakePool
from rl_jax.testing.stub_service import StubService, answer
from rl_jax.types import EpisodeView
from tests.rollout.doubles import SETTINGS, echo_tasks, running

VIEW = EpisodeView((), ("x",), {}, (0.0,))
TASK = echo_tasks(num=1, reward="exact_match")[0]
QUICK = RewardSettings(
    timeout_s=0.2, read_timeout_s=0.2, total_timeout_s=5.0, connect_timeout_s=1.0
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.002)


def score(script, num=1, **settings):
    """(answers, counts, the stub) of `num` calls one after the other."""

    async def play():
        async with StubService(script) as stub:
            scorers = HttpScorers(["exact_match"], replace(QUICK, url=stub.url, **settings))
            await scorers.start()
            out = [await scorers.score("exact_match", TASK, VIEW) for _ in range(num)]
            await scorers.close()
            return out, scorers.counts, stub

    return asyncio.run(asyncio.wait_for(play(), 30))


def test_a_reward_comes_with_its_version_parts_and_seconds():
    said = {"value": 0.5, "parts": {"a": 1}, "turn_values": [None, 2], "status": "scored",
            "scorer_version": "v7", "detail": "", "seconds": 0.25}  # fmt: skip
    ((reward, seconds),), counts, stub = score(lambda n: answer(said))
    assert (reward.value, reward.parts, reward.turn_values) == (0.5, {"a": 1.0}, (None, 2.0))
    assert (reward.scorer_version, reward.status, seconds) == ("v7", "scored", 0.25)
    asked = json.loads(stub.bodies[0])
    assert (asked["name"], asked["limit_s"], asked["task"]["id"]) == ("exact_match", 0.2, TASK.id)


@pytest.mark.parametrize(
    "body, said",
    [
        (b'{"value": NaN}', "it holds NaN"),
        (b'{"value": null}', "value is None, no finite number"),
        (b'{"value": "1.0"}', "value is '1.0' (str), no finite number"),
        (b'{"value": 1e400}', "value is inf (float), no finite number"),
        (b'{"value": [1.0]}', "value is a list, no finite number"),
        (b'{"value": true}', "value is True (bool), no finite number"),
        (b"{}", "value is None"),
        (b"[]", "the service gave a list, no object"),
        (b"1.0", "the service gave 1.0 (float), no object"),
        (b'{"value": 1, "parts": []}', "parts is a list, no dict"),
        (b'{"value": 1, "parts": {"a": "1"}}', "part 'a' is '1' (str), no finite number"),
        (b'{"value": 1, "turn_values": [[]]}', "turn 0 is a list, no finite number"),
        (b'{"value": 1, "status": 3}', "status is 3 (int), no str"),
        (b'{"value": 1, "status": "error"}', "status 'error' with value 1"),
        (b"<html>", "is no JSON"),
    ],
)
def test_garbage_is_a_schema_status(body, said):
    """Fault 8."""
    ((reward, _),), counts, stub = score(lambda n: answer(body))
    assert (reward.status, reward.value, reward.parts) == ("schema", None, {})
    assert said in reward.detail and counts["reward_schema"] == 1 and len(stub.bodies) == 1


@pytest.mark.slow
def test_a_service_that_trickles_is_a_timeout_and_the_next_call_is_scored():
    """Fault 7: deadlines for the connection, the answer and all tries; nothing is left of a call that was given up."""
    trickle = [b"HTTP/1.1 200 x\r\nContent-Length: 999\r\n\r\n", *[b" ", 0.05] * 99]
    script = lambda n: trickle if n < 2 else answer({"value": 1.0})
    start_s = time.monotonic()
    (slow, good), counts, stub = score(script, num=2, retries=1)
    assert (slow.reward.status, slow.reward.value) == ("timeout", None)
    assert "no whole answer within 0.4 s, after 2 tries" in slow.reward.detail
    assert good.reward.value == 1.0 and counts["reward_retries"] == 1
    assert time.monotonic() - start_s < 5.0


def test_calls_at_once_are_bounded_and_each_retry_is_counted_once():
    at_once, peak = set(), []

    def script(n):
        at_once.add(n)
        peak.append(len(at_once))
        yield 0.01
        at_once.discard(n)
        yield from answer({"value": 1.0}) if n >= 4 else answer({}, 503)

    async def play():
        async with StubService(script) as stub:
            scorers = HttpScorers(["exact_match"], replace(QUICK, url=stub.url, connections=3))
            await scorers.start()
            calls = (scorers.score("exact_match", TASK, VIEW) for _ in range(9))
            values = [a.reward.value for a in await asyncio.gather(*calls)]
            await scorers.close()
            return values, scorers.counts

    values, counts = asyncio.run(asyncio.wait_for(play(), 30))
    assert values == [1.0] * 9 and max(peak) == 3 and counts["reward_retries"] == 4


def test_a_scorers_own_failure_is_not_asked_for_again():
    said = {"value": None, "status": "timeout", "detail": "hung"}
    ((reward, _),), counts, stub = score(lambda n: answer(said))
    assert (reward.status, reward.detail, len(stub.bodies)) == ("timeout", "hung", 1)


class ServedPool(FakePool):
    """Environments in this process, scorers at a stub service on the rollout's own loop."""

    def __init__(self, script, settings):
        super().__init__({"echo": EchoEnv})
        self.stub, self.reward_settings = StubService(script), settings

    async def start(self):
        await super().start()
        await self.stub.__aenter__()
        settings = replace(self.reward_settings, url=self.stub.url)
        self.http = HttpScorers(["exact_match"], settings, counts=self.counts)
        await self.http.start()

    async def close(self):
        await self.http.close()
        await self.stub.__aexit__()
        await super().close()

    async def score(self, name, task, view, **asked):
        return await self.http.score(name, task, view, **asked)


def test_no_reward_is_lost_or_zero_where_three_answers_in_ten_are_503_or_429(tmp_path):
    """Fault 6: every episode is scored, and by the service alone."""
    rng = random.Random(3)

    def script(n):
        if rng.random() < 0.3:
            return answer({"error": "busy"}, rng.choice([503, 503, 429, 500]))
        return answer({"value": 0.25 + 0.5 * (n % 2)})

    pool = ServedPool(script, replace(QUICK, retries=20, retry_budget=50))
    tasks = {"echo": echo_tasks(num=4, turns=1, reward="exact_match")}
    with running(tmp_path, tasks=tasks, pool=pool, settings=replace(SETTINGS, group_size=4)) as w:
        w.publish(0)
        rewards = [t.reward for n in range(1, 9) for g in w.step(n) for t in g.trajectories]
        assert {r.value for r in rewards} <= {0.25, 0.75} and len(rewards) == 64
        assert all(r.status == "scored" and np.isfinite(r.value) for r in rewards)
        assert {r["reason"] for r in w.records() if r["state"] == "ERRORED"} == set()
        counts = w.rollout.counts()
        assert counts["rewards/retries"] == pool.counts["reward_retries"] > 10


def test_an_episode_whose_reward_is_garbage_errors_and_is_played_again(tmp_path):
    """Fault 8: ERRORED(reward_schema), the group's policy decides, and no garbage reaches an advantage."""
    bad = [b'{"value": NaN}', b'{"value": null}', b'{"value": "1.0"}', b'{"value": 1e400}', b"[]"]
    script = lambda n: answer(bad[n // 2] if n % 2 and n < 10 else {"value": 1.0})
    pool = ServedPool(script, QUICK)
    tasks = {"echo": echo_tasks(num=4, turns=1, reward="exact_match")}
    with running(tmp_path, tasks=tasks, pool=pool) as world:
        world.publish(0)
        groups = [group for n in range(1, 4) for group in world.step(n)]
        rewards = [t.reward.value for group in groups for t in group.trajectories]
        assert rewards == [1.0] * 12
        reasons = [r["reason"] for r in world.records() if r["state"] == "ERRORED"]
        assert reasons == ["reward_schema"] * 5


# --- before a run ---------------------------------------------------------------------------------------------------


def check(script, names=("exact_match",), of_turns=(), **settings):
    async def play():
        async with StubService(script) as stub:
            settings_ = replace(QUICK, url=stub.url, **settings)
            await HttpScorers(names, settings_, of_turns=of_turns).check()

    with pytest.raises(ServiceError) as caught:
        asyncio.run(asyncio.wait_for(play(), 30))
    return str(caught.value)


def test_a_service_without_the_scorer_is_told_before_a_run():
    said = check(lambda n: answer({"scorers": ["math"]}), ("exact_match", "math"))
    assert "has no scorer exact_match; it has math; start it with --reward=" in said


def test_a_scorer_that_cannot_score_turns_there_is_told_before_a_run():
    lists = {"scorers": ["math", "judge"], "of_turns": ["judge"]}
    said = check(lambda n: answer(lists), ("judge", "math"), of_turns=["judge", "math"])
    assert ": math there has no score_turn(), which turn_reward needs; name another" in said
    said = check(lambda n: answer({"scorers": ["judge"]}), ("judge",), of_turns=["judge"])
    assert ": judge there has no score_turn()" in said  # one that does not tell is asked for none


def test_a_run_asks_its_service_whether_its_scorer_of_turns_scores_turns():
    source = TaskSource(
        "echo", "rl_jax.testing.envs:EchoEnv", reward="exact_match", turn_reward="math"
    )

    async def play():
        lists = {"scorers": ["exact_match", "math"], "of_turns": []}
        async with StubService(lambda n: answer(lists)) as stub:
            pool = EnvPool([source], RolloutSettings(), replace(QUICK, url=stub.url))
            try:
                await pool.scorers.check()
            finally:
                await pool.close()

    with pytest.raises(ServiceError, match="math there has no score_turn"):
        asyncio.run(asyncio.wait_for(play(), 30))


@pytest.mark.parametrize("body", [{}, [], {"scorers": 3}, {"scorers": [1]}])
def test_what_is_no_reward_service_is_told_before_a_run(body):
    assert "it is no reward service; start it (python -m" in check(lambda n: answer(body))


def test_a_wrong_token_is_told_before_a_run(tmp_path):
    said = check(lambda n: answer({"error": "no such token"}, 401))
    assert "status 401" in said and "no such token" in said
    (tmp_path / "token").write_text("a\nb\n")
    assert "is no token" in check(lambda n: answer({}), token_file=str(tmp_path / "token"))
    assert "cannot be read" in check(lambda n: answer({}), token_file=str(tmp_path / "none"))


@pytest.mark.slow
def test_a_service_that_nobody_can_reach_is_told_within_seconds_with_what_to_do():
    source = TaskSource("good", "rl_jax.testing.envs:EchoEnv", "exact_match")
    pool = EnvPool([source], RolloutSettings(), RewardSettings(url="http://127.0.0.1:1"))
    start_s = time.monotonic()
    with pytest.raises(EnvError, match="no connection .*reward_server.*leave rewards.url empty"):
        pool.prepare()
    assert time.monotonic() - start_s < 10
