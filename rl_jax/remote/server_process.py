"""The program of a server's process: one engine on this process's own devices, and the DecodeServer or PrefillServer
round it, asked through a channel. How it is started: program.py.

Life: 1 the channel to the driver is opened. 2 `build` says what to build: the factory that the driver names makes the
server (make_server, unless a test has its own). 3 Requests and other quick commands are handed to the server on the
channel's thread; `try_pull`, `stage`, `digest`, `commit`, `discard` and `close` run in order on the main thread. A
bucket that is staged comes with its arrays, or with where in the memory of this host they lie (region.py), or with an
offer of them (transfer.py). 4 The channel ends, with
the driver or by a lease without a sign of it: the process ends at once, whatever it does.
Must not: write a file (what it prints is its log), or keep state that the driver could not lose.
"""

import importlib
import logging
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from rl_jax import schema
from rl_jax.exposition import Text, TurnTimes, tell_devices, tell_server
from rl_jax.learner.flops import peaks_of
from rl_jax.mesh import MeshPlan, make_mesh
from rl_jax.remote import codec, region
from rl_jax.remote.channel import Request
from rl_jax.remote.program import run_program
from rl_jax.remote.service import Service
from rl_jax.remote.spec import PROGRAM
from rl_jax.remote.transfer import WATCHED, PullRefused, Pulls
from rl_jax.serve.balance import ROLES
from rl_jax.serve.build import build_server
from rl_jax.serve.decode_server import DecodeServer
from rl_jax.serve.prefill_server import PrefillServer
from rl_jax.settings import Settings
from rl_jax.timeline import Timeline
from rl_jax.types import Prefix, Turn, TurnError, TurnRequest

log = logging.getLogger(__name__)


def make_server(job: Mapping[str, Any]) -> DecodeServer | PrefillServer:
    """The server that `job` names, on this process's first devices.

    job: settings (as a tree), server (its name in the plan), model (the "module:attribute" of its family), vocab_size,
    template_sha256, likely (as build_server's).
    """
    errors: list[str] = []
    settings = schema.build(Settings, job["settings"], "", errors)
    if errors:
        raise ValueError(f"the driver's settings cannot be read: {'; '.join(errors)}")
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    server = next(server for server in plan.servers if server.name == job["server"])
    mesh = make_mesh(server.axes, jax.devices()[: len(server.devices)])
    model = load(job["model"])(settings.model, job["vocab_size"])
    template, likely = job["template_sha256"], job["likely"]
    return build_server(server, mesh, model, settings, template, likely=likely)


def load(path: str) -> Any:
    """What "module:attribute" names."""
    module, _, attribute = path.partition(":")
    return attrgetter(attribute)(importlib.import_module(module))


@dataclass(frozen=True)
class Elsewhere:
    """Stands for a decode server of another process: the pages stay in the layout that the computing engine reads."""

    name: str
    engine: Any  # the computing server's own


def _reach(request: Request) -> None:
    try:
        region.reach(request.body["at"])
    except region.NotHere as error:
        request.answer({"why": str(error)})
    else:
        request.answer({"why": ""})


