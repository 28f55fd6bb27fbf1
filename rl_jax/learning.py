"""Where the models of a run train: in the driver's process, or in processes of their own on the same config.

Owns: what of a run's start differs between the two: how roles are made, get their first weights and are saved.
Life of either: 1 the constructor makes the roles, without weights. 2 `begin` gives them the weights that the run starts
from. 3 `teacher` and `adopt` are a warm start's. 4 `open` gives weights to what is not trained.
Must not: know what a step is.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import jax

from rl_jax import schema
from rl_jax.algorithms import ALGORITHMS
from rl_jax.algorithms.algorithm import RewardPartError
from rl_jax.algorithms.contract import AlgorithmRaised
from rl_jax.build_roles import Setting, make_roles, open_roles
from rl_jax.checkpoint import Checkpointer, CheckpointError
from rl_jax.cluster import learner_specs
from rl_jax.config import ConfigError
from rl_jax.driver import DriverState
from rl_jax.learner.packing import balance_of
from rl_jax.learner.trained import NonFiniteError
from rl_jax.learner_process import decision_to_wire, state_from_wire
from rl_jax.mesh import abstract_mesh, full_axes, mesh_axes, shardings
from rl_jax.models.hf_files import WeightsError
from rl_jax.models.model import Model
from rl_jax.remote.group import Group
from rl_jax.remote.learner import RemoteRoles
from rl_jax.remote.starter import Starter
from rl_jax.resume import Decision
from rl_jax.settings import AlgorithmSettings
from rl_jax.start import make_learner, make_warm_learner, starting_point, verified, warm_settings
from rl_jax.timeline import OFF, Traces, Track
from rl_jax.waits import Wait
from rl_jax.weights.fetch_copy import Elsewhere, FetchCopy

SAVE_GRACE_S = 10.0  # for a process to tell that a save is overdue
# What the processes raise that has a meaning for who started the run.
RAISED: Mapping[str, Callable[[str], Exception]] = {
    "NonFiniteError": NonFiniteError,
    "CheckpointError": CheckpointError,
    "WeightsError": WeightsError,
    "AlgorithmRaised": AlgorithmRaised,
    "ContractError": AlgorithmRaised,
    "NotFinite": AlgorithmRaised,
    "RewardPartError": RewardPartError,
    "ConfigError": lambda text: ConfigError([text]),
    "ValueError": ValueError,
    "FileNotFoundError": FileNotFoundError,
}

log = logging.getLogger(__name__)


class Learning(Protocol):
    """Of one run."""

    roles: Any  # learner.roles.Roles, or remote.learner.RemoteRoles
    checkpointer: Any
    transport: Any  # of its weights to servers; None: the sync's own

    def begin(self) -> tuple[DriverState, dict[str, Any]]:
        """Weights into the roles; the driver's state and the checkpoint's extra."""
        ...

    def teacher(self) -> Any: ...

    def adopt(self, teacher: Any) -> None: ...

    def open(self) -> None: ...

    def trace(self, traces: Traces) -> None:
        """Have the timeline know what is computed in this process; others tell by their links."""
        ...

    def waits(self) -> list[Wait]:
        """What is waited for of saves and of the learner's processes. Any thread."""
        ...


class LearnsHere:
    """On the plan's train mesh, in this process."""

    transport = None

    def __init__(
        self,
        job: Setting,
        model: Model,
        algorithm: Any,
        decision: Decision,
        checkpointer: Checkpointer,
    ):
        self.roles = make_roles(job, make_learner(job, model, algorithm))
        self.checkpointer = checkpointer
        self._job, self._model, self._decision = job, model, decision
        self._source: Path | None = None
        self._track: Track = OFF

    def trace(self, traces: Traces) -> None:
        self._track = traces.track("train/learner")
        self.roles.trace(self._track)

    def begin(self) -> tuple[DriverState, dict[str, Any]]:
        state, extra, self._source = starting_point(
            self._job, self._decision, self.checkpointer, self.roles
        )
        return state, extra

    def teacher(self) -> Any:
        teacher = make_warm_learner(self._job, self._model)
        teacher.reset(self.roles.params)
        teacher.track = self._track
        return teacher

    def adopt(self, teacher: Any) -> None:
        policy: Any = self.roles.policy
        policy.reset(teacher.params)

    def open(self) -> None:
        open_roles(self._job, self.roles, self._source)

    def waits(self) -> list[Wait]:
        return self.checkpointer.waits()


