"""RayStarter: processes of a run on the nodes of a Ray cluster; the only file that imports ray.

For each process an actor is placed by what its pool's hardware asks for. It starts the same program as every other
starter, which connects to the driver over TCP (link.py), and waits for its end: that is all it does. No call of a
server or worker, no weights and no state go through Ray, and Ray restarts nothing: an actor, or its node, that is lost
is a process that ended, for which whoever started it (lives.py) starts another one, wherever Ray places it then.
Hardware classes are Ray's custom resources, one a device: `ray start --resources='{"h200": 8}'` offers a node to pools
of hardware h200; `gpu` are the GPUs that Ray counts itself. Every process takes one CPU besides. Workers of
environments and scorers go where cluster.env_hardware and cluster.scorer_hardware say, one of it each. Stores are
spread over their nodes.
A Ray that it starts lives in a network of its own, as Ray listens on every address of its host (private_network.py);
so do the driver's main thread and all that is started from it, until `close`.
A head that is lost takes nothing along but the power to start processes: servers speak with the driver without it. Ray
would end the driver after a minute of that, and waits for its head in most calls; it is told not to, and every question
to it has a deadline here.
Invariants: what can never be placed is told before anything waits.
Must not: be imported by anything but cluster.py; leave a Ray that it started running.
"""

import logging
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rl_jax.backend import child_variables, given_gpus
from rl_jax.child import SECRET_VARIABLE, clean_environment, exit_text, give_variable
from rl_jax.remote.link import address_of, address_text, new_secret
from rl_jax.remote.listener import Expected, Listener
from rl_jax.remote.private_network import PrivateNetwork
from rl_jax.remote.spec import Spec, StoreSpec
from rl_jax.remote.starter import EXIT_S, launched, told
from rl_jax.settings import ClusterSettings
from rl_jax.timeline import NO_TRACES

ASK_S = 5.0  # for an answer that Ray has already
PLACE_S = 15.0  # for Ray to take an actor
END_S = 15.0  # for Ray to leave
REACH_S = 30.0  # for a cluster to be joined
START_S = 120.0  # for a Ray of this host to start
TRACE = 0.001  # of a resource
FOR_GOOD_S = 7 * 86400  # that Ray waits for a lost head, before it ends this process
NODES_S = 4.0  # for the nodes of a cluster that was just reached to be known

log = logging.getLogger(__name__)


class RayHost:
    """The actor. It keeps nothing that anybody would miss."""

    def run(
        self,
        name: str,
        program: str,
        words: Sequence[str],
        variables: Mapping[str, str],
        log_dir: str,
    ) -> str:
        """Start the program, and wait until it has ended, which it does with its link. Returns: how it ended."""
        variables = {**variables, **given_gpus()}
        words = [*words, f"--parent={os.getpid()}"]
        process, output = launched(name, program, words, variables, Path(log_dir))
        code = process.wait()
        output.drain()
        return f"{exit_text(code, 0.0)}; {output.last_line()}"


def demand(spec: Spec) -> dict[str, float]:
    """What a process takes, by Ray's names; a store a trace of what its servers do, so that it comes to their nodes."""
    num = TRACE if isinstance(spec, StoreSpec) else float(spec.num_devices)
    out = {"CPU": 1.0}
    if spec.hardware not in ("cpu", "gpu"):
        out[spec.hardware] = num
    if spec.hardware == "gpu" or spec.platform == "gpu":
        out["GPU"] = num
    return out


