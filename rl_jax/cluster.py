"""Where the servers run: InProcCluster as threads of this process, ProcessCluster as processes of this host or others;
and what starts the processes of the learner and of workers, where there are any.

Owns: the servers, or their proxies and what starts their processes, and the router in front of them.
Life: the constructor builds them (no compile, no process) -> `start()` starts threads or processes, which serve after
their first weight commit -> `close()` ends them.
The servers are the sync's targets.
Must not: decide when anything happens (driver), or move weights (weights).
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rl_jax import schema
from rl_jax.engine.engine import kv_spec
from rl_jax.lowering import Program
from rl_jax.mesh import Meshes, MeshPlan, ServerPlan, abstract_mesh, shardings
from rl_jax.models import MODELS
from rl_jax.models.decoder import Model
from rl_jax.remote.carriers import Carriers
from rl_jax.remote.server import RemoteDecodeServer, RemotePrefillServer
from rl_jax.remote.spec import FACTORY, LEARNER_PROGRAM, ServerSpec, Spec, StoreSpec, scraped
from rl_jax.remote.starter import ExternalStarter, LocalStarter, Starter
from rl_jax.remote.store import Store
from rl_jax.remote.worker_place import ClusterPlace, worker_specs
from rl_jax.serve.affinity import Affinity
from rl_jax.serve.balance import Balance
from rl_jax.serve.build import build_server
from rl_jax.serve.router import Router
from rl_jax.settings import ClusterSettings, Settings
from rl_jax.timeline import Traces
from rl_jax.waits import Wait

LOG = logging.getLogger(__name__)

ROUTED = (
    "prefilled_suffixes",
    "stalled_servers",
    "suspect_servers",
    "role_moves",
    "affinity_moves",
)  # the router's counters that make metrics
BUSY = ("block_s", "chunk_s", "transfer_s")  # a server's seconds that are of use
LOOK_S = 1.0  # while one server compiles, the others are looked at so often


class ServersNotReady(RuntimeError):
    """A server had not compiled its programs in time, or died of it."""


class Watched:
    """A SyncTarget that says in which call of a sync it is, and since when. Everything else is the server's."""

    CALLS = ("stage", "digest", "commit", "discard")

    def __init__(self, server: Any, deadline_s: float):
        self._server, self._limit = server, f"weights.deadline_s={deadline_s:g}"
        self.under_way: Wait | None = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._server, name)
        return partial(self._call, name, value) if name in self.CALLS else value

    def _call(self, name: str, function: Callable[..., Any], sync_id: str, *args: Any) -> Any:
        what = f"{self._server.name} in the {name} of sync {sync_id}"
        self.under_way = Wait(what, time.monotonic(), self._limit)
        try:
            return function(sync_id, *args)
        finally:
            self.under_way = None


