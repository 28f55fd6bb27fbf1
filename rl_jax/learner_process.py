"""The program of a learner's process (how it begins: remote/program.py): one of a group that trains together, each on
its part of one train mesh.

Every process of the group gets the same orders in the same sequence, so that their programs meet in the same
collectives; what all of them know alike, the first alone answers. Each builds the models of the run from the config
(start.py, build_roles.py) and finds its weights itself: the group's processes and the driver see one file system.
Life: 1 `address` (of the first): where the group's processes meet. 2 `build`: they meet (jax.distributed, where there
are several), build policy and critic, and take the weights that the driver says: fresh, a source's, or a checkpoint's.
3 `warm`, `warm_step`, `warmed`: a warm start's learner beside the policy. 4 `open`: what is not trained gets its
weights. 5 `score`, `step`, `fetch`, `digest`, `save`, `saved`, as the driver's loop goes.
Must not: choose what comes next; write anything but checkpoints and batches that were not finite.
"""

import logging
import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from kernels import digest
from rl_jax import schema
from rl_jax.algorithms.plugin import make_algorithm
from rl_jax.build_roles import Setting, make_roles, open_roles
from rl_jax.checkpoint import Checkpointer
from rl_jax.driver import DriverState
from rl_jax.exposition import Text, tell_devices
from rl_jax.learner.learner import Learner
from rl_jax.learner.roles import Roles
from rl_jax.mesh import Meshes, MeshPlan, make_mesh
from rl_jax.names import resolve
from rl_jax.preflight import build_model
from rl_jax.profiling import CompileSpans, Profiler
from rl_jax.remote.channel import Request
from rl_jax.remote.learner_wire import batch_from_wire, metrics_to_wire, pieces_to_wire
from rl_jax.remote.program import run_program
from rl_jax.remote.server_process import tell_peaks
from rl_jax.remote.service import Service
from rl_jax.remote.spec import LEARNER_PROGRAM
from rl_jax.resume import Decision
from rl_jax.rollout.bound import Bound, Limits
from rl_jax.settings import Settings
from rl_jax.start import make_learner, make_warm_learner, starting_point
from rl_jax.weights.host_copy import cast_copies

log = logging.getLogger(__name__)