class ServerService(Service):
    """The server of this process, as its channel sees it."""

    orders = ("build", "try_pull", "stage", "digest", "commit", "discard", "close")
    quick = ("submit", "abort", "release", "fence", "pause", "resume", "stats")
    others: Mapping[str, Any] = MappingProxyType({"reach": _reach})

    def __init__(self, sock: socket.socket, told: Mapping[str, Any]):
        self._server: Any = None
        self._turns = TurnTimes()
        super().__init__(sock, told)
        self._pulls = Pulls(self._channel.host)

    def check_ready(self) -> None:
        if self._server is None:
            raise RuntimeError("the server is not built yet")

    def pulse(self) -> dict[str, Any] | None:
        server = self._server
        if server is None:
            return None
        ready, dead = True, None
        try:
            server.wait_ready(0.0)
        except TimeoutError:
            ready = False
        except RuntimeError as error:
            dead = str(error)
        return {
            "ready": ready,
            "dead": dead,
            "progress": list(server.progress()),
            "stats": _numbers(server.stats()),
            "queues_s": {} if server.kind == "prefill" else {r: server.queue_s(r) for r in ROLES},
        }

    def tell(self, text: Text) -> None:
        server = self._server
        if server is not None:
            tell_server(text, server)
            self._turns.tell(text, server=server.name)
            tell_devices(text, server.mesh.devices.flat)

    # --- in order, on the main thread --------------------------------------------------------

    def _build(self, request: Request) -> None:
        server = load(self.told["factory"])(request.body)
        tell_peaks(self.timeline, server.name, server.mesh.devices.flat)
        server.trace(self.timeline.track(f"{server.kind}/{server.name}"))
        server.start()
        self._server = server
        request.answer()

    def _try_pull(self, request: Request) -> None:
        try:
            self._pulls.pull(request.body["offer"], WATCHED * request.left_s)
        except (PullRefused, TimeoutError, RuntimeError) as error:
            request.answer({"why": str(error)})
        else:
            request.answer({"why": ""})

    def _stage(self, request: Request) -> None:
        body, places = request.body, self._server.param_shardings
        if "region" in body:
            arrays = region.take(body["region"])
        elif "offer" in body:
            offer = body["offer"]
            for name in ("sync_id", "version", "bucket"):
                if offer[name] != body[name]:
                    raise ValueError(f"the offer is of {name} {offer[name]}, not {body[name]}")
            arrays = self._pulls.pull(offer, WATCHED * request.left_s)
        else:
            arrays = dict(zip(body["names"], request.arrays, strict=True))
        if unknown := sorted(set(arrays) - set(places)):
            raise ValueError(f"{unknown[0]} came, which the model of {self._server.name} has not")
        # Nobody writes to what came from the channel or a region, so a device may use it in place.
        placed = jax.device_put(arrays, {name: places[name] for name in arrays})
        jax.block_until_ready(placed)
        self._server.stage(body["sync_id"], body["version"], body["bucket"], placed)
        request.answer()

    def _digest(self, request: Request) -> None:
        digest = self._server.digest(request.body["sync_id"])
        request.answer(codec.digest_to_wire(digest))

    def _commit(self, request: Request) -> None:
        body = request.body
        deadline_s = min(body["deadline_s"], request.left_s)
        ack = self._server.commit(body["sync_id"], body["kv"], deadline_s)
        request.answer(codec.ack_to_wire(ack))

    def _discard(self, request: Request) -> None:
        self._server.discard(request.body["sync_id"])
        request.answer()

    def _close(self, request: Request) -> None:
        self._server.close()
        self.timeline.close()  # the last spans go before the answer, after which the process is ended
        request.answer()

    # --- at once, on the channel's thread ----------------------------------------------------

    def _submit(self, request: Request) -> None:
        body, server = request.body, self._server
        asked = codec.request_from_wire(body["request"], request.arrays[:1])
        asked = replace(asked, deadline_s=max(0.0, request.left_s - body["grace_s"]))
        if "target" in body:
            target = Elsewhere(body["target"], server.engine)
            done = lambda result, times_s: self._prefixed(request, result, times_s)
            submit = server.submit if server.kind == "prefill" else server.submit_prefix
            submit(asked, target, done, body["held"])
            return
        prefix = None
        if body["prefix"] is not None:
            came = codec.prefix_from_wire(body["prefix"], request.arrays[1:])
            prefix = placed_prefix(came, server.engine)
        server.submit(
            asked,
            prefix,
            lambda result: self._turned(request, asked, result),
            (lambda piece: request.part(*codec.piece_to_wire(piece))) if body["streams"] else None,
        )

    def _turned(self, request: Request, asked: TurnRequest, result: Turn | TurnError) -> None:
        server = self._server
        if isinstance(result, TurnError):
            request.answer({"error": codec.error_to_wire(result)})
            return
        self._turns.add(result.times_s, len(result.tokens))
        body, arrays = codec.turn_to_wire(result)
        version = server.version
        live = [server.live_tokens(asked.session, version), version]
        told = {name: getattr(server, name) for name in ("append_token_s", "step_s", "num_running")}
        request.answer({"turn": body, "live": live, "told": told}, arrays)

    def _prefixed(
        self, request: Request, result: Prefix | TurnError, times_s: Mapping[str, float]
    ) -> None:
        told = {"times_s": dict(times_s), "token_s": self._server.token_s}
        if isinstance(result, TurnError):
            request.answer({**told, "error": codec.error_to_wire(result)})
            return
        body, arrays = codec.prefix_to_wire(result)
        request.answer({**told, "prefix": body}, arrays)

    def _abort(self, request: Request) -> None:
        self._server.abort(request.body["uid"], request.body["reason"])

    def _release(self, request: Request) -> None:
        self._server.release(request.body["session"])

    def _pause(self, request: Request) -> None:
        self._server.pause()

    def _resume(self, request: Request) -> None:
        self._server.resume()

    def _fence(self, request: Request) -> None:
        self._server.fence(request.body["reason"])

    def _stats(self, request: Request) -> None:
        request.answer({"stats": _numbers(self._server.stats())})


def tell_peaks(timeline: Timeline, name: str, devices: Iterable[jax.Device]) -> None:
    """What the devices of a server, or of "train", could do at best: the driver does not see them."""
    timeline.track("run/facts").mark("peaks", of=name, **peaks_of(devices))


def placed_prefix(prefix: Prefix, engine: Any) -> Prefix:
    """A Prefix of host arrays as one on the engine's mesh, its pages padded to a bucket.

    Raises: ValueError where the pages are not of the engine's cache.
    """
    num = len(prefix.kv[0][0])
    size = next((bucket for bucket in engine.move_buckets if bucket >= num), None)
    if size is None or not engine.spec.same_pages(prefix.spec):
        raise ValueError(f"{num} pages of {prefix.spec} do not fit the cache of {engine.spec}")
    pad = ((0, size - num), (0, 0), (0, 0), (0, 0))
    padded = [tuple(np.pad(array, pad) for array in pair) for pair in prefix.kv]
    return replace(prefix, kv=jax.device_put(tuple(padded), engine.prefix_sharding))


def _numbers(stats: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in stats.items()}


def main() -> None:
    run_program(PROGRAM, lambda sock, told: ServerService(sock, told).run())


if __name__ == "__main__":
    main()
