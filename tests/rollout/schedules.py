"""A rollout and a driver as plain counters, for schedulers under random interleavings of everything that can happen.

Owns: the invariants of a scheduler, asserted at every event. What can happen: members sample, end, fail; groups are
given up; batches are taken and published, a version sometimes in vain; workers are lost with what they play, and
return; the scheduler's state is written as JSON and read again, or is lost while all goes on; and the whole process is
lost, so that the run goes on from a checkpoint: what was in flight, waited or was trained behind it is issued again.
With an adaptive bound the driver's Bound (rollout/bound.py) sees steps that mean nothing, and a real SampleBuffer is
held beside the counters, which must agree with it.
"""

import json
import random
from collections import Counter, deque
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np

from rl_jax.rollout.bound import Bound, Limits, Seen
from rl_jax.rollout.buffer import SampleBuffer
from rl_jax.rollout.scheduler import REDUNDANT, SchedulerConfig
from rl_jax.rollout.scheduler.batch import BatchScheduler, BatchState
from rl_jax.rollout.scheduler.demands import checked, excess
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.rollout.traces import trajectory_sha256
from rl_jax.settings import RolloutSettings
from rl_jax.types import (
    Drop,
    Group,
    GroupView,
    NeedBatch,
    Outcome,
    Published,
    Reward,
    Start,
    Tick,
    Trajectory,
    View,
)

TOKENS, MASK = np.array([1, 2], np.int32), np.array([False, True])
LOGPROBS, NOT_MIXED = np.array([0.0, -1.0], np.float32), np.zeros(2, bool)
TURN_IDS, TURN_REWARDS = np.zeros(2, np.int16), np.full(1, np.nan, np.float32)
REWARD = Reward(1.0, {}, (None,), "scored", "v")


@dataclass(eq=False)
class Member:
    worker: int
    oldest: int | None = None  # version of its first token


@dataclass(eq=False)
class SimGroup:
    uid: int  # of the task: the same when it is issued again
    tag: str
    size: int
    issued_s: float
    seq: int  # in the order of issue
    running: list[Member] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)  # version of each member's oldest token

    def oldest(self, now):
        begun = [m.oldest for m in self.running if m.oldest is not None]
        return min(begun + self.scored, default=now)


class Risks(NamedTuple):
    """How often what happens. skips: a version that nobody trained for; the others: of an event."""

    failures: bool = True  # of members and groups, at random
    skips: float = 0.0
    workers: float = 0.0  # one is lost, or returns
    restarts: float = 0.0


def reread(state):
    """A scheduler's state, from its JSON."""
    tree = json.loads(json.dumps(asdict(state)))
    rules = tree["rules"] if isinstance(state, BatchState) else tree
    rules = SchedulerConfig(**{**rules, "tags": tuple(rules["tags"])})
    return BatchState(rules, tuple(tree["goals"])) if isinstance(state, BatchState) else rules


class Records:
    """Of a ledger what a buffer asks."""

    def __init__(self):
        self.ends = Counter()  # members, by state
        self.sha256s = {}

    def write(self, ref, state, **fields):
        self.ends[state] += 1

    def sha256(self, uid, attempt):
        return self.sha256s[uid]

    def flush(self):
        pass


def member_of(group, sample, oldest):
    """A trajectory of two tokens, the second of them sampled by the version `oldest`."""
    return Trajectory(
        f"{group.uid}/{sample}", 0, str(group.uid), "t", 0, group.uid, sample, group.tag,
        tokens=TOKENS, loss_mask=MASK, logprobs=LOGPROBS, versions=np.array([-1, oldest], np.int32),
        context_mixed=NOT_MIXED, turn_ids=TURN_IDS, turn_rewards=TURN_REWARDS, state_keys=("",), turns=(),
        reward=REWARD, outcome=Outcome.OK, truncated_by=None, failure=None, start_version=oldest,
    )  # fmt: skip


