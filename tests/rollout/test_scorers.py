"""Scorers that break in every way: each has its status, and costs nobody else's score."""

import asyncio
import math
import os
import signal
from dataclasses import replace

import pytest

from rl_jax.settings import RewardSettings, TaskSource
from rl_jax.types import EpisodeView
from tests.rollout.bench import TIMEOUT_S, Bench

SCORES = {"zero": 0.0, "minus_zero": -0.0, "one": 1.0}
UNSCORED = {
    "none": ("schema", "value is None, no finite number"),
    "nan": ("schema", "value is nan"),
    "inf": ("schema", "value is inf"),
    "text": ("schema", "value is '1.0'"),
    "number": ("schema", "the scorer gave 1 (int), no Reward"),
    "raise": ("error", "score: RuntimeError: the environment is broken"),
    "exit": ("error", "ended with exit code 3"),
    "hang": ("timeout", "took more than rewards.timeout_s=1.5; it was at envs.py"),
}


@pytest.mark.slow
def test_each_way_a_scorer_can_answer_has_its_own_status():
    source = TaskSource(
        "good", "rl_jax.testing.envs:EchoEnv", "rl_jax.testing.envs:MisbehavingScorer"
    )
    bench = Bench([source], rewards=RewardSettings(timeout_s=TIMEOUT_S))
    task = bench.pool.list_tasks("good", "train")[0]
    view = EpisodeView((), ("x",), {}, (math.nan, None, 1.0))

    async def score(answer):
        task.payload["answer"] = answer
        return (await bench.pool.score(source.reward, task, view)).reward

    async def score_all():
        # One after the other, as a worker that ended is waited for.
        return {answer: await score(answer) for answer in [*SCORES, *UNSCORED, "one"]}

    rewards = bench.run(score_all())
    bench.close()
    for answer, value in SCORES.items():
        assert (rewards[answer].status, rewards[answer].value) == ("scored", value)
    assert math.copysign(1, rewards["minus_zero"].value) == -1
    for answer, (status, detail) in UNSCORED.items():
        assert (rewards[answer].status, rewards[answer].value) == (status, None)
        assert detail in rewards[answer].detail


@pytest.mark.slow
def test_score_is_lost_by_what_hangs_or_dies_each_time_and_by_nothing_beside_it():
    """Fault 7: scorers are pure, so a call whose worker died in it is made again; others wait apart from it."""
    source = TaskSource(
        "good", "rl_jax.testing.envs:EchoEnv", "rl_jax.testing.envs:MisbehavingScorer"
    )
    bench = Bench([source], rewards=RewardSettings(timeout_s=TIMEOUT_S), max_env_failures=3)
    pool, task = bench.pool, bench.pool.list_tasks("good", "train")[0]
    view = EpisodeView((), ("x",), {}, ())

    async def score(answer):
        asked = replace(task, payload={"answer": answer})
        return (await pool.score(source.reward, asked, view)).reward

    async def play():
        hung, *waiting = await asyncio.gather(*map(score, ["hang", "one", "one", "zero"]))
        assert (hung.status, [r.value for r in waiting]) == ("timeout", [1.0, 1.0, 0.0])
        # Who waits for a worker has no part in its end.
        assert (pool.counts["reward_env_lost"], pool.counts["reward_restarts"]) == (0, 1)
        for _ in range(4):  # more than may end in a row
            pid = pool.scorers.workers["reward_0"].pid
            os.kill(pid, signal.SIGSTOP)  # it must end with the call in it, not after its answer
            scoring = asyncio.create_task(score("one"))
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            assert (await scoring).value == 1.0
        assert pool.counts["reward_restarts"] == 5 and pool.failed is None
        dead = await score("exit")
        assert dead.status == "error" and "ended with exit code 3" in dead.detail
        # What ends its worker each time uses up the budget, and who waits for a scorer then is told.
        assert "worker reward_0 ended 4 times in a row" in (await score("exit")).detail

    try:
        bench.run(play())
        assert pool.failed.kind == "env_budget" and "without a score" in pool.failed.detail
    finally:
        bench.close()
