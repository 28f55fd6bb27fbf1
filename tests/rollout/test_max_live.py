"""tasks.sources[..].max_live: no more environments of a source live at once, and nobody else waits for it."""

import asyncio
import textwrap
import time
from dataclasses import replace

import pytest

from rl_jax.config import ConfigError, parse
from rl_jax.names import resolve
from rl_jax.rollout.curriculum import ANY
from rl_jax.rollout.episode import EpisodeRules
from rl_jax.rollout.scheduler import SCHEDULERS, SchedulerConfig
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.rollout.scripted import ScriptPlan, scripted_episodes
from rl_jax.rollout.worker import EnvError
from rl_jax.settings import EvalSettings, TaskSource
from rl_jax.testing.envs import EchoEnv
from rl_jax.testing.fake_pool import FakePool, FakeStream
from rl_jax.testing.fake_sampler import FakeSampler
from rl_jax.types import Action, GroupView, Start, Tick, View
from tests.rollout.bench import GOOD, Bench
from tests.rollout.doubles import RENDERER, SETTINGS, echo_script, echo_tasks, running

BOTH = {tag: echo_tasks(tag, 4) for tag in ("few", "many")}


def pool_of(limits):
    """(a pool with these limits, the most environments of each tag that lived at once)"""
    live, most = {}, {}

    class Counted(EchoEnv):
        tag = ""

        def reset(self, task, seed):
            self.tag = task.tag
            live[self.tag] = live.get(self.tag, 0) + 1
            most[self.tag] = max(most.get(self.tag, 0), live[self.tag])
            return super().reset(task, seed)

        def close(self):
            live[self.tag] = live.get(self.tag, 0) - 1
            super().close()

    return FakePool({"echo": Counted}, limits=limits, latency=lambda verb, uid: 0.001), most


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
@pytest.mark.parametrize("limit", [1, 3])
def test_a_limited_source_trains_beside_another_and_never_passes_its_limit(
    tmp_path, scheduler, limit
):
    """Groups larger than the limit complete, few at a time."""
    pool, most = pool_of({"few": limit})
    settings = replace(SETTINGS, group_size=4, max_staleness=1, scheduler=scheduler)
    sampler = FakeSampler(script=echo_script, latency=lambda r: 0.001)
    parts = {"tasks": BOTH, "pool": pool, "sampler": sampler}
    policy = resolve(scheduler, SCHEDULERS)()
    with running(tmp_path, settings=settings, policy=policy, **parts) as world:
        world.publish(0)
        for step in range(1, 5):
            assert sorted(group.tag for group in world.step(step)) == ["few", "many"]
        counts = world.rollout.counts()
    assert most["few"] == limit and most["many"] > limit
    assert counts["time/wait_for_max_live_s"] > 0 and counts["episodes/errored"] == 0


class AnyStream(FakeStream):
    """Draws of a curriculum: tags in turn, three of `few` for each of `many`."""

    tags = ("few", "many")

    def next(self, tag):
        assert tag is None
        return super().next(ANY)


def test_a_curriculum_that_draws_a_limited_source_leaves_the_slots_to_the_others(tmp_path):
    """The first three groups are of `few`, which has one environment; the fourth's episodes live beside it at once,
    in the five slots that are left."""
    tasks = [task for i in range(4) for task in [*[BOTH["few"][i]] * 3, BOTH["many"][i]]]
    tasks = [replace(task, id=f"{i}") for i, task in enumerate(tasks)]
    pool, most = pool_of({"few": 1})
    settings = replace(SETTINGS, group_size=4, batch_groups=4, max_staleness=0)
    sampler = FakeSampler(script=echo_script, slots={"": 6}, latency=lambda r: 0.02)
    parts = {"settings": settings, "tasks": {ANY: tasks}, "pool": pool, "sampler": sampler}
    parts |= {"stream": AnyStream}
    with running(tmp_path, **parts) as world:
        world.publish(0)
        world.rollout.want(1, 4)
        groups = world.buffer.take(1)
        assert sorted(group.trajectories[0].tag for group in groups) == ["few"] * 3 + ["many"]
        assert most == {"few": 1, "many": 4}
        assert len({r.uid for r in sampler.requests[:5]}) == 5  # before any of them ended
        world.rollout.consumed(1, groups)


def view_of(groups, **more):
    return View(0.0, 0, 1, 2, {"": 8}, tuple(groups), 0, 0, **more)


def flying(uid, tag, started, source=""):
    return GroupView(uid, "t", tag, 4, started, 0, (), 0, 0.0, source=source)


def starts_of(tags, view):
    policy = TrajectoryScheduler()
    _, actions = policy.decide(policy.init(SchedulerConfig(tags, 4, 3)), view, Tick())
    return [(a.group, a.members, a.tag) for a in actions if isinstance(a, Start)]


