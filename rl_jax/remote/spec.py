"""What the driver knows of a server or a store before any process of it lives, and which program its processes are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernels.kv import KVSpec
from rl_jax.settings import EngineSettings, ServeSettings

PROGRAM = "rl_jax.remote.server_process"
STORE_PROGRAM = "rl_jax.remote.store_process"
FACTORY = f"{PROGRAM}:make_server"


@dataclass(frozen=True)
class ServerSpec:
    """One server: what its proxy answers by itself, and what its process is told to build."""

    name: str
    pool: str
    kind: str  # prefill | decode
    tags: tuple[str, ...]
    hardware: str
    template_sha256: str
    mesh: Any  # jax.sharding.AbstractMesh, as its devices are not ours
    param_shardings: Mapping[str, Any]  # on it
    engine: EngineSettings
    kv: KVSpec
    serve: ServeSettings
    factory: str  # "module:attribute": job -> the server, in its process
    job: Mapping[str, Any]  # as JSON
    num_devices: int
    program: str = PROGRAM


@dataclass(frozen=True)
class StoreSpec:
    """One store; what starters and lives ask of a ServerSpec."""

    name: str  # store.0
    factory: str = ""
    job: Mapping[str, Any] = field(default_factory=dict)
    num_devices: int = 1
    hardware: str = "cpu"
    program: str = STORE_PROGRAM


Spec = ServerSpec | StoreSpec
