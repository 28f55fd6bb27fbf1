"""Offers and pulls: arrays that go from one process's devices to another's by `jax.experimental.transfer`.

Offers stands in the process that has the arrays, Pulls in the one that gets them. What the library does not do is done
here: a number that nobody offered hangs for ever, an offer cannot be withdrawn, and an array that is asked for in
another layout than it was offered in arrives wrong in silence.
Life of a bucket: 1 `offer` cuts it into parts that lie whole on one device each, and offers them under a number of 62
random bits. 2 What there is (address, number, arrays, parts, jaxlib and platform) is told over the run's channel; that
port asks nobody for the run's secret, so the number is all that protects the bucket. 3 `pull` agrees to what it was
told or refuses, and asks for just these parts, on one device. 4 Once no server needs a sync any more (`over`), its
transfer server is dropped, and with it the offers that nobody pulled.
Invariants: one transfer server a sync and address, which listens on the one address by which the peer reaches this
process; a pull ends by its limit, with a name: its thread is given up. A pull that hangs keeps its connection, and so
the sender's offers of that sync, until this process ends: whoever asked must not have a process pull again after it.
Must not: pick who uses it or fall back (carriers.py), or say whether the weights are right (their digests do).
"""

import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from rl_jax.remote import region
from rl_jax.remote.framing import DTYPES
from rl_jax.remote.region import Box, Part
from rl_jax.remote.store import Load

NUMBER_BITS = 62
WATCHED = 0.8  # of a call's time, for a pull: what is left is for its failure to be told
MAX_PARTS = 1 << 20  # of a bucket


class PullRefused(ValueError):
    """What was told is no offer that this process could pull."""


@cache
def unsupported() -> str:
    """Why this process can neither offer nor pull, or \"\"."""
    try:
        import_module("jax.experimental.transfer")
    except ImportError as error:
        return f"jax {jax.__version__} has no jax.experimental.transfer ({error})"
    return ""


def _serve(host: str) -> Any:
    """A transfer server of this process's devices on a port of host. Raises: PullRefused."""
    if why := unsupported():
        raise PullRefused(why)
    where = f"[{host}]:0" if ":" in host else f"{host}:0"
    client = jax.local_devices()[0].client
    start = import_module("jax.experimental.transfer").start_transfer_server
    try:
        return start(client, where, [where])
    except (RuntimeError, ValueError) as error:  # the boundary to XLA: what its platforms lack
        raise PullRefused(
            f"no transfer server of platform {client.platform} starts on {where}: {error}"
        ) from error


def _here() -> dict[str, str]:
    """What must be the same at both ends."""
    return {"jaxlib": version("jaxlib"), "platform": jax.local_devices()[0].platform}


class Offers:
    """Public methods from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._servers: dict[tuple[str, str], Any] = {}  # (sync, host) -> transfer server
        self._needed: dict[str, set[str]] = {}  # sync -> servers

    @property
    def num_servers(self) -> int:
        """Transfer servers that there are now."""
        with self._lock:
            return len(self._servers)

    def offer(self, server: str, host: str, load: Load) -> dict[str, Any]:
        """Have the bucket ready to be pulled once, by `server`.

        Args:    host: the address of this process by which that of `server` reaches it.
        Returns: what `pull` must be told, as JSON. Raises: PullRefused; what computing the arrays raised.
        """
        parts = [part for shard in region.shards(load.arrays) for part in shard]
        device = jax.local_devices()[0]
        data = [
            part.data if isinstance(part.data, jax.Array) else jax.device_put(part.data, device)
            for part in parts
        ]
        jax.block_until_ready(data)
        number = secrets.randbits(NUMBER_BITS)
        with self._lock:
            key = (load.sync_id, host)
            if key not in self._servers:
                self._servers[key] = _serve(host)
            self._needed.setdefault(load.sync_id, set()).add(server)
            self._servers[key].await_pull(number, data)
            address = self._servers[key].address()
        return _here() | {
            "at": address,
            "number": number,
            "sync_id": load.sync_id,
            "version": load.version,
            "bucket": load.bucket,
            "arrays": region.describe(load.arrays),
            "parts": [[part.name, part.box] for part in parts],
        }

    def over(self, server: str, sync_id: str | None = None) -> None:
        """The server pulls nothing more of this sync, or of any."""
        dropped = []
        with self._lock:
            for one in [sync_id] if sync_id is not None else list(self._needed):
                needs = self._needed.get(one, set())
                needs.discard(server)
                if not needs:
                    self._needed.pop(one, None)
                    keys = [key for key in self._servers if key[0] == one]
                    dropped += [self._servers.pop(key) for key in keys]
        del dropped  # what it offered is freed with the lock free

    def close(self) -> None:
        """Withdraw everything."""
        with self._lock:
            servers, self._servers, self._needed = self._servers, {}, {}
        del servers


class Pulls:
    """Of one process; `pull` from one thread at a time."""

    def __init__(self, host: str):
        """host: the address of this process by which whoever offers could reach it."""
        self._host, self._server = host, None

    def pull(self, told: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The arrays of a bucket: jax.Arrays on this process's first device, or, of those that came in several parts,
        np.ndarrays.

        Args:    told: of Offers.offer. Raises: PullRefused, with nothing asked for; TimeoutError after limit_s, with
                 the pull given up; RuntimeError where it broke off.
        """
        what = (
            f"the pull of bucket {told['bucket']} of sync {told['sync_id']} (version {told['version']}) from"
            f" {told['at']}"
        )
        parts = agreed(told)
        if self._server is None:
            self._server = _serve(self._host)
        place = SingleDeviceSharding(jax.local_devices()[0])
        asked = [
            jax.ShapeDtypeStruct(_shape(part.box), part.data.newbyteorder("="), sharding=place)
            for part in parts
        ]
        future: Future = Future()
        words = (self._server, told["at"], told["number"], asked, future)
        threading.Thread(target=_pulled, args=words, name="pull", daemon=True).start()
        try:
            came = future.result(limit_s)
        except TimeoutError:
            raise TimeoutError(
                f"{what} did not end within {limit_s:.3g} s (of weights.deadline_s), and was given up: its number is"
                " not offered there, or the sender is stuck or cannot be reached"
            ) from None
        except RuntimeError as error:
            raise RuntimeError(f"{what} broke off: {error}") from error
        return _whole(told["arrays"], parts, came)