class LearnsElsewhere:
    """In cluster.learner_processes processes, each with its part of the train mesh's devices."""

    transport = FetchCopy

    def trace(self, traces: Traces) -> None:
        """Their starter has it (Cluster.trace)."""

    def __init__(
        self,
        job: Setting,
        model: Model,
        decision: Decision,
        starter: Starter,
        event: Callable[..., None],
    ):
        """starter: of learner_specs. event: a line of events.jsonl."""
        self._job, self._model, self._decision = job, model, decision
        settings, train = job.settings, job.plan.train
        assert train is not None, "config.parse refuses a plan without a train mesh"
        (axes,) = mesh_axes(("batch",), train.rules)
        num_shards = math.prod(full_axes(train.axes)[axis] for axis in axes)
        mesh = abstract_mesh(train.axes)
        places = shardings(model.logical_axes, train.rules, mesh)
        policy = SimpleNamespace(
            model=model,
            mesh=mesh,
            param_shardings=places,
            rows=SimpleNamespace(balance=balance_of(model, num_shards)),
        )
        group = Group(learner_specs(job.plan, settings), settings.cluster, starter)
        self.roles = RemoteRoles(group, policy, self._build, RAISED, event)
        abstract = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=places[name])
            for name, a in model.abstract.items()
        }
        deadline_s = settings.weights.deadline_s
        fetch = partial(self.roles.fetch, deadline_s=deadline_s)
        of_served = partial(self.roles.digest, deadline_s=deadline_s)
        self.roles.params = Elsewhere(abstract, fetch, of_served)
        self.checkpointer = RemoteCheckpointer(self.roles, settings.checkpoint.deadline_s)

    def begin(self) -> tuple[DriverState, dict[str, Any]]:
        """Raises: LearnerLost, and as starting_point."""
        settings = self._job.settings
        self._decision = verified(
            self._job, self._decision, Checkpointer(self._job.run, settings.checkpoint)
        )
        told = self.roles.begin()
        for note in told["notes"]:
            self._job.note(note)
        most = settings.rollout.max_staleness
        return state_from_wire(told["state"], most), told["extra"]

    def teacher(self) -> Any:
        settings = self._job.settings
        sft = self._job.resolve("sft", ALGORITHMS)(AlgorithmSettings(name="sft"))
        changes = warm_settings(settings)
        return self.roles.teacher(replace(settings.learner, **changes), sft)

    def adopt(self, teacher: Any) -> None:
        teacher.done()

    def open(self) -> None:
        for note in self.roles.open():
            self._job.note(note)

    def waits(self) -> list[Wait]:
        return self.roles.waits()

    def _build(self, step: int | None) -> dict[str, Any]:
        """What a group of processes is told, that begins as the run does, or from a save of its own."""
        decision, run = self._decision, self._job.run
        if step is not None:
            source = run / "checkpoints" / f"step_{step}"
            decision = replace(decision, resume_from=source, is_exact=True, changes=())
        return {
            "settings": schema.to_tree(self._job.settings),
            "mode": self._job.mode,
            "run": str(run.absolute()),
            "vocab_size": self._model.vocab_size,
            "decision": decision_to_wire(decision),
        }


class RemoteCheckpointer:
    """What the driver asks of a Checkpointer, where the state lies in the learner's processes, which write it."""

    def __init__(self, roles: RemoteRoles, deadline_s: float):
        self._roles, self._deadline_s = roles, deadline_s + SAVE_GRACE_S
        self._saving: tuple[int, Mapping[str, Any]] | None = None

    def save(self, step: int, state: None, extra: Mapping[str, Any]) -> None:
        """As Checkpointer.save; what is saved are the processes' states."""
        self.wait()
        self._roles.save(step, extra)
        self._saving = (step, extra)

    def wait(self) -> None:
        """As Checkpointer.wait."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self._roles.saved(*saving, deadline_s=self._deadline_s)

    def finish(self) -> None:
        """As Checkpointer.finish."""
        try:
            self.wait()
        except Exception as error:  # the run ends of something else, or with this
            log.error("%s", error)
