"""The schedulers under random interleavings of everything that can happen, with a simulated driver."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from rl_jax.rollout.scheduler import REDUNDANT, SCHEDULERS, SchedulerConfig
from rl_jax.rollout.scheduler.batch import BatchScheduler
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.types import Drop, GroupView, Start, Tick, View
from tests.rollout.schedules import Risks, Simulation


@pytest.mark.parametrize("seed", range(200))
def test_bound_accounting_and_progress_under_random_interleavings(seed):
    rng = random.Random(seed)
    tags = ("a", "b", "c")[: rng.choice([1, 1, 2, 3])]
    slots, places = {"": rng.choice([1, 3, 16, 64])}, None
    if len(tags) > 1 and rng.random() < 0.5:
        slots["a"] = rng.choice([1, 5])
        if rng.random() < 0.5:  # the slots of "" serve a too
            places = {tag: ("a", "") if tag == "a" else ("",) for tag in tags}
    sim = Simulation(
        seed,
        rng.choice([0, 1, 2, 4]),
        tags,
        len(tags) * rng.choice([1, 2]),
        rng.choice([1, 2, 5]),
        slots,
        places,
    )
    sim.run(num_steps=4)
    per_tag = sorted(sim.issued_by_tag.values())
    assert per_tag[0] >= 4 * sim.need // len(tags)  # every tag got its share of every batch


def play_short(seed, policy, is_adaptive=False):
    """A short schedule, of 1 to 8 workers. Returns: what ended, and how."""
    rng = random.Random(seed)
    tags = ("a", "b")[: rng.choice([1, 1, 2])]
    extra = (len(tags) * rng.choice([1, 2]), rng.choice([0, 1])) if seed % 2 else (0, 0)
    staleness, need = rng.choice([0, 1, 1, 2]), len(tags) * rng.choice([1, 1, 2])
    if is_adaptive:
        staleness, need = 2 + staleness, len(tags)
    is_rough = rng.random() < 0.5
    risks = Risks(
        failures=rng.random() < 0.5, skips=0.0 if any(extra) else 0.3, workers=0.03 * is_rough,
        restarts=0.03 * (rng.random() < 0.5),
    )  # fmt: skip
    sim = Simulation(
        seed, staleness, tags, need, rng.choice([1, 1, 2]),
        {"": rng.choice([1, 2, 4, 12])}, policy=policy, extra=extra, risks=risks,
        workers=(rng.randint(1, 8), rng.choice([1, 2, 12])), is_adaptive=is_adaptive,
    )  # fmt: skip
    sim.run(num_steps=3 if is_adaptive else 2)
    return sim.ends


ENDS = (
    "stale", REDUNDANT, "consumed", "given up", "lost workers", "reread", "forget", "resume",
)  # fmt: skip


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("policy", [TrajectoryScheduler, BatchScheduler])
def test_10_000_short_schedules(policy):
    """The staleness bound and the buffer's, for every policy: Simulation asserts at every event. Half of them with
    redundancy, half on workers that come and go, half with restarts."""
    ends = Counter()
    for seed in range(10_000):
        ends.update(play_short(seed, policy))
    assert min(ends[end] for end in ENDS) > 100, ends


@pytest.mark.slow(seconds=10)
def test_10_000_short_schedules_under_a_bound_that_adapts():
    """As above, with the real Bound, and a SampleBuffer that must agree."""
    ends = Counter()
    for seed in range(10_000):
        ends.update(play_short(seed, (TrajectoryScheduler, BatchScheduler)[seed % 4 == 3], True))
    assert min(ends[end] for end in (*ENDS, "shrunk", "grown")) > 100, ends


class CountingScheduler(TrajectoryScheduler):
    """Counts in its state what it has issued, which a restart forgets."""

    def init(self, cfg):
        return cfg, 0

    def decide(self, state, view, event):
        rules, num_issued = state
        waiting = num_issued - view.version * view.need_groups - len(view.groups)
        view = replace(view, held={rules.tags[0]: waiting})
        actions = super().decide(rules, view, event)[1]
        started = sum(isinstance(a, Start) and a.group is None for a in actions)
        return (rules, num_issued + started), actions


@pytest.mark.parametrize("kind", ["forget", "resume"])
def test_a_scheduler_that_counts_by_itself_is_found_out(kind):
    def play(restarts):
        for seed in range(50):
            risks = Risks(failures=False, restarts=restarts)
            sim = Simulation(
                seed, 1, ("a",), 1, 1, {"": 8}, policy=CountingScheduler, risks=risks
            )  # fmt: skip
            sim.kinds = (kind,)
            sim.run(4)

    play(0.0)
    with pytest.raises(AssertionError):
        play(0.2)


def view(**changes):
    base = {
        "now_s": 0.0, "version": 3, "step": 4, "need_groups": 2, "free": {"": 100}, "groups": (),
        "buffered": 0, "oldest_unconsumed": 3,
    }  # fmt: skip
    return View(**{**base, **changes})


def flying(group, started, want=4, oldest=3, issued_s=0.0):
    return GroupView(group, "t", "a", want, started, 0, (), oldest, issued_s)


def decide(max_staleness, **changes):
    policy = TrajectoryScheduler()
    state = policy.init(SchedulerConfig(("a",), 4, max_staleness))
    return policy.decide(state, view(**changes), Tick())[1]


def test_new_groups_start_up_to_the_bound():
    assert decide(0) == [Start(None, 4, "a")] * 2
    assert decide(1) == [Start(None, 4, "a")] * 4
    assert decide(1, buffered=2, taken=1, held={"a": 3}) == [Start(None, 4, "a")]
    assert decide(0, taken=2, held={"a": 2}) == []
    assert decide(0, need_groups=0) == []


def test_no_group_starts_that_the_run_will_not_take():
    assert decide(2, batches_left=2) == [Start(None, 4, "a")] * 4
    assert decide(2, batches_left=2, held={"a": 3}) == [Start(None, 4, "a")]
    assert decide(1, batches_left=1, taken=2, held={"a": 2}) == []
    assert decide(1, batches_left=0) == []
    missing = (flying("g", 1),)
    assert decide(1, batches_left=1, groups=missing, held={"a": 1}) == [Start("g", 3, "a")]


def test_free_slots_go_to_missing_members_of_the_oldest_group_first():
    groups = (flying("young", 1, issued_s=2.0), flying("old", 2, issued_s=1.0))
    assert decide(3, free={"": 6}, groups=groups) == [
        Start("old", 2, "a"),
        Start("young", 3, "a"),
        Start(None, 1, "a"),
    ]


def test_group_beyond_the_bound_is_dropped_and_replaced():
    groups = (flying("stale", 4, oldest=1), flying("good", 4, oldest=2))
    assert decide(1, groups=groups, held={"a": 2}) == [Drop("stale", "stale"), Start(None, 4, "a")]


def test_bound_of_now_counts_in_place_of_the_highest():
    old = (flying("old", 1, oldest=2), flying("new", 1, oldest=3))
    drops = lambda bound: [
        a for a in decide(3, version=4, groups=old, bound=bound) if a == Drop("old", "stale")
    ]
    assert len(drops(1)) == 1 and drops(2) == drops(None) == []
    starts = lambda bound: len(decide(3, need_groups=1, free={"": 99}, bound=bound))
    assert [starts(bound) for bound in (0, 1, 3, None)] == [1, 2, 4, 4]


def test_tags_with_their_own_pool_use_their_own_slots():
    policy = TrajectoryScheduler()
    state = policy.init(SchedulerConfig(("a", "b"), 4, 0))
    actions = policy.decide(state, view(free={"": 4, "a": 3}, need_groups=4), Tick())[1]
    assert actions == [Start(None, 3, "a"), Start(None, 4, "b")]


def test_slot_of_two_tags_is_given_to_one_of_them():
    policy = TrajectoryScheduler()
    state = policy.init(SchedulerConfig(("a", "b"), 4, 0))
    places = {"a": ("own", "both"), "b": ("both",)}
    free = {"own": 2, "both": 3}
    actions = policy.decide(state, view(free=free, need_groups=4, places=places), Tick())[1]
    assert actions == [Start(None, 4, "a"), Start(None, 1, "b")]
    limited = view(free=free, need_groups=4, places=places, room=3)
    assert policy.decide(state, limited, Tick())[1] == [Start(None, 3, "a")]


def test_tag_whose_places_are_full_starts_elsewhere_what_nobody_who_prefers_it_wants():
    policy = TrajectoryScheduler()
    state = policy.init(SchedulerConfig(("a", "b"), 4, 0))
    places = {"a": ("p",), "b": ("q",)}

    def starts(free, **changes):
        return policy.decide(state, view(free=free, places=places, **changes), Tick())[1]

    # b's group takes its own place before a overflows into what is left of it; then a goes there in the same decision.
    free = {"p": 0, "q": 6}
    assert starts(free) == [Start(None, 4, "b"), Start(None, 2, "a")]
    assert starts(free, held={"b": 1}) == [Start(None, 4, "a")]
    missing = (flying("g", 2),)
    assert starts({"p": 1, "q": 1}, held={"b": 1}, groups=missing) == [
        Start("g", 1, "a"),
        Start("g", 1, "a"),
    ]


@pytest.mark.parametrize("policy", [TrajectoryScheduler, BatchScheduler])
def test_table_names_what_exists(policy):
    assert f"{policy.__module__}:{policy.__name__}" in SCHEDULERS.values()
