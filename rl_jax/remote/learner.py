"""RemoteRoles: what the driver's loop knows of models that train in processes of their own (learner/roles.py).

Owns: the group of processes (group.py), and the journal: the updates since the last save, in order.
Life: 1 `begin` starts the group, which takes the weights of the run. 2 Scores and steps are orders; a step that came
back is in the journal. 3 A save that is on the disk is where a new group would begin, and empties the journal. 4 A
group that is lost is started again from there, and does the journal's updates again, which make the same weights, while
servers go on serving and episodes go on: no version is ever made twice of other weights, and the weights hold no batch
twice. What was under way is then asked again.
Invariants: the driver's state and the ledger do not change by a loss; after cluster.restarts losses, or one before the
first save, LearnerLost ends the run.
Must not: save by itself (the driver asks `wants_save`), or know what an order does.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from rl_jax.learner.batch import Batch
from rl_jax.learner.packing import Balance
from rl_jax.metrics import Metric
from rl_jax.remote.group import Group, GroupLost, Raised
from rl_jax.remote.learner_wire import (
    batch_to_wire,
    metrics_from_wire,
    whole_from_wire,
)
from rl_jax.settings import ClusterSettings, LearnerSettings
from rl_jax.types import Digest, SourceLost
from rl_jax.waits import Wait

log = logging.getLogger(__name__)


class LearnerLost(SourceLost):
    """The learner's processes are gone, and are not started again."""