class LearnerService(Service):
    """One process of the group. Every order is done before the next one is begun."""

    orders = (
        "address", "build", "warm", "warm_step", "warmed", "open", "score", "step", "fetch",
        "digest", "save", "saved",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, told: Mapping[str, Any]):
        self._job: Setting = None  # type: ignore[assignment]  # this and the next four: by `build`
        self._roles: Roles = None  # type: ignore[assignment]
        self._teacher: Learner = None  # type: ignore[assignment]
        self._checkpointer: Checkpointer = None  # type: ignore[assignment]
        self._source: Path | None = None
        self._profiler: Profiler = None  # type: ignore[assignment]
        self._num_steps, self._version = 0, None  # the latter: that it turned weights into last
        super().__init__(sock, told)

    def tell(self, text: Text) -> None:
        roles = self._roles
        if roles is not None:
            text.add("rl_jax:learner_steps_total", self._num_steps)
            text.add("rl_jax:weight_version", self._version)
            tell_devices(text, jax.local_devices())

    def failed(self, request: Request, error: Exception) -> None:
        """With its type: what a step raises has an exit code of its own."""
        lines = getattr(error, "errors", None) or [str(error)]
        request.answer({"raised": type(error).__name__, "text": "; ".join(map(str, lines))})

    # --- from nothing to weights -------------------------------------------------------------

    def _address(self, request: Request) -> None:
        """A port of this host, at the address by which the driver is reached."""
        is_tcp = self.sock.family in (socket.AF_INET, socket.AF_INET6)
        host = self.sock.getsockname()[0] if is_tcp else "127.0.0.1"
        with socket.socket() as free:
            free.bind((host, 0))
            request.answer({"address": f"{host}:{free.getsockname()[1]}"})

    def _build(self, request: Request) -> None:
        body = request.body
        if body["num"] > 1:
            jax.distributed.initialize(
                body["address"],
                # JAX's own choice is every address of the host.
                coordinator_bind_address=body["address"],
                num_processes=body["num"],
                process_id=body["rank"],
                initialization_timeout=max(1, int(request.left_s)),
            )
        errors: list[str] = []
        settings = schema.build(Settings, body["settings"], "", errors)
        if errors:
            raise ValueError(f"the driver's settings cannot be read: {'; '.join(errors)}")
        plan = MeshPlan.from_settings(settings.mesh, settings.model)
        assert plan.train is not None, "config.parse refuses a plan without a train mesh"
        mesh, run, notes = make_mesh(plan.train.axes, jax.devices()), Path(body["run"]), []
        meshes = Meshes(train=mesh, servers={}, roles={"": mesh})
        job = Setting(settings, plan, meshes, run, resolve, notes.append, body["mode"])
        model = build_model(settings, resolve, body["vocab_size"])
        algorithm = make_algorithm(settings.algorithm, resolve)
        self._job, self._roles = job, make_roles(job, make_learner(job, model, algorithm))
        keeps = body["mode"] == "rollout_only"
        self._checkpointer = Checkpointer(run, settings.checkpoint, keep_oldest=keeps)
        state, extra, source = starting_point(
            job, _decision(body["decision"]), self._checkpointer, self._roles
        )
        self._source = source
        self._track = self.timeline.track(f"train/learner.{body['rank']}")
        self._roles.trace(self._track)
        tell_peaks(self.timeline, "train", mesh.devices.flat)
        self._compiles = CompileSpans(self.timeline)
        self._profiler = Profiler(settings.metrics, run / "profile" / f"learner.{body['rank']}")
        told = {
            "state": state_to_wire(state),
            "extra": extra,
            "source": str(source or ""),
            "notes": notes,
        }
        self._answer(request, told)

    def _warm(self, request: Request) -> None:
        self._teacher = make_warm_learner(self._job, self._roles.policy.rows.model)
        self._teacher.reset(self._roles.params)
        self._teacher.track = self._track
        request.answer()

    def _warm_step(self, request: Request) -> None:
        self._step_of(self._teacher, request)

    def _warmed(self, request: Request) -> None:
        """The warm start's weights become the policy's, with a fresh optimizer."""
        self._roles.policy.reset(self._teacher.params)
        self._teacher = None  # type: ignore[assignment]
        request.answer()

    def _open(self, request: Request) -> None:
        notes: list[str] = []
        open_roles(replace(self._job, note=notes.append), self._roles, self._source)
        self._answer(request, {"notes": notes})

    # --- the loop ----------------------------------------------------------------------------

    def _score(self, request: Request) -> None:
        batch = batch_from_wire(request.body["batch"], request.arrays)
        scores = self._roles.score(batch, request.body["needs"])
        self._answer(request, {"names": list(scores)}, tuple(scores.values()))

    def _step(self, request: Request) -> None:
        step = request.body["version"] + 1
        self._profiler.begin(step)
        self._step_of(self._roles, request)
        self._profiler.end(step)
        self._num_steps, self._version = self._num_steps + 1, request.body["version"] + 1

    def _step_of(self, learner: Learner | Roles, request: Request) -> None:
        batch = batch_from_wire(request.body["batch"], request.arrays)
        names, arrays = metrics_to_wire(learner.step(batch, request.body["version"]))
        self._answer(request, {"names": names}, arrays)

    def _fetch(self, request: Request) -> None:
        """This process's pieces of some parameters, as they are served."""
        names, dtypes = request.body["names"], tuple(request.body["dtypes"])
        params = self._roles.params
        places, pieces = pieces_to_wire(cast_copies([params[name] for name in names], dtypes))
        request.answer({"places": places}, pieces)

    def _digest(self, request: Request) -> None:
        found = digest.digest_arrays(self._roles.params, request.body["dtype"])
        told = {name: [int(a), int(b)] for name, (a, b) in found.items()}
        self._answer(request, {"digest": told})

    def _save(self, request: Request) -> None:
        self._checkpointer.save(request.body["step"], self._roles.state, request.body["extra"])
        request.answer()

    def _saved(self, request: Request) -> None:
        self._checkpointer.wait()
        self.timeline.flush()  # the run may end with this save, and its processes with it
        request.answer()

    def _answer(self, request: Request, body: Mapping[str, Any], arrays: Any = ()) -> None:
        """What every process of the group knows: from the first one."""
        if jax.process_index() == 0:
            request.answer(dict(body), arrays)
        else:
            request.answer()


def state_to_wire(state: DriverState) -> dict[str, Any]:
    bound = None if state.bound is None else state.bound.to_tree()
    return asdict(replace(state, bound=None)) | {"bound": bound}


def state_from_wire(body: Mapping[str, Any], most: int) -> DriverState:
    """most: rollout.max_staleness."""
    bound = None if body["bound"] is None else Bound.from_tree(body["bound"], Limits(most))
    return DriverState(**{**body, "bound": bound})


def decision_to_wire(decision: Decision) -> dict[str, Any]:
    """What a learner's process needs of it."""
    return {
        "path": str(decision.path),
        "run_id": decision.run_id,
        "attempt": decision.attempt,
        "resume_from": str(decision.resume_from or ""),
        "changes": list(decision.changes),
        "is_exact": decision.is_exact,
    }


def _decision(body: Mapping[str, Any]) -> Decision:
    source = Path(body["resume_from"]) if body["resume_from"] else None
    changes = tuple(body["changes"])
    given = {**body, "path": Path(body["path"]), "resume_from": source, "changes": changes}
    return Decision(**given)


def main() -> None:
    run_program(LEARNER_PROGRAM, lambda sock, told: LearnerService(sock, told).run())


if __name__ == "__main__":
    main()
