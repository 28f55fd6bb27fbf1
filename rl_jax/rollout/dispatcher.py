"""Asks the scheduler at every event and does what it says: groups and their members, from start to the buffer.

Owns: the groups in flight (sole writer), on the rollout's loop only. Invariants: every event reaches the policy, in
order, with a View taken after everything before it was done; the capacity is enforced here, whatever a policy asks, and
what it asks for beyond that is named (scheduler/demands.py); a
member is in exactly one of: live, scored, given up, leaving, to be started; a group leaves to the buffer complete, or
is dropped with a reason for each of its members.
Life of a member: 1 Start takes a slot, writes ISSUED and creates its task. 2 When its turns are over the slot is free
(event Done) and the next episode may start while this one is scored. 3 Scored: its trajectory joins the group; the last
one completes it. Or it failed, and the short-group rule (rollout.short_group_infra) decides:
    replace    start it again as the next attempt; once max_attempts failed by themselves, its group is dropped
    survivors  go on without it; a group without members is dropped
    drop       drop the group
Where the group has spare members (rollout.extra_members), it goes on without this one instead of being dropped.
A complete group has exactly group_size members, unless `survivors` made it smaller: what else of it runs is cancelled
at once (REDUNDANT), and so is what runs of a group that the policy drops for that reason. No policy cancels a redundant
member (Cancel): which one is left over is known when the last that is wanted is scored, and a decision of its own
between that and the group's way to the buffer would leave it in flight beside its complete group. Nor is a redundant
group ended by Cancels: its group would go on without them, while Drop ends its record and its members' together.
A failure charged to the policy goes by `survivors` under every rule (the same seed would fail again), and one that no
further attempt can mend (HOPELESS) drops the group at once; the scheduler then starts another group.
A member older than max_staleness goes by rollout.short_group_stale, with the same three words, scored or not, and also
where its group is complete and waits in the buffer: `replace` takes the group back from there. With `drop` the policy
and the buffer look for such groups; else they are shed here, before the policy sees them.
Without rollout.partial_rollouts, members in flight are cancelled when weights are published, and played again.
Must not: block, decide when anything starts, or know how an episode is played.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rl_jax.clock import now_s
from rl_jax.ledger import EpisodeRef
from rl_jax.rollout.buffer import SampleBuffer, ref_of
from rl_jax.rollout.curriculum import ANY
from rl_jax.rollout.episode import Episode, EpisodeRules
from rl_jax.rollout.live_group import LiveGroup, Member
from rl_jax.rollout.player import Player, failure_reason
from rl_jax.rollout.redundancy import Redundancy
from rl_jax.rollout.scheduler import REDUNDANT, SchedulerConfig, demands
from rl_jax.rollout.slots import Slots
from rl_jax.rollout.turn_barrier import TurnBarrier
from rl_jax.settings import RolloutSettings
from rl_jax.timeline import OFF, Track
from rl_jax.types import (
    Cancel,
    Done,
    Drop,
    Dropped,
    Event,
    Failure,
    NeedBatch,
    Outcome,
    Published,
    SchedulerAction,
    SchedulerPolicy,
    Scored,
    Start,
    Tick,
    Trajectory,
    View,
)

LOG = logging.getLogger(__name__)
STALE = "stale"
NEW_WEIGHTS = "new_weights"
HOPELESS = ("prompt_over_context", "done_at_reset")


@dataclass
class Dispatcher:
    """`fatal` is told of anything that only a bug can raise."""

    player: Player
    stream: Any  # tasks.TaskStream
    buffer: SampleBuffer
    policy: SchedulerPolicy
    slots: Slots
    settings: RolloutSettings
    rules: EpisodeRules
    run_id: str
    tags: tuple[str, ...]
    fatal: Callable[[BaseException], None]

    def __post_init__(self):
        s = self.settings
        self._bound = s.max_staleness
        self._told = SchedulerConfig(
            self.tags, s.group_size, s.max_staleness, s.extra_groups, s.extra_members
        )
        self._state = self.policy.init(self._told)
        limit = f"rollout.take_timeout_s={s.take_timeout_s:g}"
        self.shortfalls = demands.Shortfalls(s.scheduler, self._told, limit)
        self._barrier = TurnBarrier() if s.env_stepping == "batch" else None
        self.redundancy = Redundancy() if s.extra_groups or s.extra_members else None
        self._groups: dict[str, LiveGroup] = {}  # in order of issue
        # Under short_group_stale=replace: what became the groups that are in the buffer.
        self._complete_ones: dict[str, LiveGroup] = {}
        self._again: dict[str, deque[Any]] = {
            tag: deque() for tag in self.tags
        }  # tasks of before a resume
        self._events: deque[Event] = deque()
        self._is_deciding = False
        self._is_stopped = False
        self._step, self._need, self.version = 0, 0, 0
        self._last_step: int | None = None
        self._idle_since_s: float | None = None
        self.track: Track = OFF
        self.wait_for_policy_s = 0.0  # wanted, but the bound let nothing run
        self.wait_for_max_live_s = 0.0  # slots were free, and a source was at its max_live
        self._limited_since_s: float | None = None
        self._free_share, self._free_since_s = 0.0, now_s()
        self.slots_idle_s = (
            0.0  # seconds times the share of slots that were free though batches were wanted
        )
        self.drops: Counter[str] = (
            Counter()
        )  # scored members of dropped groups, by the reason's first word

    # --- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Let the policy decide on the event; events that its actions cause are decided after it."""
        if self._is_stopped:
            return
        self._events.append(event)
        if self._is_deciding:
            return
        self._is_deciding = True
        try:
            while self._events:
                event = self._events.popleft()
                self._shed_stale()
                for action in self._ask(event):
                    self._apply(action)
                if isinstance(event, Tick):
                    self.shortfalls.look(self.view(), now_s())
        finally:
            self._is_deciding = False
        self._note_idle()

    def _ask(self, event: Event) -> list[SchedulerAction]:
        """What the policy decides; what it asks for beyond what exists is named. Raises: SchedulerError."""
        view, name = self.view(), self.settings.scheduler
        try:
            answer = self.policy.decide(self._state, view, event)
        except Exception as error:  # the boundary to a plugin
            raise demands.raised(name, f"decide at {event}", error) from error
        self._state, actions = demands.checked(name, answer, view, self._told)
        for text in demands.excess(actions, view, self._told):
            LOG.warning(
                "rollout.scheduler=%s asked for %s; it gets what there is: let it ask for no more than its View has",
                name, text, extra={"kind": "what the scheduler asked for in vain"},
            )  # fmt: skip
        return actions

    def want(self, step: int, num_groups: int, last_step: int | None = None) -> None:
        """The driver will take `num_groups` groups for `step`, and for no step after `last_step`."""
        self._step, self._need, self._last_step = step, num_groups, last_step
        self.handle(NeedBatch(step))

    def published(self, version: int) -> None:
        """`version` serves from now on."""
        self.version = max(self.version, version)
        self.buffer.release(version)
        self._sweep(Published(version))

    def set_bound(self, bound: int) -> None:
        """Batches are at most so many versions old from now on; what is older goes as at a version bump."""
        self._bound = bound
        self._sweep(Tick())

    def _sweep(self, event: Event) -> None:
        """What no step may consume any more leaves the buffer; then the policy decides on the event."""
        version = self.version
        for group in self.buffer.reclaim(version):
            self._groups[group.uid] = self._complete_ones[group.uid]
        held = {group.uid for group in self.buffer.snapshot()} if self._complete_ones else ()
        self._complete_ones = {u: group for u, group in self._complete_ones.items() if u in held}
        for group in self.buffer.sweep(version):
            self.handle(Dropped(group.uid, STALE))
        if not self.settings.partial_rollouts:
            self._begin_anew()
        self.handle(event)

    def view(self) -> View:
        groups = tuple(group.view(self.version) for group in self._groups.values())
        oldest = [group.oldest_version for group in groups]
        oldest.append(self.buffer.oldest_version(self.version))
        return View(
            now_s=now_s(),
            version=self.version,
            step=self._step,
            need_groups=self._need,
            free=self.slots.free(),
            groups=groups,
            buffered=self.buffer.num_waiting,
            oldest_unconsumed=min(oldest),
            taken=self.buffer.num_taken,
            held=self.buffer.held(),
            places=self.slots.places(),
            room=self.slots.room,
            limits=self.slots.limits(),
            batches_left=self._batches_left(),
            bound=self._bound,
        )

    # --- what others ask --------------------------------------------------------------------------------------------

    def again(self, issued: list[Any]) -> None:
        """Tasks that were issued before a resume and not consumed: they come before the stream's next ones."""
        for task in issued:
            tag = task.task.tag
            self._again[tag if tag in self._again else ANY].append(task)

    def num_open_episodes(self) -> int:
        """Its part of the ledger's in_flight."""
        return sum(len(g.members) + len(g.scored) for g in self._groups.values())

    def num_open_tokens(self) -> int:
        """Tokens that the members of groups in flight sampled in turns that are over. May be called from another
        thread."""
        groups = list(self._groups.values())
        scored = [s.trajectory for group in groups for s in list(group.scored.values())]
        live = [member.episode for group in groups for member in list(group.members.values())]
        return sum(t.num_sampled for t in scored) + sum(episode.num_tokens for episode in live)

    def pending(self) -> list[tuple[int, int]]:
        """(epoch, index) of every group that is issued and not consumed, those still to be issued again too."""
        keys = [(g.issued.epoch, g.issued.index) for g in self._groups.values()]
        keys += [(group.epoch, group.index) for group in self.buffer.snapshot()]
        keys += [(task.epoch, task.index) for tasks in self._again.values() for task in tasks]
        return sorted(set(keys))

    def episodes(self) -> list[Episode]:
        """Live ones, oldest group first. May be called from another thread."""
        groups = list(self._groups.values())
        return [member.episode for group in groups for member in list(group.members.values())]

    def halt(self) -> None:
        """Nothing starts any more; what runs goes on."""
        self._is_stopped = True
        self.shortfalls.end()

    def stop(self, reason: str) -> list[asyncio.Task]:
        """Nothing starts any more; all groups in flight are dropped. Returns the tasks to wait for."""
        self.halt()
        runners = [m.runner for g in self._groups.values() for m in g.members.values()]
        for uid in list(self._groups):
            self._drop(uid, reason)
        return [runner for runner in runners if runner is not None]

    # --- actions ----------------------------------------------------------------------------------------------------

    def _apply(self, action: SchedulerAction) -> None:
        match action:
            case Start(None, members, tag):
                group = self._issue(tag)
                self._start_members(group, members)
                if tag == ANY and len(group.members) < members:
                    # Its task is of a source at its limit: others may have the slots.
                    self.handle(Tick())
            case Start(str() as group, members, _):
                if group in self._groups:  # else it ended by an action of the same decision
                    self._start_members(self._groups[group], members)
            case Drop(group, reason):
                if group in self._groups:
                    self._drop(group, reason)
            case Cancel(uid, reason):
                self._cancel(uid, reason)

    def _issue(self, tag: str) -> LiveGroup:
        if self._again[tag]:
            issued = self._again[tag].popleft()
        else:
            issued = self.stream.next(None if tag == ANY else tag)
        uid = f"{self.run_id}/{issued.epoch}/{issued.index}"
        if uid in self._groups:
            raise ValueError(
                f"the task stream issued {uid} twice; (epoch, index) must be unique over tags"
            )
        s = self.settings
        group = LiveGroup(uid, issued, s.group_size, now_s(), tag, s.age_of, s.extra_members)
        self._groups[uid] = group
        return group

    def _start_members(self, group: LiveGroup, num: int) -> None:
        task = group.issued.task
        for sample in group.missing()[:num]:
            slot = self.slots.try_acquire(task.tag)
            if slot is None:
                return  # a policy that asks for more than is free: it is asked again when a slot is
            uid = f"{group.uid}/{sample}"
            attempt = self.player.ledger.next_attempt(uid)
            epoch, index = group.issued.epoch, group.issued.index
            ref = EpisodeRef(uid, attempt, group.uid, epoch, index, sample, task.tag)
            episode = self.player.issue(ref, task, self.rules, slot, self._barrier)
            member = Member(episode, slot)
            if self._barrier is not None:
                self._barrier.join(episode.session)
            group.members[sample] = member
            group.tries[sample] += 1
            member.runner = asyncio.get_running_loop().create_task(
                self._run(group, member), name=uid
            )
            member.runner.add_done_callback(lambda runner, m=member: self._ended(group, m, runner))

    async def _run(self, group: LiveGroup, member: Member) -> None:
        episode = member.episode
        await self.player.play_turns(episode)
        self._free_slot(member)
        self.handle(Done(episode.ref.uid, episode.outcome, episode.num_tokens))
        trajectory = await self.player.score(episode)
        del group.members[episode.ref.sample]
        if trajectory.outcome is Outcome.FAILED:
            self._short(group, episode.ref.sample, trajectory.failure)
        else:
            group.add(trajectory)
            self._complete(group)
        self.handle(Scored(episode.ref.uid, trajectory.reward.value))

    def _ended(self, group: LiveGroup, member: Member, runner: asyncio.Task) -> None:
        """Runs for every member, also where its coroutine never began."""
        episode = member.episode
        group.leaving.discard(episode.ref.sample)
        self._free_slot(member)
        if not runner.cancelled() and runner.exception() is not None:
            self.fatal(runner.exception())
        elif runner.cancelled():
            self._guarded(Done(episode.ref.uid, Outcome.CANCELLED, episode.num_tokens))

    def _guarded(self, event: Event) -> None:
        try:
            self.handle(event)
        except Exception as error:  # a callback has nobody above it who would be told
            self.fatal(error)

    def _short(self, group: LiveGroup, sample: int, failure: Failure) -> None:
        """A member failed: the short-group rule."""
        rule, reason = self.settings.short_group_infra, f"short: {failure_reason(failure)}"
        if failure.charged_to == "policy":
            rule = "survivors"
        if (
            failure.kind == "env_lost"
        ):  # it cost the worker of another that failed: no attempt of its own
            group.tries[sample] -= 1
        is_last_try = group.tries[sample] >= self.settings.max_attempts
        if failure.kind in HOPELESS:
            self._drop(group.uid, reason)
        elif rule == "survivors" or (group.spare and (rule == "drop" or is_last_try)):
            self._give_up(group, [sample], reason)
        elif rule == "drop" or is_last_try:
            self._drop(group.uid, reason)
        # else replace: the sample is missing, and the scheduler starts it again

    def _shed_stale(self) -> None:
        if self.settings.short_group_stale != "drop":
            for group in list(self._groups.values()):
                self._shed(group)

    def _shed(self, group: LiveGroup) -> None:
        """Members that are too old go, each with a record, and the rule of short_group_stale decides what then."""
        stale = group.stale(self.version, self._bound)
        tries = max((group.tries[sample] for sample in stale), default=0)
        is_replaced = self.settings.short_group_stale == "replace"
        if is_replaced and tries >= self.settings.max_attempts:
            self._drop(group.uid, STALE)
            return
        for sample in stale:
            if sample in group.members:
                self._leave(group, sample, STALE)
            else:
                self._drop_scored(group.remove(sample), STALE)
        # replace: the samples are missing, and the scheduler starts them again
        if stale and not is_replaced:
            self._give_up(group, stale, STALE)

    def _begin_anew(self) -> None:
        """Members that have begun under older weights are played again as their next attempt, which counts as no try;
        those whose turns are over stay."""
        for group in self._groups.values():
            for sample, member in list(group.members.items()):
                oldest = member.episode.oldest_version
                if member.slot is not None and oldest is not None and oldest < self.version:
                    group.tries[sample] -= 1
                    self._leave(group, sample, NEW_WEIGHTS)

    def _give_up(self, group: LiveGroup, samples: Iterable[int], reason: str) -> None:
        group.given_up.update(samples)
        if group.want == 0:
            self._drop(group.uid, reason)
        else:
            self._complete(group)

    def _complete(self, group: LiveGroup) -> None:
        if group.is_complete:
            del self._groups[group.uid]
            whole = group.group()
            if self.redundancy is not None:
                self.redundancy.keep(whole.trajectories)
                self.redundancy.drop((), [m.episode for m in group.members.values()])
            for sample in list(group.members):
                self._leave(group, sample, REDUNDANT)
            if not self.buffer.put(whole):
                self.handle(Dropped(whole.uid, "not buffered"))
            elif self.settings.short_group_stale == "replace":
                self._complete_ones[group.uid] = group

    def _drop(self, uid: str, reason: str) -> None:
        """Members that run are cancelled, scored ones dropped; each with the reason."""
        group = self._groups.pop(uid)
        if reason == REDUNDANT and self.redundancy is not None:
            live = [member.episode for member in group.members.values()]
            self.redundancy.drop([s.trajectory for s in group.scored.values()], live)
        for member in group.members.values():
            self._cancel_member(member, reason)
        for scored in group.scored.values():
            self._drop_scored(scored.trajectory, reason)
        self.handle(Dropped(uid, reason))

    def _drop_scored(self, trajectory: Trajectory, reason: str) -> None:
        self.player.ledger.write(ref_of(trajectory), "DROPPED", reason=reason)
        self.drops[reason.split(":")[0]] += 1

    def _cancel(self, uid: str, reason: str) -> None:
        """One member is not needed any more: the group goes on without it."""
        group_uid, _, sample = uid.rpartition("/")
        group = self._groups.get(group_uid)
        if group is None:
            return
        if int(sample) not in group.members:
            raise demands.no_episode(self.settings.scheduler, uid)
        self._cancel_member(group.members.pop(int(sample)), reason)
        self._give_up(group, [int(sample)], reason)

    def _leave(self, group: LiveGroup, sample: int, reason: str) -> None:
        """A live member is cancelled, and may be started again once it has ended."""
        group.leaving.add(sample)
        self._cancel_member(group.members.pop(sample), reason)

    def _cancel_member(self, member: Member, reason: str) -> None:
        self.player.cancel(member.episode, reason)
        member.runner.cancel()

    def _free_slot(self, member: Member) -> None:
        if member.slot is not None:
            slot, member.slot = member.slot, None
            self.slots.release(slot, member.episode.ref.tag)
            if self._barrier is not None:
                self._barrier.leave(member.episode.session)

    def _note_idle(self) -> None:
        """Count the time in which batches were wanted and nothing ran, or slots were free."""
        at_s = now_s()
        if self._idle_since_s is not None:
            self.wait_for_policy_s += at_s - self._idle_since_s
            self.track.add("wait_for_policy", self._idle_since_s, at_s)
        is_idle = self._need > 0 and not any(g.members for g in self._groups.values())
        has_all = self._has_all()
        self._idle_since_s = at_s if is_idle and not has_all else None
        self.slots_idle_s += self._free_share * (at_s - self._free_since_s)
        self._free_since_s = at_s
        if self._limited_since_s is not None:
            self.wait_for_max_live_s += at_s - self._limited_since_s
        limits, is_wanted = self.slots.limits(), self._need > 0 and not has_all
        free = min(self.slots.room, sum(self.slots.free().values())) if is_wanted else 0
        self._limited_since_s = at_s if free > 0 and 0 in limits.values() else None
        if len(limits) == len(self.tags):
            free = min(free, sum(limits.values()))  # what the limits leave free, the bound does not
        self._free_share = free / (free + self.slots.num_live) if free > 0 else 0.0

    def _batches_left(self) -> int | None:
        return None if self._last_step is None else max(0, self._last_step - self.version)

    def _has_all(self) -> bool:
        """Whether every group that the run will take is issued already."""
        left = self._batches_left()
        issued = len(self._groups) + self.buffer.num_waiting + self.buffer.num_taken
        return left is not None and issued >= left * self._need