class RayHandle:
    """A Handle."""

    pid = None

    def __init__(self, expected: Expected, actor: Any, running: Any, wanted: Mapping[str, float]):
        self._expected, self._actor, self._running = expected, actor, running
        self._wanted, self._how = wanted, ""

    def link(self, timeout_s: float) -> socket.socket | None:
        return self._expected.link(timeout_s)

    def absent(self, waited_s: float) -> str:
        try:
            free = _answer(ray.available_resources, ASK_S)
        except (OSError, RayError) as error:
            free = {"unknown": str(error)}
        return (
            f"no process of it came to {address_text(*self._expected.listener.address)} within {waited_s:g} s"
            f" (cluster.start_timeout_s): it takes {_listed(self._wanted)}, and Ray has {_listed(free)} free now"
        )

    def ended(self, timeout_s: float) -> str | None:
        if not self._how:
            ready, _ = ray.wait([self._running], timeout=max(timeout_s, 0.0))
            if not ready:
                return None
            try:
                self._how = ray.get(self._running, timeout=ASK_S)
            except RayError as error:  # the actor or its node is lost
                self._how = f"is lost: {type(error).__name__}: {_first_line(error)}"
        return self._how

    def kill(self) -> str | None:
        """The program dies with its actor, wherever that is."""
        self._expected.withdraw()
        if self._how:
            return None
        try:
            _answer(lambda: ray.kill(self._actor, no_restart=True), ASK_S)
        except (OSError, RayError) as error:
            log.warning("an actor could not be ended: %s", error)
        ray.wait([self._running], timeout=EXIT_S)
        return None

    def last_words(self) -> str:
        return ""