class Cluster:
    """Servers and router of one plan, wherever they run. Sole owner of the servers."""

    commands: Sequence[
        str
    ] = ()  # for a person to run, one a process, where nobody else starts them
    starter: Starter | None = None  # of processes
    specs: Sequence[Spec] = ()  # of processes
    # Where environments' and scorers' workers run once servers are started, if not as children of this process.
    worker_place: ClusterPlace | None = None

    def __init__(
        self,
        plan: MeshPlan,
        servers: Sequence[Any],
        template_sha256: str,
        balance: Balance | None = None,
        affinity: Affinity | None = None,
    ):
        """servers: started by `start`. template_sha256: of the Renderer whose tokens they get. The rest: of Router."""
        self.plan = plan
        role = {server.name: server.kind for server in plan.servers}  # that they begin in
        self.prefill = [server for server in servers if role[server.name] == "prefill"]
        self.decode = [server for server in servers if role[server.name] != "prefill"]
        self.router = Router(self.decode, self.prefill, plan, template_sha256, balance, affinity)
        self._devices = {server.name: len(server.devices) for server in plan.servers}
        self._watched: list[Watched] = []

    @property
    def targets(self) -> Sequence[Any]:
        """Sync targets; prefill servers first, as they commit first."""
        return (*self.prefill, *self.decode)

    def watched_targets(self, deadline_s: float) -> Sequence[Any]:
        """`targets` whose calls `waits` tells. deadline_s: weights.deadline_s."""
        self._watched = [Watched(server, deadline_s) for server in self.targets]
        return self._watched

    def waits(self) -> list[Wait]:
        """What is waited for of a server: a call of a sync, progress with a turn, its process. Any thread."""
        calls = [wait for target in self._watched if (wait := target.under_way)]
        started = [wait for s in self.targets for wait in getattr(s, "waits", list)()]
        return [*calls, *self.router.waits(), *started]

    def gone(self) -> str | None:
        """Why nothing will ever decode any more, or None: each server's process ended for the last time. Any thread."""
        whys = [(server.name, getattr(server, "gone", None)) for server in self.decode]
        if not all(why for _, why in whys):
            return None
        return "; ".join(f"{name}: {why}" for name, why in whys)

    def doing(self) -> str:
        """What each server that compiles is at, for a status line. Any thread."""
        told = ((server.name, server.progress()) for server in self.targets)
        return ", ".join(f"{name}: {now.doing}" for name, now in told if now.is_compiling)

    def counters(self) -> dict[str, float]:
        """Cumulative counters of all servers, summed, and of the router what servers cannot count; busy_s.POOL: device
        seconds in which a pool's servers computed or moved something."""
        routed = self.router.stats()
        total: Counter[str] = Counter()
        total.update({name: routed[name] for name in ROUTED})
        for server in self.targets:
            stats = {k: v for k, v in server.stats().items() if isinstance(v, (int, float))}
            total.update(stats)
            busy_s = sum(stats.get(name, 0.0) for name in BUSY)
            total.update({f"busy_s.{server.pool}": self._devices[server.name] * busy_s})
        return dict(total)

    def trace(self, traces: Traces) -> None:
        """Have the timeline know what servers and processes do. Before `start`."""
        if self.starter is not None:
            self.starter.traces = traces
        for server in self.targets:
            if hasattr(server, "trace"):  # of this process; another one's tells by its link
                server.trace(traces.track(f"{server.kind}/{server.name}"))

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
                    came = "no process of it came" not in str(error)
                    hint = "; the log has its trace, and --dry_run traces the programs alone"
                    raise ServersNotReady(f"{error}{hint if came else ''}") from None

    def close(self) -> None:
        """End the servers; one whose thread does not end (it may be compiling) is left behind, loudly."""
        for server in self.targets:
            try:
                server.close()
            except TimeoutError as error:
                LOG.warning("%s; it is left behind", error)


class InProcCluster(Cluster):
    """Every server a thread of this process, on the plan's meshes."""

    def __init__(
        self,
        plan: MeshPlan,
        meshes: Mapping[str, Any],
        model: Model,
        settings: Settings,
        template_sha256: str = "",
        *,
        likely: int = 0,
    ):
        """meshes: Meshes.servers. likely: as of build_server."""
        servers = [
            build_server(
                server, meshes[server.name], model, settings, template_sha256, likely=likely
            )
            for server in plan.servers
        ]
        self._is_auto = is_balanced(settings)
        super().__init__(plan, servers, template_sha256, *choosers(settings))

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


class ProcessCluster(Cluster):
    """Every server a process, on simulated devices of its own, and stores of their hosts; here are their proxies."""

    def __init__(
        self,
        plan: MeshPlan,
        model: Model,
        settings: Settings,
        template_sha256: str,
        log_dir: Path,
        *,
        likely: int = 0,
    ):
        """log_dir: of the processes' logs, one each, and of what else they need. likely: as of build_server.

        Raises: ServersNotReady where they could not come to this host.
        """
        cluster, deadline_s = settings.cluster, settings.weights.deadline_s
        specs = [_spec(server, model, settings, template_sha256, likely) for server in plan.servers]
        specs = scraped(specs, settings.metrics, 0)
        learners = learner_specs(plan, settings)
        hosts = sorted({spec.hardware for spec in specs if spec.kind == "decode"})
        stores = [
            StoreSpec(name=f"store.{i}", hardware=hosts[i % len(hosts)])
            for i in range(cluster.stores)
        ]
        stores = scraped(stores, settings.metrics, len(specs) + len(learners))
        workers = worker_specs(settings) if cluster.moves_workers else ()
        workers = scraped(workers, settings.metrics, len(specs) + len(learners) + len(stores))
        self.specs = (*specs, *learners, *stores, *workers)
        self.starter = starter = make_starter(settings.cluster, log_dir, self.specs)
        if workers:
            self.worker_place = ClusterPlace(workers, cluster, starter)
        self.commands = starter.commands
        self.stores = [Store(spec, cluster, starter) for spec in stores]
        self.carriers = Carriers(settings.weights.transport, self.stores)
        servers = []
        for spec in specs:
            kind = RemotePrefillServer if spec.kind == "prefill" else RemoteDecodeServer
            more = (starter, self.carriers)
            servers.append(kind(spec, cluster, log_dir, deadline_s, *more))
        super().__init__(plan, servers, template_sha256, *choosers(settings))

    def start(self) -> None:
        """Raises: ServersNotReady where it is known that they can never all live."""
        assert self.starter is not None, "the constructor made it"
        open_starter(self.starter, self.specs)
        for store in self.stores:
            store.start()
        super().start()

    def wait_ready(self, deadline_s: float) -> None:
        """As Cluster.wait_ready, and for the stores."""
        super().wait_ready(deadline_s)
        for store in self.stores:
            try:
                store.wait_ready(deadline_s)
            except (TimeoutError, RuntimeError) as error:
                raise ServersNotReady(
                    f"{error}; a store is a process of its own, one a host (cluster.stores)"
                ) from None

    def counters(self) -> dict[str, float]:
        """With link_NAME: connections by what became of them (Listener.stats)."""
        assert self.starter is not None, "the constructor made it"
        linked = {f"link_{name}": num for name, num in self.starter.stats().items()}
        stored: Counter[str] = Counter()
        for store in self.stores:
            stored.update(store.stats())
        return super().counters() | linked | stored

    def close(self) -> None:
        super().close()
        for store in self.stores:
            store.close()
        self.carriers.close()
        assert self.starter is not None, "the constructor made it"
        self.starter.close()