def test_a_decision_gives_a_limited_tags_slots_to_others():
    groups = [flying("old", "few", 1)]
    tags = ("few", "many")
    free = starts_of(tags, view_of(groups))
    assert free == [("old", 3, "few"), (None, 4, "many"), (None, 1, "few")]
    assert starts_of(tags, view_of(groups, limits={"few": 0})) == [(None, 4, "many")] * 2
    assert starts_of(tags, view_of(groups, limits={"few": 2})) == [
        ("old", 2, "few"),
        (None, 4, "many"),
        (None, 2, "many"),
    ]
    mixed = [flying("x", ANY, 0, source="few"), flying("y", ANY, 2, source="many")]
    assert starts_of((ANY,), view_of(mixed, limits={"few": 1}))[:2] == [
        ("x", 1, ANY),
        ("y", 2, ANY),
    ]


def test_an_evaluation_of_a_limited_source_leaves_others_their_training(tmp_path):
    pool, most = pool_of({"few": 1})
    sampler = FakeSampler(script=echo_script, slots={"": 4}, latency=lambda r: 0.001)
    settings = replace(SETTINGS, max_staleness=1)
    with running(tmp_path, settings=settings, tasks=BOTH, pool=pool, sampler=sampler) as world:
        world.publish(0)
        world.rollout.want(1, 2)
        result = world.rollout.evaluate("eval", echo_tasks("few", 6), EvalSettings())
        assert result.num_episodes == 6 and most["few"] == 1
        trained = [r for r in sampler.requests if r.tag == "many"]
        evaluated = [r for r in sampler.requests if "/eval-" in r.uid]
        # While the evaluation of `few` went on, one episode at a time.
        assert sampler.requests.index(trained[-1]) < sampler.requests.index(evaluated[-1])
        groups = world.buffer.take(1)
        assert sorted(group.tag for group in groups) == ["few", "many"] and most["few"] == 1
        world.rollout.consumed(1, groups)


def test_scripts_of_a_limited_source_are_played_few_at_a_time():
    pool, most = pool_of({"few": 2})
    rules = EpisodeRules.of(SETTINGS, context=256, turn_deadline_s=5.0)
    plan = ScriptPlan(num=8, skill=1.0, seed=0)
    episodes = asyncio.run(scripted_episodes(pool, BOTH["few"], RENDERER, rules, plan))
    assert len(episodes) == 8 and most["few"] == 2


@pytest.mark.slow
def test_an_environment_counts_until_it_is_closed_and_waits_are_counted():
    sources = [
        replace(GOOD, max_live=1),
        *[
            TaskSource(
                tag=tag,
                env="rl_jax.testing.envs:MisbehavingEnv",
                max_live=1,
                config={"fault": fault, "at": at},
            )
            for tag, fault, at in (("bad", "raise", "step"), ("slow", "hang", "close"))
        ],
    ]
    bench = Bench(sources, env_workers=2, step_timeout_s=0.5, look=("good", "good", "bad"))

    async def play():
        pool, began_s = bench.pool, time.monotonic()
        first = await bench.open("slow")
        await first.reset()
        second = asyncio.create_task(bench.open("slow", uid="r/0/0/1"))
        bad = await bench.open("bad")  # another source's limit is its own
        closing = asyncio.create_task(first.close())
        await asyncio.sleep(0.2)
        assert first._worker.num_live + bad._worker.num_live in (1, 2)  # its place is free
        assert not second.done() and not closing.done()  # but it lives, until it is killed
        assert pool.counts["max_live_waits"] == 1
        await closing
        await second
        assert time.monotonic() - began_s > 0.5
        for _ in range(2):  # a failed call gives the source's place back, too
            with pytest.raises(EnvError):
                await bad.reset()
                await bad.step(Action("x"))
            await bad.close()
            bad = await bench.open("bad", uid="r/0/0/2")
        assert pool._live_of == {"slow": 1, "bad": 1}
        pool.open_limit = pool.open_limit._replace(seconds=0.05)
        await bench.open("bad", uid="r/0/0/3")

    try:
        told = "max_live=1 environments of tag 'bad' live; raise it, or close faster"
        with pytest.raises(EnvError, match=told) as caught:
            bench.run(play())
        assert caught.value.kind == "env_full"
    finally:
        bench.close()


@pytest.mark.parametrize("value", ["-1", "many", "1.5"])
def test_a_limit_that_is_none_is_refused(value):
    with pytest.raises(ConfigError) as error:
        parse([f"--config.tasks.sources[0].max_live={value}"])
    assert "tasks.sources[0].max_live" in str(error.value)
    assert parse(["--config.tasks.sources[0].max_live=4"]).settings.tasks.sources[0].max_live == 4


ALONE = """
    import os, time
    from rl_jax.testing.envs import EchoEnv


    class Alone(EchoEnv):
        def reset(self, task, seed):
            os.mkdir("{path}")  # raises while another is there
            time.sleep(0.1)
            os.rmdir("{path}")
            return super().reset(task, seed)
"""


@pytest.mark.slow
def test_a_look_at_first_observations_keeps_to_the_limit(tmp_path, monkeypatch):
    body = textwrap.dedent(ALONE).replace("{path}", str(tmp_path / "there"))
    (tmp_path / "alone_env.py").write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    source = TaskSource(tag="alone", env="alone_env:Alone", max_live=1)
    bench = Bench([source], env_workers=2, look=("alone",) * 4)
    bench.close()
    assert [seen.messages[0].content for seen in bench.seen] == ["say ant0"] * 4