class Beside:
    """A SampleBuffer that gets what the counters get, and must hold and give the same."""

    def __init__(self, sim):
        self.sim = sim
        settings = RolloutSettings(
            batch_groups=sim.need, group_size=sim.size, max_staleness=sim.most
        )
        self.records = Records()
        self.buffer = SampleBuffer(settings, self.records, sim.tags)
        self.buffer.set_bound(sim.k)
        self.buffer.sweep(sim.version)

    def put(self, group):
        members = tuple(member_of(group, i, oldest) for i, oldest in enumerate(group.scored))
        self.records.sha256s.update({m.uid: trajectory_sha256(m) for m in members})
        assert self.buffer.put(Group(str(group.uid), "t", group.tag, 0, group.uid, members))
        self.check()

    def take(self):
        self.batch = self.buffer.take(self.sim.step, timeout_s=0.0)
        assert {int(group.uid) for group in self.batch} == {g.uid for g in self.sim.taken}
        assert all(self.sim.version - group.oldest_version <= self.sim.k for group in self.batch)
        self.check()

    def consumed(self):
        self.buffer.consumed(self.sim.step, self.batch)

    def sweep(self):
        self.buffer.release(self.sim.version)
        self.buffer.set_bound(self.sim.k)
        self.buffer.sweep(self.sim.version)
        self.check()

    def check(self):
        assert self.buffer.num_waiting == len(self.sim.buffered)
        assert self.buffer.held() == {t: num for t, num in self.sim.held().items() if num}
        assert self.buffer.num_waiting + self.buffer.num_taken <= self.buffer.limit


