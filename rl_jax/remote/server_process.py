"""The program of a server's process: one engine on this process's own devices, and the DecodeServer or PrefillServer
round it, asked through a channel.

    python -m rl_jax.remote.server_process TOLD                              a child of the driver (LocalStarter)
    python -m rl_jax.remote.server_process --connect=HOST:PORT --server=NAME [--secret_file=FILE]
                                                                             started by anybody else

Life: 1 the channel to the driver is opened: over an inherited descriptor; or over TCP, with the run's secret out of the
file or RL_JAX_CLUSTER_SECRET, and patience while the driver is not there or has a process of this server still.
2 `build` says what to build: the factory that the driver names makes the server (make_server, unless a test has its
own). 3 Requests and other quick commands are handed to the server on the channel's thread; `stage`, `digest`, `commit`,
`discard` and `close` run in order on the main thread. 4 The channel ends, with the driver or by a lease without a sign
of it: the process ends at once, whatever it does. One that has a parent to obey dies with it even when it is stopped
(PR_SET_PDEATHSIG).
Must not: write a file (what it prints is its log), or keep state that the driver could not lose.
"""

import argparse
import ctypes
import faulthandler
import importlib
import json
import logging
import os
import queue
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rl_jax import schema
from rl_jax.child import SECRET_VARIABLE, take_variable
from rl_jax.mesh import MeshPlan, make_mesh
from rl_jax.remote import codec
from rl_jax.remote.channel import Channel, Request
from rl_jax.remote.link import address_of, connect, read_secret, secret_of
from rl_jax.remote.spec import PROGRAM
from rl_jax.serve.build import build_server
from rl_jax.serve.decode_server import DecodeServer
from rl_jax.serve.prefill_server import PrefillServer
from rl_jax.settings import ClusterSettings, Settings
from rl_jax.types import Prefix, Turn, TurnError, TurnRequest

PR_SET_PDEATHSIG = 1
MAX_ORDERS = 64  # more than all syncs of a run that time out could leave waiting
SLOW = ("build", "stage", "digest", "commit", "discard", "close")
QUICK = ("submit", "abort", "release", "fence", "stats")

log = logging.getLogger(__name__)


def make_server(job: Mapping[str, Any]) -> DecodeServer | PrefillServer:
    """The server that `job` names, on this process's first devices.

    job: settings (as a tree), server (its name in the plan), model (the "module:attribute" of its family), vocab_size,
    template_sha256.
    """
    errors: list[str] = []
    settings = schema.build(Settings, job["settings"], "", errors)
    if errors:
        raise ValueError(f"the driver's settings cannot be read: {'; '.join(errors)}")
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    server = next(server for server in plan.servers if server.name == job["server"])
    mesh = make_mesh(server.axes, jax.devices()[: len(server.devices)])
    model = load(job["model"])(settings.model, job["vocab_size"])
    return build_server(server, mesh, model, settings, job["template_sha256"])


def load(path: str) -> Any:
    """What "module:attribute" names."""
    module, _, attribute = path.partition(":")
    return attrgetter(attribute)(importlib.import_module(module))


@dataclass(frozen=True)
class Elsewhere:
    """Stands for a decode server of another process: the pages stay in the layout that the prefill engine reads."""

    name: str
    engine: Any  # the prefill server's own