def is_balanced(settings: Settings) -> bool:
    """Whether any server may get any role: each is a DecodeServer then."""
    return settings.serve.pd_balance == "auto"


def choosers(settings: Settings) -> tuple[Balance | None, Affinity | None]:
    """What the router is to choose by itself."""
    tags = tuple(source.tag for source in settings.tasks.sources)
    return (
        Balance() if is_balanced(settings) else None,
        Affinity(tags) if settings.serve.affinity == "auto" else None,
    )


def make_starter(settings: ClusterSettings, log_dir: Path, specs: Sequence[Spec]) -> Starter:
    """Of the backend. Raises: ServersNotReady where processes could not come to this host."""
    try:
        if settings.backend == "external":
            return ExternalStarter(settings, log_dir, specs)
        if settings.backend == "ray":
            from rl_jax.ray_cluster import RayStarter  # an extra, and seconds to import

            return RayStarter(settings, log_dir, specs)
    except (OSError, ValueError) as error:
        raise ServersNotReady(str(error)) from None
    return LocalStarter(settings, log_dir)


def open_starter(starter: Starter, specs: Sequence[Spec]) -> None:
    """Raises: ServersNotReady where it is known that these can never all live."""
    try:
        starter.open(specs)
    except OSError as error:
        raise ServersNotReady(str(error)) from None


def make_cluster(
    plan: MeshPlan,
    meshes: Meshes,
    model: Model,
    settings: Settings,
    template_sha256: str,
    log_dir: Path,
) -> Cluster:
    """The cluster that settings.cluster.backend names."""
    if settings.cluster.backend == "inproc":
        cluster = InProcCluster(plan, meshes.servers, model, settings, template_sha256)
        if others := learner_specs(plan, settings):
            cluster.starter = make_starter(settings.cluster, log_dir, others)
        return cluster
    return ProcessCluster(plan, model, settings, template_sha256, log_dir)


def learner_specs(plan: MeshPlan, settings: Settings) -> Sequence[Spec]:
    """The learner's processes of a plan; none where it trains in the driver's."""
    num, train = settings.cluster.learner_processes, plan.train
    if not num or train is None:
        return ()
    each = len(train.devices) // num
    specs = tuple(
        Spec(
            name=f"learner.{rank}",
            num_devices=each,
            platform=settings.mesh.platform,
            devices=tuple(train.devices[rank * each : (rank + 1) * each]),
            hardware=train.hardware,
            program=LEARNER_PROGRAM,
        )
        for rank in range(num)
    )
    is_inproc = settings.cluster.backend == "inproc"
    return scraped(specs, settings.metrics, 0 if is_inproc else len(plan.servers))


def _spec(
    server: ServerPlan, model: Model, settings: Settings, template_sha256: str, likely: int
) -> ServerSpec:
    mesh = abstract_mesh(server.axes)
    family = settings.model.family
    return ServerSpec(
        name=server.name,
        pool=server.pool,
        kind="prefill" if server.kind == "prefill" and not is_balanced(settings) else "decode",
        tags=server.tags,
        hardware=server.hardware,
        template_sha256=template_sha256,
        mesh=mesh,
        param_shardings=shardings(model.logical_axes, server.rules, mesh),
        engine=settings.engine,
        kv=kv_spec(model.settings, settings.engine),
        serve=settings.serve,
        factory=FACTORY,
        job={
            "settings": schema.to_tree(settings),
            "server": server.name,
            "model": MODELS.get(family, family),
            "vocab_size": model.vocab_size,
            "template_sha256": template_sha256,
            "likely": likely,
        },
        num_devices=len(server.devices),
        platform=settings.mesh.platform,
        devices=tuple(server.devices),
    )