class Simulation:
    """See the module. Fails where an invariant breaks."""

    kinds = ("reread", "forget", "resume")  # of restarts

    def __init__(
        self, seed, max_staleness, tags, need, size, slots, places=None, *,
        policy=TrajectoryScheduler, extra=(0, 0), risks=Risks(), workers=(1, 1000), is_adaptive=False,
    ):  # fmt: skip
        """extra: (groups, members) beyond those that are needed. workers: (how many, episodes of each)."""
        self.rng = random.Random(seed)
        self.extra_groups, self.extra_members = extra
        self.risks = risks
        self.is_watched = seed % 8 == 0  # by scheduler/demands.py, which takes its time
        self.places = places or {tag: (tag if tag in slots else "",) for tag in tags}
        self.most, self.tags, self.need, self.size, self.slots = (
            max_staleness,
            tags,
            need,
            size,
            slots,
        )
        self.policy = policy()
        self.rules = SchedulerConfig(tags, size, max_staleness, *extra)
        self.state = self.policy.init(self.rules)
        num_workers, self.worker_size = workers
        self.alive, self.lost = list(range(num_workers)), []
        self.limits = Limits(max_staleness, window=1)
        self.bound = replace(Bound.first(self.limits), skip=0) if is_adaptive else None
        self.saved_bound = self.bound
        self.version, self.step, self.clock, self.saved = 0, 0, 0.0, 0
        self.flying, self.buffered, self.taken = [], [], []
        self.again, self.next_uid = {tag: deque() for tag in tags}, 0
        self.consumed = {}  # task -> the version that its step made
        self.dropped = set()  # tasks
        self.tag_of = {}
        self.num_issued = 0
        self.ends = Counter()
        self.issued_by_tag = dict.fromkeys(tags, 0)
        self.is_batched = policy is BatchScheduler and not any(extra)
        self.beside = Beside(self) if is_adaptive else None

    @property
    def k(self):
        """The bound of now."""
        return self.most if self.bound is None else self.bound.now

    def live(self):
        return [member for group in self.flying for member in group.running]

    def room(self):
        return len(self.alive) * self.worker_size - sum(len(g.running) for g in self.flying)

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

    def held(self):
        held = dict.fromkeys(self.tags, 0)
        for group in self.buffered + self.taken:
            held[group.tag] += 1
        return held

    def view(self):
        groups = tuple(
            GroupView(
                g.uid, "", g.tag, g.size, len(g.running) + len(g.scored), len(g.scored), (),
                g.oldest(self.version), g.issued_s, extra=self.extra_members,
            )
            for g in self.flying
        )  # fmt: skip
        return View(
            self.clock, self.version, self.step, self.need, self.free(), groups, len(self.buffered),
            0, len(self.taken), self.held(), self.places, room=self.room(),
            bound=None if self.bound is None else self.k,
        )  # fmt: skip

    def decide(self, event):
        self.clock += 1.0
        view = self.view()
        self.state, actions = self.policy.decide(self.state, view, event)
        if self.is_watched:
            checked("", (self.state, actions), view, self.rules)
            assert not excess(actions, view, self.rules)
        for action in actions:
            if isinstance(action, Drop):
                self.drop_one(action)
            else:
                self.start(action)
        held, share = self.held(), self.need // len(self.tags)
        assert len(self.buffered) + len(self.taken) <= (1 + self.most) * self.need
        assert all(held[tag] <= (1 + self.most) * share for tag in self.tags)
        assert not any(self.version - g.oldest(self.version) > self.k for g in self.flying)
        assert self.room() >= 0
        if self.k == 0 and self.taken:
            assert not any(g.running for g in self.flying)

    def drop_one(self, action):
        group = next(g for g in self.flying if g.uid == action.group)
        if action.reason == REDUNDANT:
            held, share = self.held()[group.tag], self.need // len(self.tags)
            assert self.extra_groups and held and (held % share == 0 or self.bound is not None)
        else:
            assert self.version - group.oldest(self.version) > self.k
        self.flying.remove(group)
        self.end(group, action.reason)

    def start(self, action):
        assert isinstance(action, Start) and action.members > 0
        if action.group is None:
            group = self.issue(action.tag)
        else:
            group = next(g for g in self.flying if g.uid == action.group)
        load = Counter(member.worker for member in self.live())
        for _ in range(action.members):
            worker = min(self.alive, key=lambda w: load[w])
            assert load[worker] < self.worker_size, "more started than workers hold"
            group.running.append(Member(worker))
            load[worker] += 1
        assert len(group.running) + len(group.scored) <= group.size + self.extra_members

    def issue(self, tag):
        seq, again = self.num_issued, self.again[tag]
        uid = again.popleft() if again else self.next_uid
        self.next_uid += uid == self.next_uid
        self.tag_of[uid] = tag
        group = SimGroup(uid, tag, self.size, self.clock, seq)
        assert uid not in self.consumed and uid not in {g.uid for g in self.everywhere()}
        if self.is_batched and not self.ends:
            assert all(g.seq // self.need == seq // self.need for g in self.flying)
        self.flying.append(group)
        self.num_issued += 1
        self.issued_by_tag[tag] += 1
        outstanding = self.held()[tag] + sum(g.tag == tag for g in self.flying)
        share, extra = self.need // len(self.tags), self.extra_groups // len(self.tags)
        assert outstanding <= (1 + self.k) * share + extra
        return group

    def everywhere(self):
        return self.flying + self.buffered + self.taken

    def end(self, group, reason):
        self.dropped.add(group.uid)
        self.ends[reason] += 1

    # --- what can happen ---

    def sample(self):
        """A live member samples its first token, or ends: scored, or failed and missing again."""
        group = self.rng.choice([g for g in self.flying if g.running])
        member = self.rng.choice(group.running)
        if member.oldest is None:
            member.oldest = self.version
        elif not self.risks.failures or self.rng.random() < 0.85:
            group.running.remove(member)
            group.scored.append(member.oldest)
            if len(group.scored) == group.size:
                self.flying.remove(group)
                group.running = []  # members beyond those that were wanted
                self.buffered.append(group)
                if self.beside is not None:
                    self.beside.put(group)
        else:
            group.running.remove(member)
        self.decide(Tick())

    def drop(self):
        """A group is given up (a member failed too often)."""
        group = self.rng.choice(self.flying)
        self.flying.remove(group)
        self.end(group, "given up")
        self.decide(Tick())

    def can_take(self):
        share, waiting = self.need // len(self.tags), Counter(g.tag for g in self.buffered)
        return not self.taken and all(waiting[tag] >= share for tag in self.tags)

    def take(self):
        for tag in self.tags:
            mine = [group for group in self.buffered if group.tag == tag]
            mine.sort(key=lambda group: group.oldest(self.version))
            for group in mine[: self.need // len(self.tags)]:
                # The bound, at consumption.
                assert self.version - group.oldest(self.version) <= self.k
                self.buffered.remove(group)
                self.taken.append(group)
        if self.beside is not None:
            self.beside.take()
        self.decide(Tick())

    def publish(self):
        if self.beside is not None:
            self.beside.consumed()
        self.version += 1 + (self.rng.random() < self.risks.skips)
        for group in self.taken:
            assert group.uid not in self.consumed, "trained twice"
            self.consumed[group.uid] = self.version
        self.ends["consumed"] += len(self.taken)
        self.taken = []
        if self.bound is not None:
            self.adapt()
        self.sweep()
        self.decide(Published(self.version))
        if self.rng.random() < 0.5:
            self.saved, self.saved_bound = self.version, self.bound
        self.step = self.version + 1
        self.decide(NeedBatch(self.step))

    def adapt(self):
        """The bound of the next step, from one that means nothing."""
        draw, before = self.rng.random, self.k
        step_s = 1 + draw()
        seen = Seen(
            step_s, step_s * draw(), step_s * draw(), 0.1 + 0.9 * draw(), 0.1 + 0.9 * draw()
        )
        self.bound = self.bound.saw(seen, self.limits)
        self.bound = replace(self.bound, skip=0)  # the schedule is short: it may move at each step
        assert 1 <= self.k <= self.most
        self.ends["shrunk"] += self.k < before
        self.ends["grown"] += self.k > before

    def sweep(self):
        stale = [g for g in self.buffered if self.version - g.oldest(self.version) > self.k]
        self.buffered = [g for g in self.buffered if g not in stale]
        for group in stale:
            self.end(group, "stale")
        if self.beside is not None:
            self.beside.sweep()

    def lose_worker(self):
        lost = self.rng.choice(self.alive)
        self.alive.remove(lost)
        self.lost.append(lost)
        for group in self.flying:
            group.running = [m for m in group.running if m.worker != lost]
        self.ends["lost workers"] += 1
        self.decide(Tick())

    def return_worker(self):
        self.alive.append(self.lost.pop(self.rng.randrange(len(self.lost))))
        self.decide(Tick())

    def restart(self):
        kind = self.rng.choice(self.kinds)
        self.ends[kind] += 1
        getattr(self, kind)()

    def reread(self):
        """The scheduler's state goes through its JSON; nothing may differ."""
        read = reread(self.state)
        assert read == self.state
        self.state = read
        self.decide(Tick())

    def forget(self):
        """The scheduler's state is a new one, while all goes on."""
        self.state = self.policy.init(self.rules)
        self.is_batched = False  # what is in flight is of another batch to it
        self.decide(Tick())

    def resume(self):
        """The process is lost: the run goes on from the last checkpoint, and nothing is but what that knows."""
        self.version, self.bound = self.saved, self.saved_bound
        behind = [uid for uid, version in self.consumed.items() if version > self.saved]
        for uid in behind:
            del self.consumed[uid]
            self.ends["consumed"] -= 1
        pending = {uid: tag for tag in self.tags for uid in self.again[tag]}
        pending |= {group.uid: group.tag for group in self.everywhere()}
        pending |= {uid: self.tag_of[uid] for uid in behind}
        for tag in self.tags:
            self.again[tag] = deque(sorted(uid for uid, of in pending.items() if of == tag))
        self.flying, self.buffered, self.taken = [], [], []
        self.alive, self.lost = sorted(self.alive + self.lost), []
        self.state, self.is_batched = self.policy.init(self.rules), False
        self.beside = None if self.beside is None else Beside(self)
        self.step = self.version + 1
        self.decide(Published(self.version))
        self.decide(NeedBatch(self.step))

    def run(self, num_steps):
        self.step = 1
        self.decide(NeedBatch(1))
        for _ in range(200_000):
            if self.version >= num_steps:
                return
            self.rng.choice(self.choices())()
            again = sum(map(len, self.again.values()))
            alive = len(self.everywhere())
            assert self.next_uid == len(self.consumed) + len(self.dropped) + alive + again
        raise AssertionError("no progress in 200,000 events")

    def choices(self):
        choices, draw = [], self.rng.random
        if any(g.running for g in self.flying):
            choices += [self.sample] * 20
        if self.taken:
            choices += [self.publish] * 2
        elif self.can_take():
            choices += [self.take] * 4
        if not choices and self.lost:  # nothing can go on before one returns
            return [self.return_worker]
        assert choices, "starved: nothing runs, nothing can be taken"
        if self.risks.failures and self.flying and draw() < 0.05:
            choices.append(self.drop)
        if draw() < self.risks.workers:
            returns = self.lost and (not self.alive or draw() < 0.5)
            return [self.return_worker if returns else self.lose_worker]
        if draw() < self.risks.restarts:
            return [self.restart]
        return choices
