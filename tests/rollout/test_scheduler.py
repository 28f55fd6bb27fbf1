"""The schedulers under random interleavings of everything that can happen, with a simulated driver."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from rl_jax.rollout.scheduler import REDUNDANT, SCHEDULERS, SchedulerConfig
from rl_jax.rollout.scheduler.batch import BatchScheduler
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.types import Drop, GroupView, NeedBatch, Published, Start, Tick, View


@dataclass
class SimGroup:
    uid: int
    tag: str
    size: int
    issued_s: float
    seq: int  # in the order of issue
    running: list = field(
        default_factory=list
    )  # version of the oldest token of each live member; None = none yet
    scored: list = field(default_factory=list)  # version of the oldest token of each scored member

    def oldest(self, now):
        return min([v for v in self.running + self.scored if v is not None], default=now)


class Simulation:
    """A rollout and a driver as plain counters. Fails where an invariant of the scheduler breaks.

    extra: (groups, members) beyond those that are needed; failures: of members and groups, at random; skips: how often
    a version is published that nobody trained for.
    """

    def __init__(
        self, seed, max_staleness, tags, need, size, slots, places=None, *,
        policy=TrajectoryScheduler, extra=(0, 0), failures=True, skips=0.0,
    ):  # fmt: skip
        self.rng = random.Random(seed)
        self.extra_groups, self.extra_members = extra
        self.failures, self.skips = failures, skips
        self.places = places or {tag: (tag if tag in slots else "",) for tag in tags}
        self.k, self.tags, self.need, self.size, self.slots = max_staleness, tags, need, size, slots
        self.policy = policy()
        self.state = self.policy.init(SchedulerConfig(tags, size, max_staleness, *extra))
        self.version, self.step, self.clock = 0, 0, 0.0
        self.flying, self.buffered, self.taken = [], [], []
        self.num_issued = self.num_dropped = 0
        self.ends = Counter()  # of groups
        self.issued_by_tag = dict.fromkeys(tags, 0)
        self.is_batched = policy is BatchScheduler and not any(extra)

    def free(self):
        """What Slots would say: each tag's live members fill its places in order, then any."""
        free, elsewhere = dict(self.slots), 0
        for tag in sorted(self.tags, key=lambda tag: len(self.places[tag])):
            live = sum(len(g.running) for g in self.flying if g.tag == tag)
            for place in self.places[tag]:
                taken = min(live, free[place])
                free[place], live = free[place] - taken, live - taken
            elsewhere += live
        for place in free:
            taken = min(elsewhere, free[place])
            free[place], elsewhere = free[place] - taken, elsewhere - taken
        assert not elsewhere, "more live than there are slots"
        return free

    def view(self):
        groups = tuple(
            GroupView(
                g.uid, "", g.tag, g.size, len(g.running) + len(g.scored), len(g.scored), (),
                g.oldest(self.version), g.issued_s, extra=self.extra_members,
            )
            for g in self.flying
        )  # fmt: skip
        held = {}
        for g in self.buffered + self.taken:
            held[g.tag] = held.get(g.tag, 0) + 1
        return View(
            self.clock, self.version, self.step, self.need, self.free(), groups, len(self.buffered),
            0, len(self.taken), held, self.places,
        )  # fmt: skip

    def decide(self, event):
        self.clock += 1.0
        share = self.need // len(self.tags)
        held = {t: sum(g.tag == t for g in self.buffered + self.taken) for t in self.tags}
        self.state, actions = self.policy.decide(self.state, self.view(), event)
        for action in actions:
            if isinstance(action, Drop):
                group = next(g for g in self.flying if g.uid == action.group)
                if action.reason == REDUNDANT:
                    assert self.extra_groups and held[group.tag] and held[group.tag] % share == 0
                else:
                    assert self.version - group.oldest(self.version) > self.k
                self.flying.remove(group)
                self.num_dropped += 1
                self.ends[action.reason] += 1
            elif isinstance(action, Start):
                assert action.members > 0
                if action.group is None:
                    seq = self.num_issued
                    group = SimGroup(seq, action.tag, self.size, self.clock, seq)
                    if self.is_batched and not self.num_dropped:
                        assert all(g.seq // self.need == seq // self.need for g in self.flying)
                    self.flying.append(group)
                    self.num_issued += 1
                    self.issued_by_tag[action.tag] += 1
                else:
                    group = next(g for g in self.flying if g.uid == action.group)
                group.running += [None] * action.members
                assert len(group.running) + len(group.scored) <= group.size + self.extra_members
        extra = self.extra_groups // len(self.tags)
        for tag in self.tags:
            outstanding = held[tag] + sum(g.tag == tag for g in self.flying)
            assert outstanding <= (1 + self.k) * share + extra
            assert held[tag] <= (1 + self.k) * share
        assert len(self.buffered) + len(self.taken) <= (1 + self.k) * self.need
        assert not any(self.version - g.oldest(self.version) > self.k for g in self.flying)
        if self.k == 0 and self.taken:
            assert not any(g.running for g in self.flying)

    # --- what can happen ---

    def sample(self):
        """A live member samples its first token, or ends: scored, or failed and missing again."""
        group = self.rng.choice([g for g in self.flying if g.running])
        i = self.rng.randrange(len(group.running))
        if group.running[i] is None:
            group.running[i] = self.version
        elif not self.failures or self.rng.random() < 0.85:
            group.scored.append(group.running.pop(i))
            if len(group.scored) == group.size:
                self.flying.remove(group)
                self.buffered.append(group)
        else:
            group.running.pop(i)
        self.decide(Tick())

    def drop(self):
        """A group is given up (a member failed too often)."""
        self.flying.remove(self.rng.choice(self.flying))
        self.num_dropped += 1
        self.decide(Tick())

    def can_take(self):
        share = self.need // len(self.tags)
        return not self.taken and all(
            sum(g.tag == t for g in self.buffered) >= share for t in self.tags
        )

    def take(self):
        for tag in self.tags:
            mine = sorted(
                (g for g in self.buffered if g.tag == tag), key=lambda g: g.oldest(self.version)
            )
            for group in mine[: self.need // len(self.tags)]:
                assert (
                    self.version - group.oldest(self.version) <= self.k
                )  # the bound, at consumption
                self.buffered.remove(group)
                self.taken.append(group)
        self.decide(Tick())

    def publish(self):
        self.version += 1 + (self.rng.random() < self.skips)
        self.ends["consumed"] += len(self.taken)
        self.taken = []
        stale = [g for g in self.buffered if self.version - g.oldest(self.version) > self.k]
        self.buffered = [g for g in self.buffered if g not in stale]
        self.num_dropped += len(stale)
        self.decide(Published(self.version))
        self.step += 1
        self.decide(NeedBatch(self.step))

    def run(self, num_steps):
        self.step = 1
        self.decide(NeedBatch(1))
        for _ in range(200_000):
            if self.version >= num_steps:
                return
            choices = []
            if any(g.running for g in self.flying):
                choices += [self.sample] * 20
            if self.failures and self.flying and self.rng.random() < 0.05:
                choices.append(self.drop)
            if self.taken:
                choices += [self.publish] * 2
            elif self.can_take():
                choices += [self.take] * 4
            assert choices, "starved: nothing runs, nothing can be taken"
            self.rng.choice(choices)()
            alive = len(self.flying) + len(self.buffered) + len(self.taken)
            assert self.num_issued == self.ends["consumed"] + self.num_dropped + alive
        raise AssertionError("no progress in 200,000 events")


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


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("policy", [TrajectoryScheduler, BatchScheduler])
def test_10_000_short_schedules(policy):
    """The staleness bound and the buffer's, for every policy: Simulation asserts at every event. Half of them with
    redundancy."""
    ends = Counter()
    for seed in range(10_000):
        rng = random.Random(seed)
        tags = ("a", "b")[: rng.choice([1, 1, 2])]
        extra = (len(tags) * rng.choice([1, 2]), rng.choice([0, 1])) if seed % 2 else (0, 0)
        staleness, need = rng.choice([0, 1, 1, 2]), len(tags) * rng.choice([1, 1, 2])
        sim = Simulation(
            seed, staleness, tags, need, rng.choice([1, 1, 2]), {"": rng.choice([1, 2, 4, 12])},
            policy=policy, extra=extra, failures=rng.random() < 0.5,
            skips=0.0 if any(extra) else 0.3,
        )  # fmt: skip
        sim.run(num_steps=2)
        ends.update(sim.ends)
    assert min(ends[end] for end in ("stale", REDUNDANT, "consumed")) > 100, ends


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
