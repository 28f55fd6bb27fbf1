"""The whole rollout on fakes: synchronous and asynchronous steps, the bound, the deadlock shape, failures, the end."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.rollout.buffer import TakeTimeout
from rl_jax.rollout.player import EnvBudgetExhausted, FleetExhausted
from rl_jax.rollout.worker import EnvError
from rl_jax.settings import EvalSettings
from rl_jax.testing.envs import EchoEnv
from rl_jax.testing.fake_pool import FakePool
from rl_jax.testing.fake_sampler import FakeSampler
from rl_jax.types import Outcome, Reward, TurnError
from tests.rollout.doubles import SETTINGS, World, echo_script, echo_tasks, running


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 1])
def test_few_steps_end_with_the_expected_counts(tmp_path, num_steps, staleness):
    settings = replace(SETTINGS, max_staleness=staleness)
    with running(tmp_path, settings=settings) as world:
        world.publish(0)
        for step in range(1, num_steps + 1):
            groups = world.step(step)
            assert [len(g.trajectories) for g in groups] == [2, 2]
            assert all(t.reward.value == 2.0 for g in groups for t in g.trajectories)
        world.rollout.drain()
        assert world.rollout.in_flight() == 0
        counts = world.ledger.counts()
        assert counts["TRAINED"] == 4 * num_steps
        assert sum(counts.values()) == world.rollout.counts()["episodes/issued"]
        assert sum(counts[s] for s in ("ISSUED", "RUNNING", "COMPLETED", "TRUNCATED")) == 0
        assert sum(counts[s] for s in ("ERRORED", "VOID", "EVALUATED")) == 0


def test_data_set_smaller_than_the_batch_goes_into_the_next_epoch(tmp_path):
    settings = replace(SETTINGS, batch_groups=4)
    with running(tmp_path, settings=settings, tasks={"echo": echo_tasks(num=1)}) as world:
        world.publish(0)
        groups = world.step(1)
        assert [(g.epoch, g.index) for g in groups] == [(0, 0), (1, 0), (2, 0), (3, 0)]
        assert len({t.uid for g in groups for t in g.trajectories}) == 8


def test_synchronous_batch_holds_one_version_and_nothing_starts_between_take_and_publish(tmp_path):
    with running(tmp_path) as world:
        world.publish(0)
        for step in (1, 2, 3):
            world.rollout.want(step, 2)
            groups = world.buffer.take(step)
            world.rollout.check()
            issued = world.rollout.counts()["episodes/issued"]
            assert world.sampler.live == () and issued == 4 * step
            assert {
                int(v) for g in groups for t in g.trajectories for v in t.versions[t.loss_mask]
            } == {step - 1}
            world.rollout.consumed(step, groups)
            world.rollout.check()
            assert world.rollout.counts()["episodes/issued"] == issued
            world.publish(step)


def test_batches_are_equal_however_quick_each_episode_is(tmp_path):
    def batches(latency, path):
        path.mkdir()
        tasks = {"echo": echo_tasks(num=3, turns=3)}
        sampler = FakeSampler(latency=latency)  # seeded tokens
        with running(path, tasks=tasks, sampler=sampler) as world:
            world.publish(0)
            return [world.step(step) for step in (1, 2)]

    rng = np.random.default_rng(0)
    quick = batches(lambda request: 0.0, tmp_path / "a")
    slow = batches(lambda request: float(rng.random()) * 0.005, tmp_path / "b")
    for ours, theirs in zip(quick, slow):
        assert [g.uid for g in ours] == [g.uid for g in theirs]
        for a, b in zip(ours, theirs):
            for x, y in zip(a.trajectories, b.trajectories):
                assert x.uid == y.uid and np.array_equal(x.tokens, y.tokens)


@pytest.mark.slow
def test_slow_and_fast_episodes_with_a_sync_mid_stream_and_more_queued_than_may_run_finish(
    tmp_path,
):
    """The shape that deadlocks where a sync waits for episodes while more of them are queued than may run."""
    settings = replace(SETTINGS, batch_groups=4, group_size=4, max_staleness=1)
    tasks = {"fast": echo_tasks("fast", 4, turns=1), "slow": echo_tasks("slow", 4, turns=6)}
    sampler = FakeSampler(
        script=echo_script, slots={"": 3}, latency=lambda r: 0.003 if r.tag == "slow" else 0.0
    )
    with running(tmp_path, settings=settings, tasks=tasks, sampler=sampler) as world:
        world.publish(0)
        for step in range(1, 6):
            world.rollout.want(step, 4)
            groups = world.buffer.take(step)
            assert sorted(g.tag for g in groups) == ["fast", "fast", "slow", "slow"]
            for group in groups:
                assert step - 1 - group.oldest_version <= 1
            world.rollout.consumed(step, groups)
            start_s = time.monotonic()
            world.publish(step)  # while slow episodes are in the middle of their turns
            assert time.monotonic() - start_s < 0.5
            world.rollout.check()
        assert sampler.peak_live <= 3 and world.pool.peak_live <= 4


def test_tokens_keep_the_version_that_sampled_them(tmp_path):
    """A swap between two blocks of a turn, and between two turns: each token is labelled by its own version."""
    settings = replace(SETTINGS, batch_groups=1, group_size=1, max_staleness=2, max_new_tokens=8)

    def swap(request, num_tokens):
        if num_tokens == 4 and request.turn == 0:
            sampler.publish(1)

    sampler = FakeSampler(block=4, on_block=swap, alphabet=(70,))
    with running(tmp_path, settings=settings, sampler=sampler) as world:
        world.rollout.published(0)
        world.rollout.want(1, 1)
        group = world.buffer.take(1)[0]
        trajectory = group.trajectories[0]
        assert [list(turn.versions) for turn in trajectory.turns] == [[0] * 4 + [1] * 4, [1] * 8]
        assert list(trajectory.versions[trajectory.loss_mask]) == [0] * 4 + [1] * 12
        assert (trajectory.versions[~trajectory.loss_mask] == -1).all()
        assert list(trajectory.context_mixed[trajectory.loss_mask]) == [False] * 4 + [True] * 12
        assert group.oldest_version == 0 and trajectory.start_version == 0
        world.rollout.consumed(1, [group])


def test_episode_older_than_the_bound_is_cancelled_at_publish_and_replaced(tmp_path):
    release = threading.Event()

    async def sleep(seconds):
        import asyncio

        while seconds and not release.is_set():
            await asyncio.sleep(0.001)

    settings = replace(SETTINGS, batch_groups=1, group_size=1, max_staleness=1)
    sampler = FakeSampler(
        script=echo_script, sleep=sleep, latency=lambda r: float("/0/1/" in r.uid)
    )
    with running(tmp_path, settings=settings, sampler=sampler) as world:
        world.publish(0)
        assert world.step(1)[0].index == 0
        assert (
            world.step(2)[0].index == 2
        )  # index 1 hangs since version 0; at version 2 it is too old
        assert world.step(3)[0].index == 3
        release.set()
        stuck = [r for r in world.records() if r["uid"] == "r/0/1/0"]
        assert [r["state"] for r in stuck] == ["ISSUED", "RUNNING", "CANCELLED"]
        assert stuck[-1]["reason"] == "stale"
        assert ("r/0/1/0", "cancelled") in sampler.aborted and "r/0/1/0#0" in sampler.released


def test_freezing_the_consumer_never_lets_an_old_token_through(tmp_path):
    """L4: samples wait in the buffer while 20 versions pass."""
    settings = replace(SETTINGS, max_staleness=1)
    with running(tmp_path, settings=settings) as world:
        world.publish(0)
        world.rollout.want(1, 2)
        while world.buffer.num_waiting < 4:
            time.sleep(0.001)
        for version in range(1, 21):
            world.publish(version)
        groups = world.buffer.take(21)
        assert min(g.oldest_version for g in groups) >= 19
        world.rollout.consumed(21, groups)
        world.rollout.check()
        assert world.rollout.counts()["episodes/dropped_stale"] == 8


def test_failed_member_is_issued_again_and_the_group_completes(tmp_path):
    broken = {"r/0/1/1"}

    def fail(verb, uid):
        if verb == "step" and uid in broken:
            broken.remove(uid)
            return EnvError("env_timeout", f"step of {uid} hung")

    with running(tmp_path, pool=FakePool({"echo": EchoEnv}, fail=fail)) as world:
        world.publish(0)
        groups = world.step(1)
        assert [[(t.sample, t.attempt) for t in g.trajectories] for g in groups] == [
            [(0, 0), (1, 0)],
            [(0, 0), (1, 1)],
        ]
        first = [r for r in world.records() if r["uid"] == "r/0/1/1" and r["attempt"] == 0]
        assert [r["state"] for r in first] == ["ISSUED", "RUNNING", "ERRORED"]
        assert first[-1]["reason"] == "env_timeout"
        counts = world.rollout.counts()
        assert counts["episodes/retried"] == 1 and counts["episodes/errored.env_timeout"] == 1
    assert world.pool.num_live == 0 and world.sampler.live == ()


@pytest.mark.parametrize("kind, num_lost", [("env_lost", 0), ("env_died", 2)])
def test_attempts_are_used_up_by_failures_of_their_own(tmp_path, kind, num_lost):
    """env_lost: another episode broke the worker that both lived in."""
    failures = dict.fromkeys(("r/0/0/1", "r/0/1/0"), 4)

    def fail(verb, uid):
        if verb == "step" and failures.get(uid):
            failures[uid] -= 1
            return EnvError(kind, "chaos")

    settings = replace(SETTINGS, max_attempts=3)
    pool = FakePool({"echo": EchoEnv}, fail=fail)
    with running(tmp_path, settings=settings, pool=pool) as world:
        world.publish(0)
        attempts = {t.uid: t.attempt for g in world.step(1) for t in g.trajectories}
        assert sum(uid in attempts for uid in failures) == 2 - num_lost
        assert kind == "env_died" or {attempts[uid] for uid in failures} == {4}
        assert world.rollout.counts()["episodes/dropped_short"] == num_lost


def test_failure_charged_to_the_policy_is_not_repeated(tmp_path):
    def fail(verb, uid):
        return (
            EnvError("env_error", "its own fault", "policy")
            if uid == "r/0/0/1" and verb == "step"
            else None
        )

    with running(tmp_path, pool=FakePool({"echo": EchoEnv}, fail=fail)) as world:
        world.publish(0)
        assert [len(g.trajectories) for g in world.step(1)] == [1, 2]
        assert world.rollout.counts().get("episodes/retried", 0) == 0


def test_reward_paths_are_distinct(tmp_path):
    """L17: 0.0 and -0.0 are rewards; None, NaN, an exception and a timeout are typed failures, never a zero."""
    answers = {
        "zero": 0.0,
        "minus": -0.0,
        "none": None,
        "nan": float("nan"),
        "text": "1.0",
        "error": "error",
        "timeout": "timeout",
    }

    def score(task, view):
        name = task.id
        if name in ("error", "timeout"):
            return Reward(None, {}, (), name, "s", "why")
        return Reward(answers[name], {}, (), "scored", "s")

    base = echo_tasks(num=1, reward="scorer")[0]
    tasks = {name: [replace(base, id=name, tag=name)] for name in answers}
    settings = replace(
        SETTINGS, batch_groups=7, group_size=1, max_attempts=1, max_env_failures=10**6
    )
    pool = FakePool({"echo": EchoEnv}, {"scorer": score})
    with running(tmp_path, settings=settings, tasks=tasks, pool=pool) as world:
        world.publish(0)
        world.rollout.want(1, 7)
        while (
            world.buffer.num_waiting < 2
            or len({r["tag"] for r in world.records() if r["reason"]}) < 5
        ):
            time.sleep(0.002)
        scored = {g.tag: g.trajectories[0].reward for g in world.buffer.snapshot()}
        assert set(scored) == {"zero", "minus"}
        assert str(scored["zero"].value) == "0.0" and str(scored["minus"].value) == "-0.0"
        assert all(
            r.status == "scored" and set(r.parts) == {"scorer", "env"} for r in scored.values()
        )
        errored = {}
        for record in world.records():
            if record["state"] == "ERRORED":
                errored.setdefault(record["tag"], set()).add(record["reason"])
        assert errored == {
            "none": {"reward_schema"},
            "nan": {"reward_schema"},
            "text": {"reward_schema"},
            "error": {"reward_error"},
            "timeout": {"reward_timeout"},
        }


def test_completion_order_never_changes_which_reward_belongs_to_which_sample(tmp_path):
    def score(task, view):
        return Reward(float(len(view.turn_texts[0])), {}, (), "scored", "s")

    rng = np.random.default_rng(1)
    settings = replace(SETTINGS, group_size=4)
    sampler = FakeSampler(
        script=lambda r: [70] * (1 + r.seed % 9) + [7],
        latency=lambda r: float(rng.random()) * 0.004,
    )
    pool = FakePool(
        {"echo": EchoEnv}, {"scorer": score}, latency=lambda verb, uid: float(rng.random()) * 0.004
    )
    tasks = {"echo": echo_tasks(reward="scorer", turns=1)}
    with running(tmp_path, settings=settings, tasks=tasks, sampler=sampler, pool=pool) as world:
        world.publish(0)
        for trajectory in [t for g in world.step(1) for t in g.trajectories]:
            assert trajectory.reward.value == len(trajectory.turns[0].tokens) - 1


def test_environment_that_always_fails_stops_the_run_with_its_cause(tmp_path):
    def fail(verb, uid):
        return EnvError("env_error", "no module named nothing") if verb == "reset" else None

    with running(tmp_path, pool=FakePool({"echo": EchoEnv}, fail=fail)) as world:
        world.publish(0)
        world.rollout.want(1, 2)
        with pytest.raises(
            EnvBudgetExhausted, match=r"12 episodes in a row.*env_error.*no module named nothing"
        ):
            world.buffer.take(1)
        assert world.rollout.failed.exit_code == 4
        with pytest.raises(EnvBudgetExhausted):
            world.rollout.want(2, 2)


@pytest.mark.parametrize("kind", ["env_lost", "env_error"])
def test_one_event_that_ends_many_episodes_at_once_does_not_stop_the_run(tmp_path, kind):
    """A worker that hangs takes the other episodes in it along; so does a server that is fenced."""
    stepping, doomed = set(), set()

    def fail(verb, uid):
        if verb == "step" and not doomed:
            stepping.add(uid)
            if len(stepping) == 16:
                doomed.update(stepping)
        if verb == "step" and uid in doomed and uid in stepping:
            stepping.discard(uid)
            return EnvError("env_timeout" if len(stepping) == 15 else kind, "its worker ended")

    pool = FakePool({"echo": EchoEnv}, fail=fail, latency=lambda verb, uid: 0.002)
    settings = replace(SETTINGS, group_size=8, max_env_failures=3)
    tasks = {"echo": echo_tasks(turns=9, max_turns=4)}
    with running(tmp_path, settings=settings, tasks=tasks, pool=pool) as world:
        world.publish(0)
        world.step(1)
        assert world.rollout.counts()["episodes/errored"] == 16


def test_after_a_fatal_failure_nothing_starts_and_the_evaluation_names_the_cause(tmp_path):
    def fail(verb, uid):
        return EnvError("env_died", "segmentation fault") if verb == "reset" else None

    with running(tmp_path, pool=FakePool({"echo": EchoEnv}, fail=fail)) as world:
        world.publish(0)
        with pytest.raises(EnvBudgetExhausted, match="segmentation fault"):
            world.rollout.evaluate("eval", echo_tasks(num=8), EvalSettings())
        issued = world.rollout.counts()["episodes/issued"]
        world.rollout._loop.call_soon_threadsafe(world.rollout._dispatcher.want, 1, 2)
        world.rollout.check()
        assert world.rollout.counts()["episodes/issued"] == issued
        assert "segmentation fault" in world.rollout.status()


def test_one_broken_tag_beside_a_good_one_stops_the_run(tmp_path):
    """Good episodes end the run of failures only while the bound lets them start."""

    def fail(verb, uid):
        return (
            EnvError("env_error", "broken")
            if verb == "step" and int(uid.split("/")[2]) >= 4
            else None
        )

    tasks = {"good": echo_tasks("good"), "bad": echo_tasks("bad")}
    pool = FakePool({"echo": EchoEnv}, fail=fail)
    with running(tmp_path, tasks=tasks, pool=pool) as world:
        world.publish(0)
        world.rollout.want(1, 2)
        with pytest.raises(EnvBudgetExhausted, match="12 env_error"):
            world.buffer.take(1)


def test_prompt_over_the_context_drops_the_group_and_soon_stops_the_run(tmp_path):
    with running(tmp_path, context=8) as world:
        world.publish(0)
        world.rollout.want(1, 2)
        with pytest.raises(EnvBudgetExhausted, match=r"prompt has 1\d tokens, engine.context=8"):
            world.buffer.take(1)
        assert world.rollout.counts().get("episodes/retried", 0) == 0


def test_servers_that_always_fail_stop_the_run_as_a_fleet(tmp_path):
    sampler = FakeSampler(fail=lambda r: TurnError("closed", "decode.0", "the server is gone"))
    with running(tmp_path, sampler=sampler) as world:
        world.publish(0)
        world.rollout.want(1, 2)
        with pytest.raises(FleetExhausted, match="12 serve_closed"):
            world.buffer.take(1)
        assert world.rollout.failed.exit_code == 5


def test_no_progress_raises_with_what_is_awaited(tmp_path):
    async def never(seconds):
        import asyncio

        await asyncio.sleep(3600)

    sampler = FakeSampler(sleep=never)
    with running(tmp_path, sampler=sampler) as world:
        world.publish(0)
        world.rollout.want(1, 2)
        with pytest.raises(TakeTimeout) as caught:
            world.buffer.take(1, timeout_s=0.2)
        text = str(caught.value)
        for part in (
            "no episode progress for 0.2 s",
            "2 of echo",
            "4 episodes live (4 sampling)",
            "sampling turn 0",
        ):
            assert part in text
        assert world.pool.num_live == 4
    assert world.pool.num_live == 0 and len(sampler.released) == 4


def test_selection_drops_are_replaced_exactly(tmp_path):
    def select(groups):
        kept = [g for g in groups if g.index % 2 == 0]
        return kept, [(g.uid, "all_equal") for g in groups if g.index % 2]

    with running(tmp_path, tasks={"echo": echo_tasks(num=8)}) as world:
        world.publish(0)
        assert [g.index for g in world.step(1, select)] == [0, 2]
        counts = world.rollout.counts()
        assert counts["episodes/dropped_filtered"] == 2 and counts["episodes/trained"] == 4
        reasons = {r["reason"] for r in world.records() if r["state"] == "DROPPED"}
        assert reasons == {"filtered: all_equal"}


def test_pending_is_what_a_resume_must_issue_again(tmp_path):
    settings = replace(SETTINGS, max_staleness=1)
    (tmp_path / "a").mkdir()
    with running(tmp_path / "a", settings=settings, tasks={"echo": echo_tasks(num=32)}) as world:
        world.publish(0)
        world.step(1)
        while world.buffer.num_waiting < 4:
            time.sleep(0.001)
        pending = world.rollout.pending()
        assert len(pending) == 4
        by_key = {(t.epoch, t.index): t for t in world.stream.issued}
        trained = {(r["epoch"], r["index"]) for r in world.records() if r["state"] == "TRAINED"}
        assert trained | set(pending) == set(by_key) and not trained & set(pending)
    again = World(tmp_path / "a", settings=settings, tasks={"echo": echo_tasks(num=32)})
    again.ledger.void(1)
    again.sampler.publish(1)
    again.rollout.start()
    again.rollout.issue_again([by_key[key] for key in pending])
    again.rollout.want(2, 2)
    groups = again.buffer.take(2)
    assert [(g.epoch, g.index) for g in groups] == pending[:2]
    assert {t.attempt for g in groups for t in g.trajectories} == {1}
    again.rollout.consumed(2, groups)
    again.rollout.close()
    again.ledger.close()


def test_evaluation_runs_beside_training_in_shared_slots(tmp_path):
    settings = replace(SETTINGS, max_staleness=1, batch_groups=4, group_size=4)
    sampler = FakeSampler(script=echo_script, slots={"": 4}, latency=lambda r: 0.001)
    with running(tmp_path, settings=settings, sampler=sampler) as world:
        world.publish(0)
        world.rollout.want(1, 4)
        result = world.rollout.evaluate(
            "eval", echo_tasks(num=6, turns=1), EvalSettings(temperature=0.5)
        )
        assert result.success == 1.0 and result.num_episodes == 6 and result.num_errors == 0
        assert (
            result.num_mixed == 0 and result.version == 0 and result.by_tag() == {"echo": (1.0, 6)}
        )
        assert sampler.peak_live <= 4
        ours = [r for r in sampler.requests if "/eval-eval-0/" in r.uid]
        assert {r.temperature for r in ours} == {0.5} and len(ours) == 6
        groups = world.buffer.take(1)
        assert not any("eval" in g.uid for g in groups)
        world.rollout.consumed(1, groups)
        world.rollout.check()
        assert world.ledger.counts()["EVALUATED"] == 6


def test_evaluation_is_the_same_at_every_version(tmp_path):
    with running(tmp_path, sampler=FakeSampler()) as world:
        world.publish(0)
        first = world.rollout.evaluate("eval", echo_tasks(), EvalSettings())
        world.publish(1)
        again = world.rollout.evaluate("eval", echo_tasks(), EvalSettings())
        repeated = world.rollout.evaluate("eval", echo_tasks(), EvalSettings())  # as after a resume
        for a, b, c in zip(first.trajectories, again.trajectories, repeated.trajectories):
            assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.tokens, c.tokens)
            assert a.uid != b.uid and b.uid == c.uid and (b.attempt, c.attempt) == (0, 1)


def test_evaluation_counts_errors_and_never_scores_them_zero(tmp_path):
    def fail(verb, uid):
        return EnvError("env_error", "broken") if verb == "step" and "/0/0" in uid else None

    with running(tmp_path, pool=FakePool({"echo": EchoEnv}, fail=fail)) as world:
        world.publish(0)
        tasks = echo_tasks(turns=1)
        result = world.rollout.evaluate("eval", tasks, EvalSettings())
        assert (result.num_errors, result.num_episodes, result.success) == (1, 3, 1.0)
        slow = FakeSampler(script=echo_script, latency=lambda r: 60.0 if "/2/0" in r.uid else 0.0)
        world.rollout._player.tools = replace(world.rollout._player.tools, sampler=slow)
        late = world.rollout.evaluate("late", tasks, EvalSettings(timeout_s=0.3))
        assert (late.num_errors, late.num_episodes, late.success) == (2, 2, 1.0)
        with pytest.raises(RuntimeError, match="none of 1 episodes"):
            world.rollout.evaluate("none", tasks[2:3] * 0 + tasks[:1], EvalSettings(timeout_s=0.3))


def test_scripted_episodes_share_the_assembly_and_are_deterministic(tmp_path):
    with running(tmp_path) as world:
        tasks = echo_tasks(num=4)
        groups = world.rollout.scripted(tasks, 40, 0.5)
        again = world.rollout.scripted(tasks, 40, 0.5)
        solved = [g.trajectories[0].reward.value == 2.0 for g in groups]
        assert 8 <= sum(solved) <= 32
        for group, twin in zip(groups, again):
            t = group.trajectories[0]
            assert t.outcome is Outcome.OK and np.array_equal(t.tokens, twin.trajectories[0].tokens)
            assert (t.versions[t.loss_mask] == 0).all() and (t.logprobs == 0).all()
            assert int(t.loss_mask.sum()) == sum(len(turn.tokens) for turn in t.turns)
        assert [g.task_id for g in groups[:4]] == [t.id for t in tasks]
        assert world.ledger.seq == 0 and world.pool.num_live == 0


def test_script_longer_than_a_turn_is_refused(tmp_path):
    settings = replace(SETTINGS, max_new_tokens=3)
    with running(tmp_path, settings=settings) as world:
        with pytest.raises(
            Exception, match=r"script's turn has 5 tokens.*raise rollout.max_new_tokens=3"
        ):
            world.rollout.scripted(echo_tasks(), 4, 1.0)


def test_batch_that_tags_cannot_share_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"batch_groups=2 is not divisible by the 3 tags.*use 3"):
        World(tmp_path, tasks={t: echo_tasks(t) for t in "abc"})


def test_tag_without_a_server_is_refused_at_start(tmp_path):
    world = World(tmp_path, sampler=FakeSampler(slots={"other": 4}))
    with pytest.raises(ValueError, match="no server takes episodes of tag 'echo'"):
        world.rollout.start()
    world.rollout.close()
