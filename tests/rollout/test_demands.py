"""A scheduler from outside: what it asks for in excess is named, and what it names that is not ends the run."""

import logging
import time
from dataclasses import replace

import pytest

from rl_jax.config import ConfigError, parse
from rl_jax.exit_codes import exit_code
from rl_jax.preflight import _try_scheduler
from rl_jax.rollout.scheduler import SchedulerConfig
from rl_jax.rollout.scheduler.batch import BatchScheduler
from rl_jax.rollout.scheduler.demands import SchedulerError, Shortfalls, checked, excess
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.types import Cancel, Drop, GroupView, Start, View
from rl_jax.waits import Watchdog
from tests.rollout.doubles import SETTINGS, echo_tasks, running

RULES = SchedulerConfig(("a", "b"), 4, 1, extra_members=1)
FLYING = GroupView("g", "t", "a", 4, 2, 1, (), 3, 0.0, extra=1)
VIEW = View(0.0, 3, 4, 4, {"": 8}, (FLYING,), 0, 3, held={"a": 1}, room=6)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "answered None; return"),
        ((0, None), r"answered \(0, None\); return"),
        ((0, [Start(None, 4, "c")]), "a group of 'c', and the tasks' tags are a, b; start"),
        ((0, [Start("h", 1, "a")]), "start members of 'h', and there is no such group among the 1"),
        ((0, [Start("g", 0, "a")]), "members=0.*; start 1 member or more"),
        ((0, [Drop("h", "old")]), "Drop.*no such group"),
        ((0, [Cancel("h/0", "old")]), "Cancel.*no such group"),
        ((0, [Cancel("g/x", "old")]), "an episode is GROUP/SAMPLE"),
        ((0, ["start"]), "asked for 'start'; use Start, Cancel or Drop"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(answer, said):
    with pytest.raises(SchedulerError, match=f"rollout.scheduler=mine .*{said}") as caught:
        checked("mine", answer, VIEW, RULES)
    assert exit_code(caught.value) == 2


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        ([Start(None, 5, "a"), Start("g", 1, "a")], []),
        ([Start("g", 2, "a"), Start("g", 1, "a")], []),
        ([Start(None, 5, "a"), Start("g", 2, "a")], ["7 episodes at once, and 6 slots are free"]),
        ([Start("g", 4, "a")], ["4 members of group g, which has room for 3"]),
        ([Start("g", 2, "a"), Start("g", 2, "a")], ["2 members of group g, which has room for 1"]),
        ([Start(None, 6, "b")], ["6 members of a new group of b, which has room for 5"]),
        ([Start(None, 3, "b")], ["3 episodes of b, whose max_live leaves room for 2"]),
    ],
)
def test_what_exceeds_what_is_there(actions, said):
    view = replace(VIEW, limits={"b": 2}) if said and "max_live" in said[0] else VIEW
    assert excess(actions, view, RULES) == said


class Greedy(TrajectoryScheduler):
    """Starts whole groups, however many slots there are."""

    def decide(self, state, view, event):
        wide = replace(view, free=dict.fromkeys(view.free, 1000), room=1000)
        return super().decide(state, wide, event)


class Endless(TrajectoryScheduler):
    """Never looks at what is waiting."""

    def decide(self, state, view, event):
        tag = state.tags[0]
        num = min(view.room, *view.free.values()) // state.group_size
        return state, [Start(None, state.group_size, tag)] * num


class Foreign(TrajectoryScheduler):
    def decide(self, state, view, event):
        return state, [Drop("r/0/99", "old")] if view.groups else super().decide(
            state, view, event
        )[1]


class Broken(TrajectoryScheduler):
    def decide(self, state, view, event):
        raise KeyError("held")


class Idle(TrajectoryScheduler):
    """Starts one group, and none more."""

    def decide(self, state, view, event):
        if view.groups or sum(view.held.values()):
            return state, []
        return state, super().decide(state, view, event)[1][:1]


def test_a_scheduler_that_asks_for_too_many_slots_is_named_and_the_run_goes_on(tmp_path, caplog):
    settings = replace(SETTINGS, scheduler="greedy", env_workers=1, envs_per_worker=3)
    with (
        caplog.at_level(logging.WARNING),
        running(tmp_path, settings=settings, policy=Greedy()) as world,
    ):
        world.publish(0)
        assert len(world.step(1)) == 2
    said = [r for r in caplog.records if getattr(r, "kind", "").startswith("what the scheduler")]
    assert said and said[0].getMessage() == (
        "rollout.scheduler=greedy asked for 4 episodes at once, and 3 slots are free; it gets what there is: let it ask"
        " for no more than its View has"
    )


