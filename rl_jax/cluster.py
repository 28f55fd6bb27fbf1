"""Where the parts run. InProcCluster: every role in this process, one thread per server, on the plan's meshes.

Owns: the engines, the servers and the router in front of them. Life: `InProcCluster(...)` builds engines (no compile)
-> `start()` starts the server threads, which serve after their first weight commit -> `close()` joins them. The servers
are the sync's targets.
Must not: decide when anything happens (driver), or move weights (weights).
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rl_jax.engine.engine import JaxEngine
from rl_jax.lowering import Program
from rl_jax.mesh import Meshes, MeshPlan
from rl_jax.models.decoder import Model
from rl_jax.serve.balance import Balance
from rl_jax.serve.decode_server import DecodeServer
from rl_jax.serve.prefill_server import PrefillServer
from rl_jax.serve.router import Router
from rl_jax.settings import Settings
from rl_jax.types import MAX_SUPPORT

LOG = logging.getLogger(__name__)

ROUTED = (
    "prefilled_suffixes",
    "stalled_servers",
    "role_moves",
)  # the router's counters that make metrics
LOOK_S = 1.0  # while one server compiles, the others are looked at so often


class ServersNotReady(RuntimeError):
    """A server had not compiled its programs in time, or died of it."""


class InProcCluster:
    """Servers and router of one plan. Sole owner of their threads."""

    def __init__(
        self,
        plan: MeshPlan,
        meshes: Meshes,
        model: Model,
        settings: Settings,
        template_sha256: str = "",
    ):
        """template_sha256: of the Renderer whose tokens the servers will get."""
        self.plan = plan
        self._is_auto = settings.serve.pd_balance == "auto"
        # By the role that they begin in.
        self.prefill: list[PrefillServer | DecodeServer] = []
        self.decode: list[DecodeServer] = []
        top_k = settings.rollout.top_k
        support = top_k if top_k <= MAX_SUPPORT else 0  # more is sampled by --mode=eval only
        for server in plan.servers:
            engine = JaxEngine(
                model, meshes.servers[server.name], server.rules, settings.engine, server.name,
                support=support,
            )  # fmt: skip
            make = PrefillServer if server.kind == "prefill" and not self._is_auto else DecodeServer
            (self.prefill if server.kind == "prefill" else self.decode).append(
                make(
                    server.name,
                    server.pool,
                    engine,
                    settings.serve,
                    tags=server.tags,
                    hardware=server.hardware,
                    template_sha256=template_sha256,
                )
            )
        balance = Balance() if self._is_auto else None
        self.router = Router(self.decode, self.prefill, plan, template_sha256, balance)

    @property
    def targets(self) -> Sequence[PrefillServer | DecodeServer]:
        """Sync targets; prefill servers first, as they commit first."""
        return (*self.prefill, *self.decode)

    def counters(self) -> dict[str, float]:
        """Cumulative counters of all servers, summed, and of the router what servers cannot count."""
        routed = self.router.stats()
        total: Counter[str] = Counter()
        total.update({name: routed[name] for name in ROUTED})
        for server in self.targets:
            total.update({k: v for k, v in server.stats().items() if isinstance(v, (int, float))})
        return dict(total)

    def lower(self) -> Iterator[Program]:
        """The programs of each distinct server, from shapes alone; no thread is started. Raises: LoweringError."""
        seen = []
        engines = {server.name: server.engine for server in self.targets}
        for server in self.plan.servers:
            decodes = server.kind != "prefill" or self._is_auto
            kind = (decodes, server.axes, server.rules)
            if kind not in seen:
                seen.append(kind)
                yield from engines[server.name].lower(decode=decodes)

    def start(self) -> None:
        for server in self.targets:
            server.start()

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until every server has compiled.

        Raises: ServersNotReady after deadline_s, or once a server died: what it died of, it would die of again.
        """
        end_s, waiting = time.monotonic() + deadline_s, list(self.targets)
        while waiting:
            self.check()
            server, left_s = waiting[0], max(0.0, end_s - time.monotonic())
            try:
                server.wait_ready(min(LOOK_S, left_s))
                waiting.remove(server)
            except TimeoutError:
                if left_s <= LOOK_S:
                    raise ServersNotReady(
                        f"{server.name}: not compiled after {deadline_s:g} s ({server.progress()[1]}); raise"
                        " serve.compile_deadline_s"
                    ) from None
            except RuntimeError:
                continue  # it died, which check tells

    def check(self) -> None:
        """Raises: ServersNotReady naming a server that died and of what; nothing of those that still compile."""
        for server in self.targets:
            with suppress(TimeoutError):
                try:
                    server.wait_ready(0.0)
                except RuntimeError as error:
                    said = (
                        f"{error}; the log has its trace, and --dry_run traces the programs alone"
                    )
                    raise ServersNotReady(said) from None

    def close(self) -> None:
        """End the servers; one whose thread does not end (it may be compiling) is left behind, loudly."""
        for server in self.targets:
            try:
                server.close()
            except TimeoutError as error:
                LOG.warning("%s; it is left behind", error)
