"""One server of a plan, built for the mesh that it gets: the same in the driver's process and in one of its own.

Must not: start a thread, or know where it runs.
"""

from typing import Any

from rl_jax.engine.engine import JaxEngine
from rl_jax.mesh.plan import ServerPlan
from rl_jax.models.model import Model
from rl_jax.serve.decode_server import DecodeServer
from rl_jax.serve.prefill_server import PrefillServer
from rl_jax.settings import Settings
from rl_jax.types import MAX_SUPPORT


def build_server(
    server: ServerPlan,
    mesh: Any,
    model: Model,
    settings: Settings,
    template_sha256: str,
    *,
    likely: int = 0,
) -> PrefillServer | DecodeServer:
    """mesh: jax.sharding.Mesh with the server's axes. template_sha256: of the Renderer whose tokens it will get.
    likely: tokens that can be asked for in each sampled one's place.

    Allocates and compiles nothing.
    """
    top_k = settings.rollout.top_k
    support = top_k if top_k <= MAX_SUPPORT else 0  # more is sampled by --mode=eval only
    engine = JaxEngine(
        model, mesh, server.rules, settings.engine, server.name, support=support, likely=likely
    )
    prefills = server.kind == "prefill" and settings.serve.pd_balance != "auto"
    kind = PrefillServer if prefills else DecodeServer
    return kind(
        server.name,
        server.pool,
        engine,
        settings.serve,
        tags=server.tags,
        hardware=server.hardware,
        template_sha256=template_sha256,
    )