class Service:
    """The server of this process, as its channel sees it."""

    def __init__(self, sock: socket.socket, told: Mapping[str, Any]):
        self._make = told["factory"]
        self._server: Any = None
        self._orders: queue.Queue[Request] = queue.Queue(MAX_ORDERS)
        handlers: dict[str, Callable[[Request], None]] = dict.fromkeys(SLOW, self._later)
        handlers |= dict.fromkeys(QUICK, self._now)
        self._channel = Channel(
            sock,
            "the driver",
            told["attempt"],
            ClusterSettings(**told["settings"]),
            handlers=handlers,
            pulse=self._pulse,
            on_close=_leave,
        )

    def run(self) -> None:
        """Serve until the channel ends, and the process with it."""
        self._channel.start()
        while True:
            request = self._orders.get()
            try:
                if request.left_s <= 0:
                    raise TimeoutError(f"{request.verb} came too late to be begun")
                getattr(self, f"_{request.verb}")(request)
            except Exception as error:  # the boundary to the driver, which must learn of it
                log.exception("%s failed", request.verb)
                request.fail(error)

    def _later(self, request: Request) -> None:
        try:
            self._orders.put_nowait(request)
        except queue.Full:
            raise RuntimeError(f"{MAX_ORDERS} orders wait already; the first is stuck") from None

    def _now(self, request: Request) -> None:
        if self._server is None:
            raise RuntimeError("the server is not built yet")
        getattr(self, f"_{request.verb}")(request)

    def _pulse(self) -> dict[str, Any] | None:
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
        }

    # --- in order, on the main thread --------------------------------------------------------

    def _build(self, request: Request) -> None:
        server = load(self._make)(request.body)
        server.start()
        self._server = server
        request.answer()

    def _stage(self, request: Request) -> None:
        body, places = request.body, self._server.param_shardings
        names = body["names"]
        if len(names) != len(request.arrays) or (unknown := sorted(set(names) - set(places))):
            raise ValueError(f"{len(request.arrays)} arrays came for {names[:3]} ..., {unknown}")
        # Nobody writes to what the channel read, so a device may alias it.
        placed = jax.device_put(
            dict(zip(names, request.arrays)), {name: places[name] for name in names}
        )
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
        request.answer()

    # --- at once, on the channel's thread ----------------------------------------------------

    def _submit(self, request: Request) -> None:
        body, server = request.body, self._server
        asked = codec.request_from_wire(body["request"], request.arrays[:1])
        asked = replace(asked, deadline_s=max(0.0, request.left_s - body["grace_s"]))
        if server.kind == "prefill":
            target = Elsewhere(body["target"], server.engine)
            done = lambda result, times_s: self._prefixed(request, result, times_s)
            server.submit(asked, target, done, body["held"])
            return
        prefix = None
        if body["prefix"] is not None:
            came = codec.prefix_from_wire(body["prefix"], request.arrays[1:])
            prefix = placed_prefix(came, server.engine)
        server.submit(asked, prefix, lambda result: self._turned(request, asked, result))

    def _turned(self, request: Request, asked: TurnRequest, result: Turn | TurnError) -> None:
        server = self._server
        if isinstance(result, TurnError):
            request.answer({"error": codec.error_to_wire(result)})
            return
        body, arrays = codec.turn_to_wire(result)
        version = server.version
        live = [server.live_tokens(asked.session, version), version]
        told = {"append_token_s": server.append_token_s, "num_running": server.num_running}
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

    def _fence(self, request: Request) -> None:
        self._server.fence(request.body["reason"])

    def _stats(self, request: Request) -> None:
        request.answer({"stats": _numbers(self._server.stats())})


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


def _leave(error: Exception) -> None:
    """The driver is gone, or done: nothing here is of any use to anybody."""
    log.info("the process ends: %s", error)
    os._exit(0)


def main() -> None:
    faulthandler.enable()
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    if not sys.argv[1].startswith("--"):
        told = json.loads(sys.argv[1])
        _die_with(told["parent"])
        Service(socket.socket(fileno=told["fd"]), told).run()
    words = _parser().parse_args()
    if words.parent:
        _die_with(words.parent)
    try:
        secret = _secret(words.secret_file)
        address = address_of(words.connect)
        link = connect(address, secret, words.server, words.attempt, words.patience_s)
    except (OSError, ValueError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    log.info("%s is linked to %s", words.server, words.connect)
    Service(*link).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", allow_abbrev=False)
    parser.add_argument(
        "--connect", required=True, metavar="HOST:PORT", help="where the driver listens"
    )
    parser.add_argument("--server", required=True, metavar="NAME", help="of the plan: decode.0")
    parser.add_argument(
        "--secret_file",
        type=Path,
        help=f"of the run; without it {SECRET_VARIABLE} holds the secret",
    )
    parser.add_argument(
        "--patience_s", type=float, default=120.0, help="how long to try to reach the driver"
    )
    parser.add_argument("--attempt", default="", help="only by what the driver starts")
    parser.add_argument("--parent", type=int, default=0, help="the process to die with")
    return parser


def _secret(path: Path | None) -> bytes:
    """Raises: OSError; ValueError."""
    given = take_variable(SECRET_VARIABLE)
    if path is not None:
        return read_secret(path)
    if given is None:
        raise ValueError(f"there is no --secret_file, and no {SECRET_VARIABLE} in the environment")
    return secret_of(given, SECRET_VARIABLE)


def _die_with(parent: int) -> None:
    """Now, if the parent is gone; else with the thread of it that started this process."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main()
