"""Composite rewards, shaping that filters never see, scores of turns while an episode goes on, adaptive timeouts."""

import asyncio
from dataclasses import replace

import pytest

from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.process_grpo import ProcessGrpo
from rl_jax.rollout.adaptive import MAX_TASKS, AdaptiveTimeout
from rl_jax.rollout.reward_service import RewardService
from rl_jax.settings import (
    AlgorithmSettings,
    EvalSettings,
    FilterSettings,
    RewardSettings,
    TaskSource,
)
from rl_jax.simulate.rewards import Workload, measure
from rl_jax.testing.envs import EchoEnv
from rl_jax.testing.fake_pool import FakePool
from rl_jax.testing.trajectories import fake_group
from rl_jax.types import EpisodeView, Reward, Task
from tests.rollout.doubles import SETTINGS, echo_tasks, running

TASK = Task("t", "e", "tag", (), {}, "right", 1)
VIEW = EpisodeView((), ("a", "b"), {}, (0.5, 0.25))


def says(value, version="", status="scored", **parts):
    said = None if status != "scored" else value
    return lambda task, view, *turn: Reward(said, parts, (), status, version, "why")


SCORERS = {
    "right": says(1.0, "right/2", inner=0.5),
    "form": says(0.5),
    "zero": says(0.0, "zero/1"),
    "late": says(None, status="timeout"),
    "broken": says(None, status="error"),
}


def score(task=TASK, view=VIEW, scorers=SCORERS, **source):
    source = TaskSource("tag", "e", task.reward, **source)
    pool = FakePool({}, scorers)
    service = RewardService(pool, RewardSettings(), sources=[source])
    return asyncio.run(service.score(task, view))


@pytest.mark.parametrize(
    "kind, source, value, parts, version",
    [
        ("env", {}, 0.75, {"env": 0.75}, "env"),
        ("right", {}, 1.0, {"right": 1.0, "inner": 0.5, "env": 0.75}, "right/2"),
        ("composite", {"parts": {"right": 2.0, "form": -1.0}}, 1.5,
         {"right": 1.0, "inner": 0.5, "form": 0.5, "env": 0.75}, "right/2+form"),
        ("composite", {"parts": {"zero": 3.0}}, 0.0, {"zero": 0.0, "env": 0.75}, "zero/1"),
        ("composite", {"parts": {"right": 1.0, "env": 0.4}}, 1.3,
         {"right": 1.0, "inner": 0.5, "env": 0.75}, "right/2+env"),
        ("right", {"shaping": {"form": 0.2, "zero": 9.0}}, 1.0,
         {"right": 1.0, "inner": 0.5, "form": 0.5, "zero": 0.0, "env": 0.75, "shaping": 0.1},
         "right/2+form+zero/1"),
        ("env", {"shaping": {"form": -1.0}}, 0.75, {"env": 0.75, "form": 0.5, "shaping": -0.5}, "env+form"),
    ],
)  # fmt: skip
def test_rewards_are_joined_by_name_and_weight(kind, source, value, parts, version):
    reward, failure = score(replace(TASK, reward=kind), **source)
    assert failure is None and reward.value == pytest.approx(value)
    assert dict(reward.parts) == pytest.approx(parts) and reward.scorer_version == version


def test_an_evaluation_asks_for_the_value_alone():
    source = TaskSource("tag", "e", "right", shaping={"broken": 1.0})
    service = RewardService(FakePool({}, SCORERS), RewardSettings(), sources=[source])
    reward, failure = asyncio.run(service.score(TASK, VIEW, with_shaping=False))
    assert failure is None and (reward.value, "shaping" in reward.parts) == (1.0, False)


@pytest.mark.parametrize(
    "kind, source, status, detail",
    [
        ("composite", {"parts": {"right": 1.0, "late": 0.0}}, "timeout", "composite: part late: why"),
        ("composite", {"parts": {"right": 1.0, "broken": 1.0}}, "error", "composite: part broken: why"),
        ("right", {"shaping": {"broken": 0.1}}, "error", "right: part broken: why"),
        ("late", {"shaping": {"form": 0.1}}, "timeout", "late: part late: why"),
        ("late", {}, "timeout", "late: why"),
    ],
)  # fmt: skip
def test_where_one_part_has_no_score_the_reward_has_its_status(kind, source, status, detail):
    """L17: nothing that is missing is 0, whatever its weight."""
    reward, failure = score(replace(TASK, reward=kind), **source)
    assert (reward.status, reward.value) == (status, None)
    assert (failure.kind, failure.charged_to, failure.detail) == (status, "infra", detail)