@dataclass(frozen=True)
class Update:
    """One step since the last save, as it was ordered."""

    body: Mapping[str, Any]
    arrays: Sequence[np.ndarray]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class RemoteRoles:
    """In place of learner.roles.Roles. All but `digest` on the driver's thread."""

    def __init__(
        self,
        group: Group,
        policy: SimpleNamespace,
        job: Callable[[int | None], Mapping[str, Any]],
        raised: Mapping[str, Callable[[str], Exception]],
        note: Callable[..., None],
    ):
        """policy: what is asked of Roles.policy: model, mesh, param_shardings, rows.balance. job: the step
        to begin from (None: as the run does) -> the body of `build`, but for rank and address. raised: errors by name.
        note: an event of the run's, with its fields.
        """
        self.policy, self._group, self._job, self._note = policy, group, job, note
        self._raised = raised
        self._settings: ClusterSettings = group.settings
        self._journal: list[Update] = []
        self._base: int | None = None  # the step whose save a new group would begin from
        self._is_open = False
        self.num_losses = 0
        self.params: Any = None  # what a sync gets, by who wires it (weights/fetch_copy.py)

    # --- as Roles ----------------------------------------------------------------------------

    @property
    def balance(self) -> Balance:
        return self.policy.rows.balance

    @property
    def state(self) -> None:
        """It lies in the processes, which save it."""

    @property
    def wants_save(self) -> bool:
        """Whether a loss now would end the run, or take too long to mend."""
        held = sum(update.num_bytes for update in self._journal)
        return self._base is None or held > self._settings.learner_journal_bytes

    def score(self, batch: Batch, needs: Iterable[str]) -> dict[str, np.ndarray]:
        """As Roles.score."""
        if not (wanted := sorted(needs)):
            return {}
        body, arrays = batch_to_wire(batch)
        first = self._do("score", {"batch": body, "needs": wanted}, arrays)[0]
        return dict(zip(first.body["names"], first.arrays, strict=True))

    def step(self, batch: Batch, version: int = 0) -> dict[str, Metric]:
        """As Roles.step."""
        body, arrays = batch_to_wire(batch)
        update = Update({"batch": body, "version": version}, arrays)
        first = self._do("step", update.body, update.arrays)[0]
        self._journal.append(update)
        return metrics_from_wire(first.body["names"], first.arrays)

    # --- life --------------------------------------------------------------------------------

    def begin(self) -> Mapping[str, Any]:
        """Start the group; what the first process answered to `build`. Raises: LearnerLost; as building does."""
        try:
            return self._build(None)
        except GroupLost as lost:
            why = "; ".join([str(lost), *self._group.end()])
            raise LearnerLost(f"the learner's processes did not start: {why}") from None

    def open(self) -> Sequence[str]:
        """What is not trained gets its weights; what is to be noted."""
        self._is_open = True
        return self._do("open", {})[0].body["notes"]

    def teacher(self, settings: LearnerSettings, algorithm: Any) -> "RemoteTeacher":
        """A warm start's learner, with the policy's weights."""
        self._do("warm", {})
        return RemoteTeacher(self, settings, algorithm)

    def save(self, step: int, extra: Mapping[str, Any]) -> None:
        """Into the run's checkpoints; it is on the disk once `saved` returned."""
        self._do("save", {"step": step, "extra": dict(extra)})

    def saved(self, step: int, extra: Mapping[str, Any], deadline_s: float) -> None:
        """Wait for the save, made again after a loss. Raises: CheckpointError, LearnerLost."""
        while True:
            try:
                self._ask("saved", {}, deadline_s=deadline_s)
            except GroupLost as lost:
                self._recover(lost)
                self.save(step, extra)
            else:
                self._base, self._journal = step, []
                return

    def waits(self) -> list[Wait]:
        """Orders under way. Any thread."""
        return self._group.waits()

    def close(self) -> None:
        self._group.end()

    # --- for a sync --------------------------------------------------------------------------

    def fetch(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[np.dtype],
        *,
        deadline_s: float,
    ) -> list[np.ndarray]:
        """Parameters as they are served, whole. Raises: GroupLost after the group was mended: the sync's deadlines did
        not wait for that, so it is the sync that must be done again."""
        body = {"names": list(names), "dtypes": [dtype.name for dtype in dtypes]}
        try:
            answers = self._ask("fetch", body, deadline_s=deadline_s)
        except GroupLost as lost:
            self._recover(lost)
            raise GroupLost(f"{lost}; they are there again") from None
        return whole_from_wire(shapes, dtypes, [(a.body["places"], a.arrays) for a in answers])

    def digest(self, dtype: str, *, deadline_s: float) -> Digest:
        """Of the parameters as they are served. Raises: GroupLost."""
        told = self._ask("digest", {"dtype": dtype}, deadline_s=deadline_s)[0].body["digest"]
        return Digest({name: (int(a), int(b)) for name, (a, b) in told.items()})

    # --- private -----------------------------------------------------------------------------

    def _ask(
        self,
        verb: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        arrays: Sequence[np.ndarray] = (),
        **more: Any,
    ) -> list[Any]:
        """One order. Raises: GroupLost, and what the processes raised, by its own type where that is known."""
        more.setdefault("deadline_s", self._settings.learner_deadline_s)
        try:
            return self._group.order(verb, body, arrays, **more)
        except Raised as error:
            kind = self._raised.get(error.kind)
            if kind is None:
                raise RuntimeError(f"the learner's processes: {error.kind}: {error}") from None
            raise kind(str(error)) from None

    def _do(self, verb: str, body: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> list:
        """One order, again wherever the group was lost meanwhile. Raises: LearnerLost."""
        while True:
            try:
                return self._ask(verb, body, arrays)
            except GroupLost as lost:
                self._recover(lost)

    def _build(self, step: int | None) -> Mapping[str, Any]:
        """A new group with the weights of a step. Raises: GroupLost."""
        self._group.start()
        job, num = self._job(step), len(self._group.specs)
        deadline_s = self._settings.learner_deadline_s
        address = ""
        if num > 1:
            first = self._ask("address", {}, deadline_s=deadline_s, only_first=True)[0]
            address = first.body["address"]
        bodies = [{**job, "rank": rank, "num": num, "address": address} for rank in range(num)]
        return self._ask("build", bodies)[0].body

    def _recover(self, lost: GroupLost) -> None:
        """A group that is where the lost one was. Raises: LearnerLost."""
        while True:
            self.num_losses += 1
            why = "; ".join([str(lost), *self._group.end()])
            if self._base is None:
                raise LearnerLost(
                    f"the learner's processes are lost before their first save: {why}"
                )
            if self.num_losses > self._settings.restarts:
                raise LearnerLost(
                    f"the learner's processes were lost {self.num_losses} times"
                    f" (cluster.restarts={self._settings.restarts}): {why}"
                )
            log.error(
                "the learner's processes are lost (%s); they start again from step %d and repeat %d updates",
                why, self._base, len(self._journal),
            )  # fmt: skip
            self._note("learner_lost", why=why, base=self._base, updates=len(self._journal))
            try:
                self._build(self._base)
                if self._is_open:
                    self._ask("open", {})
                for update in self._journal:
                    self._ask("step", update.body, update.arrays)
                return
            except GroupLost as again:
                lost = again


class RemoteTeacher:
    """A warm start's learner in the same processes: what warm_start asks of a Learner. It comes before any save, so a
    loss in it ends the run (LearnerLost)."""

    def __init__(self, roles: RemoteRoles, settings: LearnerSettings, algorithm: Any):
        self.settings, self.algorithm, self.rows = settings, algorithm, roles.policy.rows
        self._roles = roles

    def step(self, batch: Batch, version: int = 0) -> dict[str, Metric]:
        body, arrays = batch_to_wire(batch)
        first = self._roles._do("warm_step", {"batch": body, "version": version}, arrays)[0]
        return metrics_from_wire(first.body["names"], first.arrays)

    def done(self) -> None:
        """Its weights become the policy's."""
        self._roles._do("warmed", {})
