"""Servers of a MeshPlan on a virtual clock, each of the hardware class that its pool names, and the Router over them.

Invariants: the servers are those of serve/, started, with version 0 committed; each is one device of its class, with as
many pages of KV as its memory has beside the weights, and at most as many slots as histories of half the context fit.
Must not: choose anything.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from rl_jax.mesh import MeshPlan
from rl_jax.serve import DecodeServer, PrefillServer, Router
from rl_jax.serve.affinity import Affinity
from rl_jax.serve.balance import Balance
from rl_jax.settings import EngineSettings, ServeSettings
from rl_jax.simulate.clock import VirtualLoop
from rl_jax.simulate.cost_engine import CostEngine
from rl_jax.simulate.costs import HARDWARE, Costs, Hardware, ModelShape
from rl_jax.simulate.stepped_loop import SteppedLoop


def engine_settings(context: int) -> EngineSettings:
    """Of a server on a large card, which appends whatever its histories miss."""
    return EngineSettings(
        slots=64,
        context=context,
        steps_per_block=32,
        chunk_sizes=(2048, 8192),
        chunk_requests=64,
        append_limit=context,
    )


class Servers:
    """Close it before the loop ends."""

    def __init__(
        self,
        plan: MeshPlan,
        model: ModelShape,
        engine: EngineSettings,
        serve: ServeSettings,
        hardware: Mapping[str, Hardware] = HARDWARE,
        tags: tuple[str, ...] = (),
    ):
        """Inside a simulation (clock.run). hardware: by the name that pools give. tags: of the tasks, which only
        serve.affinity=auto reads.

        Raises: RuntimeError elsewhere; ValueError for a pool of a class that is not known.
        """
        clock = asyncio.get_running_loop()
        if not isinstance(clock, VirtualLoop):
            raise RuntimeError("servers are simulated on a VirtualLoop; see simulate.clock.run")
        is_auto = (
            serve.pd_balance == "auto"
        )  # as cluster.py and serve/build.py: any may get any role
        self.decode: list[DecodeServer] = []
        self.prefill: list[PrefillServer | DecodeServer] = []
        for server in plan.servers:
            if server.hardware not in hardware:
                raise ValueError(
                    f"pool {server.pool}: hardware={server.hardware!r} is unknown; use one of {', '.join(hardware)}"
                )
            costs = Costs(hardware[server.hardware], model)
            num_pages = costs.num_pages(engine.page_tokens)
            slots = min(engine.slots, 2 * num_pages // engine.table_pages)
            settings = replace(engine, num_pages=num_pages, slots=slots)
            prefills = server.kind == "prefill"
            kind = PrefillServer if prefills and not is_auto else DecodeServer
            made = kind(
                server.name,
                server.pool,
                CostEngine(settings, costs, clock),
                serve,
                tags=server.tags,
                hardware=server.hardware,
                loop=SteppedLoop,
            )
            (self.prefill if prefills else self.decode).append(made)
            made.start()
        self.commit(0)
        balance = Balance() if is_auto else None
        affinity = Affinity(tags) if serve.affinity == "auto" else None
        self.router = Router(self.decode, self.prefill, plan, balance=balance, affinity=affinity)

    def commit(self, version: int, kv: str = "recompute") -> None:
        """All servers use this version from their next iteration on."""
        for server in (*self.prefill, *self.decode):
            server.stage(f"v{version}", version, 0, {})
            server.commit(f"v{version}", kv, server.settings.stop_deadline_s)

    def close(self) -> None:
        for server in (*self.prefill, *self.decode):
            server.close()