def test_a_composite_of_an_environment_that_gives_no_reward_is_a_schema():
    view = replace(VIEW, step_rewards=(0.5, None))
    task = replace(TASK, reward="composite")
    reward, failure = score(task, view, parts={"right": 1.0, "env": 1.0})
    assert reward.status == "schema" and "part env: reward of step 1 is None" in failure.detail
    assert score(task, view, parts={"right": 1.0})[0].value == 1.0  # it is not asked for


# --- shaping and filters ----------------------------------------------------------------------------------------------


def test_filters_see_the_value_alone_and_estimators_what_shaping_added():
    """Groups of equal task rewards stay filtered however their shaping differs; advantages follow the sum."""
    equal, mixed = fake_group(0, [1.0, 1.0], [8, 8]), fake_group(1, [1.0, 0.0], [8, 8])

    def shaped(group, amounts):
        members = [
            replace(t, reward=replace(t.reward, parts={"shaping": amount}))
            for t, amount in zip(group.trajectories, amounts)
        ]
        return replace(group, trajectories=tuple(members))

    groups = [shaped(equal, [0.5, -0.5]), shaped(mixed, [-1.0, 0.0])]
    settings = AlgorithmSettings(filter=FilterSettings(equal_rewards=True))
    kept, dropped = Grpo(settings).select(groups)
    assert [g.uid for g in kept] == [groups[1].uid] and len(dropped) == 1
    values, _ = Grpo(AlgorithmSettings()).advantages(groups, {}, None)
    members = [t for group in groups for t in group.trajectories]
    ends = [float(v[t.loss_mask][0]) for v, t in zip(values, members, strict=True)]
    assert ends[0] > 0.5 > -0.5 > ends[1]  # 1.5 against 0.5
    assert ends[2:] == [0.0, 0.0]  # 0 against 0


# --- turns ------------------------------------------------------------------------------------------------------------


def play(tmp_path, scorer, num=1, env=EchoEnv, **source):
    """Groups of episodes of two turns whose turns the scorer scores, and the world's records and counts."""
    tasks = {"echo": echo_tasks(num=2, turns=2)}
    pool = FakePool({"echo": env}, {"prm": scorer}, latency=lambda verb, uid: 0.002)
    sources = [TaskSource("echo", "echo", "env", turn_reward="prm", **source)]
    settings = replace(SETTINGS, batch_groups=1, group_size=2, max_attempts=2)
    with running(tmp_path, tasks=tasks, pool=pool, settings=settings, sources=sources) as world:
        world.publish(0)
        groups = [group for n in range(1, num + 1) for group in world.step(n)]
        return groups, world.records(), world.rollout.counts()


def test_turns_are_scored_while_the_episode_goes_on_and_credit_their_own_tokens(tmp_path):
    seen, steps = [], []

    class Noting(EchoEnv):
        def step(self, action):
            steps.append(len(seen))
            return super().step(action)

    def prm(task, view, turn):
        roles = [m.role for m in view.messages]
        seen.append((turn, len(view.turn_texts), roles.count("assistant"), view.step_rewards))
        return Reward(float(turn + 1), {}, (), "scored", "prm/3")

    groups, *_ = play(tmp_path, prm, env=Noting, turn_weight=0.5)
    assert steps[0] == 0 and steps[-1] > 0  # scored between two turns, not at the end
    # At its turn's end each sees what was said until then, the environment's answer with it, and no more.
    assert sorted({item[:3] for item in seen}) == [(0, 1, 1), (1, 2, 2)]
    for member in groups[0].trajectories:
        reward = member.reward
        assert member.turn_rewards.tolist() == [0.5, 1.0] == list(reward.turn_values)
        assert reward.value == 2.0 and reward.scorer_version == "env+prm/3"
        assert dict(reward.parts) == {"env": 2.0, "turns": 3.0, "shaping": 1.5}
    # All of the shaped reward, 2 + 1.5, is on the turns: 0.5, and 1 with the task's own 2.
    scored, _ = ProcessGrpo(AlgorithmSettings())._scored(groups, {}, None)
    assert scored.rewards.tolist() == [3.5, 3.5]
    assert [turns.tolist() for turns in scored.turn_rewards()] == [[0.5, 3.0]] * 2


def test_an_evaluation_asks_for_no_turn_scores_and_no_shaping(tmp_path):
    asked = []

    def note(task, view, *turn):
        asked.append(turn)
        return Reward(None, {}, (), "error", "", "not in an evaluation")

    pool = FakePool({"echo": EchoEnv}, {"prm": note, "form": note})
    source = TaskSource("echo", "echo", "env", turn_reward="prm", shaping={"form": 1.0})
    with running(tmp_path, pool=pool, sources=[source]) as world:
        world.publish(0)
        result = world.rollout.evaluate("eval", echo_tasks(), EvalSettings())
    assert asked == [] and result.num_errors == 0 and result.num_episodes == 4