class RayStarter:
    """Actors of one Ray cluster. Listens from its constructor on; Ray is reached by `open`."""

    is_by_hand, commands = False, ()
    traces = NO_TRACES

    def __init__(self, settings: ClusterSettings, log_dir: Path, specs: Sequence[Spec]):
        """Raises: OSError where it cannot listen, or the host gives no private network to a Ray that is to have one."""
        self._settings, self._log_dir = settings, log_dir
        is_local = not settings.address and not ray.is_initialized()
        self._network = PrivateNetwork() if is_local and settings.private_network else None
        self._secret = new_secret()
        self._listener = Listener(
            settings.host, settings.port, self._secret, [spec.name for spec in specs]
        )
        self._folder: Path | None = None  # of a Ray that was started here
        self._is_over = threading.Event()
        self._is_ours = False

    def open(self, specs: Sequence[Spec]) -> None:
        """Reach cluster.address, or start a Ray of this host; one that this process uses already is used on.

        Raises: OSError where there is none, or it will never hold all of them.
        """
        if not ray.is_initialized():
            self._init([demand(spec) for spec in specs])
        end_s = time.monotonic() + NODES_S
        while why := missing(specs, [n for n in _answer(ray.nodes, ASK_S) if n["Alive"]]):
            if time.monotonic() > end_s:
                raise OSError(why)
            time.sleep(0.5)

    def start(self, spec: Spec, attempt: str) -> RayHandle:
        expected = self._listener.expect(
            spec.name, attempt, told(spec, self._settings), by_name=True
        )
        wanted = demand(spec)
        try:
            words = [
                f"--connect={self.where}",
                f"--server={spec.name}",
                f"--attempt={attempt}",
            ]
            variables = {
                **child_variables(spec.num_devices, spec.platform),
                SECRET_VARIABLE: self._secret.hex(),
            }
            actor, running = _answer(lambda: self._placed(spec, wanted, words, variables), PLACE_S)
        except (OSError, RayError) as error:
            expected.withdraw()
            raise OSError(f"Ray takes no actor: {_first_line(error)}") from None
        return RayHandle(expected, actor, running, wanted)

    def _placed(
        self,
        spec: Spec,
        wanted: Mapping[str, float],
        words: Sequence[str],
        variables: Mapping[str, str],
    ) -> tuple[Any, Any]:
        """The actor, and its call that ends with the program."""
        others = {name: num for name, num in wanted.items() if name not in ("CPU", "GPU")}
        actor = (
            ray.remote(RayHost)
            .options(
                num_cpus=wanted["CPU"],
                num_gpus=wanted.get("GPU", 0.0),
                resources=others,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy="SPREAD" if isinstance(spec, StoreSpec) else "DEFAULT",
                runtime_env={"env_vars": {"PYTHONPATH": clean_environment()["PYTHONPATH"]}},
            )
            .remote()
        )
        log_dir = str(self._log_dir.resolve())
        return actor, actor.run.remote(spec.name, spec.program, words, variables, log_dir)

    def retire(self, spec: Spec) -> None:
        pass  # none comes by itself

    def stats(self) -> dict[str, int]:
        return self._listener.stats()

    @property
    def where(self) -> str:
        """HOST:PORT that the processes connect to."""
        return address_text(*self._listener.address)

    def close(self) -> None:
        self._listener.close()
        if self._is_ours:
            self._is_ours = False
            try:
                _answer(ray.shutdown, END_S)
            except OSError as error:
                log.warning("%s; what it runs on this host ends with this process", error)
        self._is_over.set()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._network is not None:
            self._network.close()

    def _init(self, demands: Sequence[Mapping[str, float]]) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        give_variable("RAY_USAGE_STATS_ENABLED", "0")
        give_variable("RAY_gcs_rpc_server_reconnect_timeout_s", str(FOR_GOOD_S))
        quiet: dict[str, Any] = {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        try:
            if self._settings.address:
                _reach(self._settings.address)
                del quiet["include_dashboard"]  # of another's cluster that is not ours to say
                address = self._settings.address
                _answer(lambda: ray.init(address=address, **quiet), REACH_S)
            else:
                # One host stands for all: what the plan asks for, it has.
                total = Counter()
                for wanted in demands:
                    total.update(wanted)
                num_cpus = max(int(total.pop("CPU")), os.cpu_count() or 1)
                num_gpus = total.pop("GPU", None)
                self._folder = Path(tempfile.mkdtemp(prefix="rlj"))
                host: dict[str, Any] = {
                    "address": "local",
                    "num_cpus": num_cpus,
                    "num_gpus": num_gpus,
                    "resources": dict(total),
                    "_node_ip_address": "127.0.0.1",
                    "_temp_dir": str(self._folder / "r"),  # which Ray opens to everybody
                }
                # What Ray starts here ends with the thread that started it.
                _answer(lambda: ray.init(**host, **quiet), START_S, self._is_over)
            self._is_ours = True
        except (RayError, OSError, RuntimeError, ValueError) as error:
            where = self._settings.address or "this host"
            raise OSError(f"there is no Ray at {where}: {_first_line(error)}") from None
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray puts its own in its place


def _answer(
    question: Callable[[], Any], timeout_s: float, is_over: threading.Event | None = None
) -> Any:
    """What Ray answers. is_over: the thread that asks lives until then.

    Raises: OSError where nothing comes in time (the thread is left behind); as asked.
    """
    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()

    def ask() -> None:
        try:
            answers.put((question(), None))
        except Exception as error:  # the boundary to Ray: whatever it is, it is the caller's
            answers.put((None, error))
        if is_over is not None:
            is_over.wait()

    threading.Thread(target=ask, name="ray-question", daemon=True).start()
    try:
        answer, error = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise OSError(f"Ray did not answer within {timeout_s:g} s; its head may be lost") from None
    if error is not None:
        raise error
    return answer


def _reach(address: str) -> None:
    """Ray itself tries for minutes. Raises: OSError, ValueError."""
    if address != "auto":
        socket.create_connection(address_of(address), ASK_S).close()


def missing(specs: Sequence[Spec], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Why these can never all be placed, or "". nodes: of ray.nodes(), those that live."""
    offered = [node["Resources"] for node in nodes]
    for spec in specs:
        wanted = demand(spec)
        if not any(all(has.get(k, 0) >= num for k, num in wanted.items()) for has in offered):
            best = {k: max([has.get(k, 0) for has in offered], default=0) for k in wanted}
            return (
                f"{spec.name} takes {_listed(wanted)} of one Ray node, and the most that a node has is"
                f" {_listed(best)}; start a node that has it: ray start --resources"
            )
    total: Counter[str] = Counter()
    for spec in specs:
        total.update(demand(spec))
    has = {name: sum(node.get(name, 0) for node in offered) for name in total}
    if short := {name: num for name, num in total.items() if has[name] < num}:
        return (
            f"{len(specs)} processes take {_listed(short)} in all, and the Ray cluster has"
            f" {_listed({name: has[name] for name in short})}; add nodes, or take servers away"
        )
    return ""


def _listed(amounts: Mapping[str, Any]) -> str:
    plain = {k: v for k, v in sorted(amounts.items()) if ":" not in k and "memory" not in k}
    return ", ".join(
        f"{k}: {v:g}" if isinstance(v, float | int) else f"{v}" for k, v in plain.items()
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
