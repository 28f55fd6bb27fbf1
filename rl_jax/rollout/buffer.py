"""The sample buffer: complete groups that wait for the driver, and those it took and has not consumed yet.

Owns: every group between its completion and the publication of the version that its step makes. Thread-safe: the
rollout's thread puts, sweeps and releases; the driver's thread takes.
Invariants:
- bound: a group handed out for step s is at most `bound` versions older than s - 1, by its oldest trained token or,
  with age_of=start, by the episode that started first. It is max_staleness, or less (rollout.staleness_policy); how
  many groups it holds goes by max_staleness.
  Groups that grew too old are dropped at every version bump (sweep) and again at take. With short_group_stale=survivors
  only their old members are, with replace they go back to be completed (reclaim); take then leaves them alone, and a
  group of which `select` dropped members goes whole under every rule: its statistics are of all of them.
- a batch holds equal groups of each tag (with a curriculum, of any), oldest version first, and comes out sorted by
  (epoch, index): at max_staleness 0 it does not depend on which episode was quicker.
- no group leaves silently: it is consumed, or DROPPED in the ledger with its reason, and counted.
- dynamic sampling is exact: what waits here passed `select` when it came, so a filtered group takes no room and is
  replaced at once, in every mode, and a step trains batch_groups groups that passed. Sampling in vain has a bound:
  max_filtered_batches batches of a tag filtered since the batch before end the run (SelectionExhausted).
- what leaves has the sha256 that the ledger got with its COMPLETED record, and that record is on disk.
Life of a group: 1 put: `select` keeps it, or drops it, or drops some of its members, whose rewards stay for their
group's statistics. 2 take(step) moves it to `taken`. 3 consumed(step): its members are TRAINED. 4 release(version): the
step's version is published, the group is gone.
A taken group still counts as issued and not consumed; that is what holds admission at max_staleness 0.
take waits without end only while episodes make progress: `beat` is called for every turn; none for take_timeout_s
raises TakeTimeout with the status line, a failed rollout raises its error at once.
Must not: know how groups are made, or hold its lock while anything but memory is touched.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rl_jax.algorithms.staleness import buffer_limit, is_fresh, oldest_counted
from rl_jax.ledger import EpisodeRef, Ledger, LedgerError
from rl_jax.metrics import Metric
from rl_jax.rollout.curriculum import ANY
from rl_jax.rollout.selection import Select, Selection, selected
from rl_jax.rollout.traces import trajectory_sha256
from rl_jax.settings import RolloutSettings
from rl_jax.types import Group, Trajectory

LOG = logging.getLogger(__name__)


class TakeTimeout(RuntimeError):
    """No batch, and no episode made progress for take_timeout_s."""


class Interrupted(RuntimeError):
    """should_stop() became true while the driver waited for a batch or an evaluation."""


@dataclass(frozen=True)
class Entry:
    group: Group
    oldest_version: int  # that its age is counted from
    seq: int  # order of completion
    rejected: frozenset[str] = frozenset()  # uids of members that are DROPPED already

    @property
    def open_members(self) -> list[Trajectory]:
        """Those without a terminal record."""
        return [t for t in self.group.trajectories if t.uid not in self.rejected]


class SampleBuffer:
    """See the module. `tags`: of the task sources, or ANY; a batch holds batch_groups / len(tags) groups of each."""

    def __init__(
        self,
        settings: RolloutSettings,
        ledger: Ledger,
        tags: Sequence[str],
        status: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ):
        if settings.batch_groups % len(tags):
            raise ValueError(
                f"rollout.batch_groups={settings.batch_groups} is not divisible by the {len(tags)} tags"
                f" {', '.join(tags)}, which take equal shares of a batch; use"
                f" {-(-settings.batch_groups // len(tags)) * len(tags)}"
            )
        self.tags = tuple(tags)
        self._settings, self._ledger = settings, ledger
        self._bound = settings.max_staleness
        self.status = status  # what episodes do now; the rollout puts its own here
        # Algorithm.select, asked about each group as it completes; None = all are kept (nothing trains on them).
        self.select: Select | None = None
        self._selection = self._new_selection()  # since the batch before
        self._last_selection = self._new_selection()  # up to the batch that was handed on last
        # Told of a group that take() dropped, on the driver's thread.
        self.on_drop: Callable[[Group, str], None] = lambda group, reason: None
        self.poll_s = 0.5  # how soon take notices should_stop
        self._clock = clock
        self._change = threading.Condition()
        self._entries: list[Entry] = []
        # step -> what it took, until its version is published
        self._taken: dict[int, list[Entry]] = {}
        self._trained: set[int] = set()  # steps of `taken` whose groups are TRAINED
        self._seq = 0
        self._beat_s = clock()
        self._error: BaseException | None = None
        self._drops: Counter[str] = Counter()  # episodes by reason
        self._version = 0

    @property
    def share(self) -> int:
        """Groups of each tag in a batch."""
        return self._settings.batch_groups // len(self.tags)

    @property
    def limit(self) -> int:
        """Groups it may hold, taken ones included."""
        return buffer_limit(self._settings.max_staleness, self._settings.batch_groups)

    # --- the rollout's side -----------------------------------------------------------------------------------------

    def put(self, group: Group, again: bool = False) -> bool:
        """Add a complete group. False if it was dropped: too old already, not selected, or beyond the limit.

        again: it was here before, with more members, and was counted then.
        Raises: what `select` raises, or ContractError, with the group dropped: none is lost where that ends a run.
        """
        # Of all members: what a rejected one earned is in the statistics of the others.
        oldest = oldest_counted(group.trajectories, self._settings.age_of, self._version)
        try:
            chosen, reasons = selected(group, self.select)
        except Exception:
            self._drop(group.trajectories, "select_failed")
            raise
        reason = None
        with self._change:
            if not again:
                self._selection.saw(group)
            if not self._is_fresh(self._version, oldest):
                reason = "stale"
            elif chosen is None:
                reason = reasons[group.uid]
                self._selection.drop(self._share_of(group), reason)
            elif len(self._entries) + self.num_taken >= self.limit:
                reason = "buffer_full"  # a scheduler that issues more than the bound admits
            else:
                self._selection.kept += not again
                self._entries.append(Entry(chosen, oldest, self._seq, frozenset(reasons)))
                self._seq += 1
            self._beat_s = self._clock()
            self._change.notify_all()
        if reason == "buffer_full":
            LOG.warning(
                "rollout.scheduler=%s had more groups played than rollout.max_staleness lets wait: %s is complete and"
                " dropped, beside %d; let it start fewer, by View.held and View.groups",
                self._settings.scheduler, group.uid, self.limit,
                extra={"kind": "groups beyond the buffer's limit"},
            )  # fmt: skip
        if reason or chosen is None:
            self._drop(group.trajectories, str(reason))
            return False
        for member in group.trajectories:
            if member.uid in reasons:
                self._drop([member], reasons[member.uid])
        return True

    def beat(self) -> None:
        """An episode made progress."""
        self._beat_s = self._clock()  # one assignment: no lock needed

    def reclaim(self, version: int) -> list[Group]:
        """Under short_group_stale=replace, before sweep: hand back the groups with members too old for `version`; their
        records stay open. Whoever made a group drops these members and puts it again when it is complete."""
        if self._settings.short_group_stale != "replace":
            return []
        with self._change:
            self._version = max(self._version, version)
            stale = self._pop_stale(self._version)
            self._entries += [entry for entry in stale if entry.rejected]
            return [entry.group for entry in stale if not entry.rejected]

    def sweep(self, version: int) -> list[Group]:
        """`version` was published: drop what no later step may consume. Returns the groups of which nothing is left."""
        with self._change:
            self._version = max(self._version, version)
            stale = self._pop_stale(self._version)
        gone = []
        for entry in stale:
            rest = self._survivors(entry)
            kept = {trajectory.uid for trajectory in rest}
            self._drop([t for t in entry.open_members if t.uid not in kept], "stale")
            if not rest or not self.put(replace(entry.group, trajectories=rest), again=True):
                gone.append(entry.group)
        return gone

    def release(self, version: int) -> None:
        """The groups of steps up to `version` are consumed."""
        with self._change:
            done = [step for step in self._taken if step <= version]
            untrained = [s for s in done if s not in self._trained and self._taken[s]]
            if untrained:
                raise LedgerError(
                    f"version {version} was published, but consumed() was never called for step {untrained[0]}"
                )
            for step in done:
                del self._taken[step]
                self._trained.discard(step)

    def set_bound(self, bound: int) -> None:
        """No take() from now on gives what is older; the sweep of Dispatcher.set_bound drops it. Raises: ValueError."""
        most = self._settings.max_staleness
        if not 0 <= bound <= most:
            raise ValueError(f"a staleness bound of {bound}; use 0 to rollout.max_staleness={most}")
        with self._change:
            self._bound = bound

    def fail(self, error: BaseException) -> None:
        """Every take() from now on raises `error`."""
        with self._change:
            self._error = error
            self._change.notify_all()

    def clear(self, reason: str) -> None:
        """The run ends: drop what waits and what was taken and not trained."""
        with self._change:
            entries = self._open_entries()
            self._entries, self._taken = [], {}
        for entry in entries:
            self._drop(entry.open_members, reason)

    def snapshot(self) -> tuple[Group, ...]:
        """Groups issued and not consumed that are complete: those waiting, oldest first, then those taken and not
        trained."""
        with self._change:
            waiting = [
                e.group for e in sorted(self._entries, key=lambda e: (e.oldest_version, e.seq))
            ]
            held = [es for step, es in self._taken.items() if step not in self._trained]
            return (*waiting, *(entry.group for entries in held for entry in entries))

    def oldest_version(self, now: int) -> int:
        """Of any group it holds; `now` if there is none."""
        with self._change:
            held = [*self._entries, *(e for taken in self._taken.values() for e in taken)]
            return min((entry.oldest_version for entry in held), default=now)

    def held(self) -> dict[str, int]:
        """Groups waiting or taken, by tag."""
        with self._change:
            held = Counter(self._share_of(entry.group) for entry in self._entries)
            for taken in self._taken.values():
                held.update(self._share_of(entry.group) for entry in taken)
            return dict(held)

    @property
    def num_waiting(self) -> int:
        return len(self._entries)

    @property
    def num_taken(self) -> int:
        return sum(len(taken) for taken in self._taken.values())

    def num_open_episodes(self) -> int:
        """Episodes it holds that have no terminal record yet: its part of the ledger's in_flight."""
        with self._change:
            return sum(len(entry.open_members) for entry in self._open_entries())

    def num_open_tokens(self) -> int:
        """Tokens that these episodes sampled."""
        with self._change:
            members = [t for entry in self._open_entries() for t in entry.open_members]
        return sum(t.num_sampled for t in members)

    def drops(self) -> dict[str, int]:
        """Episodes dropped so far, by reason: stale, buffer_full, run_end, and "filtered: " with the algorithm's."""
        return dict(self._drops)

    # --- the driver's side ------------------------------------------------------------------------------------------

    def take(
        self,
        step: int,
        timeout_s: float | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Group]:
        """The batch of `step`, whose consuming version is step - 1; waits for it.

        Args:    timeout_s: without progress; None = take_timeout_s.
        Returns: batch_groups groups that passed `select`, sorted by (epoch, index).
        Raises:  TakeTimeout, Interrupted, SelectionExhausted, LedgerError (a sha256 changed), or the rollout's error.
        """
        timeout_s = self._settings.take_timeout_s if timeout_s is None else timeout_s
        with self._change:
            taken = self._taken.setdefault(step, [])
            self._beat_s = self._clock()
        while missing := self._missing(taken):
            for entry in self._wait(step, missing, timeout_s, should_stop):
                for trajectory in entry.open_members:
                    self._check_sha256(trajectory)
        self._ledger.flush()
        with self._change:
            taken.sort(key=_order)
            self._last_selection, self._selection = self._selection, self._new_selection()
            return [entry.group for entry in taken]

    def selection_metrics(self) -> dict[str, Metric]:
        """Of the groups completed for the batch that take() gave last; {} where nothing selects."""
        if self.select is None:
            return {}
        return self._last_selection.metrics(self._settings.batch_groups)

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        """learner.step(step) returned: its groups are TRAINED, durably when this returns."""
        with self._change:
            entries = self._taken.get(step, [])
            if [e.group.uid for e in entries] != [g.uid for g in groups]:
                raise LedgerError(
                    f"consumed(step={step}) names other groups than take(step={step}) gave"
                )
            self._trained.add(step)
        for entry in entries:
            for trajectory in entry.open_members:
                self._ledger.write(ref_of(trajectory), "TRAINED", step=step)
        self._ledger.flush()

    def discard(self, step: int, reason: str) -> None:
        """The groups of `step` are used otherwise than by training: DROPPED with `reason`, and the step is consumed."""
        with self._change:
            entries = list(self._taken.get(step, []))
            self._trained.add(step)
        for entry in entries:
            self._drop(entry.open_members, reason)
        self._ledger.flush()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _new_selection(self) -> Selection:
        return Selection(self._settings.max_filtered_batches * self.share, self.share)

    def _open_entries(self) -> list[Entry]:
        """What it holds and no step has trained. Under the lock."""
        taken = [es for step, es in self._taken.items() if step not in self._trained]
        return [*self._entries, *(entry for entries in taken for entry in entries)]

    def _missing(self, taken: Sequence[Entry]) -> dict[str, int]:
        have = Counter(self._share_of(entry.group) for entry in taken)
        return {tag: self.share - have[tag] for tag in self.tags if have[tag] < self.share}

    def _wait(self, step, missing, timeout_s, should_stop) -> list[Entry]:
        """Wait until every tag has what it misses, then move that to taken[step]."""
        while True:
            with self._change:
                if self._error is not None:
                    raise self._error
                drops = self._settings.short_group_stale == "drop"
                stale = self._pop_stale(step - 1) if drops else []  # else the sweep will come
                found = self._pop(missing, step)
                left_s = self._beat_s + timeout_s - self._clock()
                stopped = should_stop()
                if found is None:
                    self._selection.check(step, missing)
                waits = found is None and not stale and left_s > 0 and not stopped
                if waits:
                    self._change.wait(min(self.poll_s, left_s))
            for entry in stale:
                self._drop(entry.open_members, "stale")
                self.on_drop(entry.group, "stale")
            if found is not None:
                return found
            if stale or waits:
                continue
            wanted = ", ".join(f"{num} of {tag}" for tag, num in missing.items())
            text = f"step {step} waits for groups: {wanted}; {self.status()}"
            if stopped:
                raise Interrupted(text)
            raise TakeTimeout(f"no episode progress for {timeout_s:g} s; {text}")

    def _pop(self, missing: dict[str, int], step: int) -> list[Entry] | None:
        """Oldest first; None while any tag has too few."""
        found: list[Entry] = []
        for tag, num in missing.items():
            of_tag = [
                entry
                for entry in self._entries
                if self._share_of(entry.group) == tag
                and self._is_fresh(step - 1, entry.oldest_version)
            ]
            if len(of_tag) < num:
                return None
            found += sorted(of_tag, key=lambda entry: (entry.oldest_version, entry.seq))[:num]
        seqs = {entry.seq for entry in found}
        self._entries = [entry for entry in self._entries if entry.seq not in seqs]
        self._taken[step] += found
        return sorted(found, key=_order)

    def _share_of(self, group: Group) -> str:
        return group.tag if group.tag in self.tags else ANY

    def _pop_stale(self, version: int) -> list[Entry]:
        stale = [e for e in self._entries if not self._is_fresh(version, e.oldest_version)]
        if stale:
            self._entries = [e for e in self._entries if self._is_fresh(version, e.oldest_version)]
        return stale

    def _survivors(self, entry: Entry) -> tuple[Trajectory, ...]:
        """Of a stale group, the members that may still be trained, where the group goes on with them."""
        if self._settings.short_group_stale != "survivors" or entry.rejected:
            return ()
        now, age_of = self._version, self._settings.age_of
        members = entry.group.trajectories
        return tuple(t for t in members if self._is_fresh(now, oldest_counted([t], age_of, now)))

    def _is_fresh(self, version: int, oldest: int) -> bool:
        return is_fresh(version, oldest, self._bound)

    def _check_sha256(self, trajectory: Trajectory) -> None:
        """E5: equal at the COMPLETED record and here."""
        recorded = self._ledger.sha256(trajectory.uid, trajectory.attempt)
        if trajectory_sha256(trajectory) != recorded:
            raise LedgerError(
                f"{trajectory.uid}#{trajectory.attempt}: its arrays changed since its COMPLETED record"
                f" ({recorded[:12]}); something wrote to a trajectory"
            )

    def _drop(self, trajectories: Sequence[Trajectory], reason: str) -> None:
        for trajectory in trajectories:
            self._ledger.write(ref_of(trajectory), "DROPPED", reason=reason)
        self._drops[reason] += len(trajectories)


def _order(entry: Entry) -> tuple[int, int, str]:
    """Of a batch: whatever was quicker, it is the same."""
    return entry.group.epoch, entry.group.index, entry.group.uid


def ref_of(trajectory: Trajectory) -> EpisodeRef:
    """The ledger's name of a trajectory's episode."""
    t = trajectory
    return EpisodeRef(t.uid, t.attempt, t.group, t.epoch, t.index, t.sample, t.tag)
