"""What the driver knows of a process of its run before it lives, and which program such processes are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernels.kv import KVSpec
from rl_jax.settings import EngineSettings, ServeSettings

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