def test_a_scheduler_that_issues_without_end_is_named(tmp_path, caplog):
    settings = replace(SETTINGS, scheduler="endless")
    with (
        caplog.at_level(logging.WARNING),
        running(tmp_path, settings=settings, policy=Endless()) as world,
    ):
        world.publish(0)
        world.step(1)
    said = [r.getMessage() for r in caplog.records if "beyond the buffer" in getattr(r, "kind", "")]
    assert (
        said
        and "rollout.scheduler=endless had more groups played than rollout.max_staleness" in said[0]
    )


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Foreign, "rollout.scheduler=mine asked for Drop.*r/0/99.*no such group.*; name groups of"),
        (Broken, "rollout.scheduler=mine raised KeyError in decide at .*'held'; mend it"),
    ],
)
def test_a_scheduler_that_cannot_be_obeyed_ends_the_run_at_once(tmp_path, policy, said):
    settings = replace(SETTINGS, scheduler="mine")
    with running(tmp_path, settings=settings, policy=policy()) as world:
        begin_s = time.monotonic()
        world.publish(0)
        with pytest.raises(SchedulerError, match=said):
            world.rollout.want(1, 2)
            world.buffer.take(1)
        assert time.monotonic() - begin_s < 5


def test_a_scheduler_that_starts_nothing_is_named_before_the_deadline_ends_it(tmp_path):
    settings = replace(SETTINGS, scheduler="idle", take_timeout_s=3.0)
    with running(tmp_path, settings=settings, policy=Idle()) as world:
        world.publish(0)
        world.rollout.want(1, 2)
        with pytest.raises(RuntimeError) as caught:
            world.buffer.take(1)
        waits = [wait for wait in world.rollout.waits() if "idle" in wait.what]
    assert "rollout.scheduler=idle starts nothing of echo" in str(caught.value)
    assert exit_code(caught.value) == 5
    line = Watchdog(1.0).look(waits, time.monotonic())[0]
    assert (
        "though step 1 needs 2 groups of it, 1 are here, 0 of their episodes are missing, and"
        in line
    )
    assert "slots are free (at most rollout.take_timeout_s=3)" in line


def test_who_waits_for_something_else_is_not_named():
    short = Shortfalls("mine", SchedulerConfig(("a",), 4, 1), "")

    def named(**changes):
        base = replace(VIEW, need_groups=2, groups=(), held={"a": 1})
        short.look(replace(base, **changes), 5.0)
        return len(short.waits())

    assert named() == 1
    assert named(taken=2) == 0  # what it is waits for is a step
    assert named(room=0) == named(free={"": 0}) == named(limits={"a": 0}) == 0
    assert named(batches_left=0) == named(need_groups=0) == named(held={"a": 2}) == 0
    missing = replace(FLYING, started=1, scored=1)
    assert named(groups=(missing,)) == 1 and named(groups=(replace(missing, started=2),)) == 0
    assert named() == 1 and short.waits()[0].since_s == 5.0
    short.end()
    assert short.waits() == []


@pytest.mark.parametrize("policy", [TrajectoryScheduler, BatchScheduler])
def test_our_own_policies_are_never_named(tmp_path, caplog, policy):
    tasks = {tag: echo_tasks(tag) for tag in ("a", "b")}
    settings = replace(
        SETTINGS, max_staleness=1, extra_groups=2, extra_members=1, env_workers=1, envs_per_worker=5
    )  # fmt: skip
    with (
        caplog.at_level(logging.WARNING),
        running(tmp_path, settings=settings, policy=policy(), tasks=tasks) as world,
    ):
        world.publish(0)
        for step in range(1, 6):
            world.step(step)
        assert not world.rollout._dispatcher.shortfalls.waits()
    assert not [r for r in caplog.records if "rollout.scheduler" in r.getMessage()]


def test_a_plugin_is_tried_before_anything_starts():
    settings = parse([]).settings
    for name, said in (
        ("Broken", "raised KeyError in its first decision"),
        ("SETTINGS", "not callable"),
    ):
        path = f"{__name__}:{name}"
        mine = replace(settings, rollout=replace(settings.rollout, scheduler=path))
        with pytest.raises(ConfigError, match=f"rollout.scheduler={path}.*{said}"):
            _try_scheduler(mine, lambda name, table: globals()[name.partition(":")[2]])
    _try_scheduler(settings, lambda name, table: TrajectoryScheduler)