def _pulled(
    server: Any, address: str, number: int, asked: list[jax.ShapeDtypeStruct], future: Future
) -> None:
    """Its connection ends with it: while one is open the sender's server lives, and what it offers."""
    try:
        future.set_result(jax.block_until_ready(server.connect(address).pull(number, asked)))
    except Exception as error:  # the boundary to XLA; who waits tells it
        future.set_exception(RuntimeError(f"{error}"))


def agreed(told: Mapping[str, Any]) -> list[Part]:
    """The parts to ask for, each with its dtype as data. Raises: PullRefused for an offer that does not fit together,
    or another jaxlib's or platform's."""
    for name, here in _here().items():
        if told[name] != here:
            raise PullRefused(
                f"the sender's {name} is {told[name]}, and this process's is {here}: what one writes the other may"
                " not read"
            )
    number = told["number"]
    if type(number) is not int or not 0 <= number < 1 << NUMBER_BITS:
        raise PullRefused(f"the offer's number is none of {NUMBER_BITS} bits")
    if len(told["parts"]) > MAX_PARTS:
        raise PullRefused(f"{len(told['parts'])} parts are offered, of at most {MAX_PARTS}")
    arrays = {name: (dtype, tuple(shape)) for name, dtype, shape in told["arrays"]}
    boxes: dict[str, list[Box]] = {name: [] for name in arrays}
    parts = []
    for name, told_box in told["parts"]:
        box = tuple((int(start), int(stop)) for start, stop in told_box)
        if name not in arrays or arrays[name][0] not in DTYPES:
            raise PullRefused(f"a part of {name} is offered, which is no array of the bucket")
        boxes[name].append(box)
        parts.append(Part(name, box, DTYPES[arrays[name][0]]))
    for name, (_, shape) in arrays.items():
        if not _tiles(boxes[name], shape):
            raise PullRefused(
                f"the parts of {name} that are offered, {boxes[name]}, do not make up its shape {list(shape)}"
            )
    return parts


def _tiles(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether each element of the shape is in one box."""
    for at, box in enumerate(boxes):
        if len(box) != len(shape) or any(
            not 0 <= start <= stop <= size for (start, stop), size in zip(box, shape)
        ):
            return False
        for other in boxes[:at]:
            if all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(box, other)):
                return False
    return sum(int(np.prod(_shape(box))) for box in boxes) == int(np.prod(shape))


def _whole(
    described: region.Described, parts: Sequence[Part], came: Sequence[jax.Array]
) -> dict[str, Any]:
    by_name: dict[str, list[tuple[Box, jax.Array]]] = {name: [] for name, _, _ in described}
    for part, array in zip(parts, came, strict=True):
        by_name[part.name].append((part.box, array))
    out: dict[str, Any] = {}
    for name, dtype, shape in described:
        if len(by_name[name]) == 1:
            out[name] = by_name[name][0][1]
            continue
        out[name] = np.empty(shape, DTYPES[dtype])
        for box, array in by_name[name]:
            out[name][tuple(slice(*r) for r in box)] = np.asarray(array)
    return out


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
