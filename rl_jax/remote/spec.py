"""What the driver knows of a process of its run before it lives, and which program such processes are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kernels.kv import KVSpec
from rl_jax.settings import EngineSettings, MetricsSettings, ServeSettings

PROGRAM = "rl_jax.remote.server_process"
STORE_PROGRAM = "rl_jax.remote.store_process"
LEARNER_PROGRAM = "rl_jax.learner_process"
WORKER_PROGRAM = "rl_jax.remote.worker_host"
FACTORY = f"{PROGRAM}:make_server"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What starters and lives need of a process."""

    name: str  # decode.0
    program: str
    num_devices: int = 1
    platform: str = "cpu"  # simulated devices of its own | gpu: GPUs that no other process gets
    devices: tuple[int, ...] = ()  # their numbers in the plan
    hardware: str = "cpu"
    factory: str = ""  # "module:attribute": job -> what is built in the process
    job: Mapping[str, Any] = field(default_factory=dict)  # as JSON
    # host, port and token_file at which it tells its metrics (exporter.py); {} = nowhere
    scrape: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServerSpec(Spec):
    """One server: what its proxy answers by itself, and what its process is told to build."""

    program: str = PROGRAM
    pool: str
    kind: str  # prefill | decode
    tags: tuple[str, ...]
    template_sha256: str
    mesh: Any  # jax.sharding.AbstractMesh, as its devices are not ours
    param_shardings: Mapping[str, Any]  # on it
    engine: EngineSettings
    kv: KVSpec
    serve: ServeSettings


@dataclass(frozen=True, kw_only=True)
class StoreSpec(Spec):
    """One store: store.0."""

    program: str = STORE_PROGRAM


S = TypeVar("S", bound=Spec)


def scraped(specs: Sequence[S], metrics: MetricsSettings, first: int) -> tuple[S, ...]:
    """The specs with where they tell their metrics: ports behind the driver's, in order, from the first-th one on."""
    if not metrics.port:
        return tuple(specs)
    where = {"host": metrics.host, "token_file": metrics.token_file}
    return tuple(
        replace(spec, scrape={**where, "port": metrics.port + 1 + first + i})
        for i, spec in enumerate(specs)
    )