def test_a_turn_that_cannot_be_scored_leaves_the_episode_without_a_reward(tmp_path):
    failing = [True]

    def prm(task, view, turn):
        if turn == 0 and failing:
            failing.clear()
            return Reward(None, {}, (), "timeout", "prm/3", "hung")
        return Reward(1.0, {}, (), "scored", "prm/3")

    groups, records, _ = play(tmp_path, prm)
    assert [r["reason"] for r in records if r["state"] == "ERRORED"] == ["reward_timeout"]
    assert [t.reward.value for t in groups[0].trajectories] == [2.0, 2.0]
    assert sorted(t.attempt for t in groups[0].trajectories) == [0, 1]


def test_turns_that_an_older_version_scored_are_scored_again(tmp_path):
    """A model that is replaced during an episode: all of its turns are scored by one version."""
    versions = []

    def prm(task, view, turn):
        versions.append(turn)
        version = "prm/1" if turn == 0 and versions.count(0) <= 2 else "prm/2"
        return Reward(1.0 if version == "prm/1" else 10.0, {}, (), "scored", version)

    groups, records, counts = play(tmp_path, prm)
    assert {r["reason"] for r in records if r["state"] == "ERRORED"} == set()
    for member in groups[0].trajectories:
        assert member.reward.turn_values == (10.0, 10.0)
        assert member.reward.scorer_version == "env+prm/2"
    assert counts["rewards/rescored_turns"] == 2


def test_turns_that_two_versions_go_on_to_score_are_an_error(tmp_path):
    prm = lambda task, view, turn: Reward(1.0, {}, (), "scored", f"prm/{turn}")
    source = TaskSource("tag", "e", "env", turn_reward="prm")
    service = RewardService(FakePool({}, {"prm": prm}), RewardSettings(), sources=[source])

    async def score():
        turns = service.turns_of(TASK)
        for texts in (("a",), ("a", "b")):
            turns.ended(EpisodeView((), texts, {}, (0.0,) * len(texts)))
        return await service.score(replace(TASK, reward="env"), VIEW, turns)

    reward, failure = asyncio.run(score())
    assert (reward.status, reward.value) == ("error", None)
    assert "turn 0 was scored by prm/0, others by prm/1" in failure.detail


# --- adaptive timeout -------------------------------------------------------------------------------------------------


def test_the_limit_follows_the_slowest_answer_above_zero_within_its_bounds():
    timeout = AdaptiveTimeout(30.0)
    assert timeout.limit_s("a") == 30.0  # nothing is known
    for value, seconds, limit_s in [
        (0.0, 9.0, 30.0),  # a wrong answer says nothing
        (None, 9.0, 30.0),
        (1.0, 0.1, 2.0),
        (1.0, 4.0, 6.0),
        (0.5, 3.0, 6.0),  # the slowest
        (1.0, 25.0, 30.0),
    ]:
        timeout.saw("a", value, seconds)
        assert timeout.limit_s("a") == limit_s
    assert timeout.limit_s("b") == 30.0


def test_tasks_that_were_not_seen_for_long_are_forgotten(monkeypatch):
    timeout = AdaptiveTimeout(30.0)
    for i in range(MAX_TASKS + 1):
        timeout.saw(str(i), 1.0, 1.0)
        timeout.limit_s("0")
    assert (timeout.limit_s("0"), timeout.limit_s("1"), timeout.limit_s("2")) == (2.0, 30.0, 2.0)


def test_scorers_are_asked_with_the_limit_that_was_learnt():
    limits = []

    class Timed(FakePool):
        async def score(self, name, task, view, **asked):
            limits.append(asked["limit_s"])
            return (await super().score(name, task, view))._replace(seconds=4.0)

    settings = RewardSettings(timeout_s=30.0, adaptive_timeout=True)
    service = RewardService(Timed({}, SCORERS), settings)

    async def play():
        for task_id in ("t", "t", "other", "t"):
            await service.score(replace(TASK, id=task_id), VIEW)

    asyncio.run(play())
    assert limits == [30.0, 6.0, 30.0, 6.0]


@pytest.mark.slow
def test_a_twentieth_of_calls_that_hang_costs_little_and_cuts_no_right_answer():
    """P6 on the virtual clock; benchmarks/reward_timeout.py has more of it."""
    workload = Workload(tasks=32, batch=16, visits=3)
    fixed, adaptive = (measure(workload, 30.0, adaptive=on) for on in (False, True))
    assert fixed.hung == adaptive.hung > 20
    assert adaptive.wall_s <= 0.65 * fixed.wall_s
    assert (fixed.cut, adaptive.cut) == (0, 0)
