"""How a bucket of weights gets to a server of another process: by shared memory, through its host's store, from device
to device, or over its channel.

Carriers picks the way for each server and sync, and keeps to it for that sync: `weights.transport` says which ways are
to be tried, and a server is asked whether it can read a region of the driver's or of a store's (region.reach); that it
can is what "on this host" means. Where it cannot, or there is no memory for a region, the channel is left, which always
works; one line says so. `transfer` (transfer.py) is never picked unasked: a process must pull a lone array first, and
one that failed in a pull gets all later syncs over its channel, as a pull that hangs cannot be ended.
SharedBuckets holds the driver's two regions. All servers of this host read a bucket from one of them; a region is
written again once nobody reads it, so that one bucket is written while the one before is read.
Invariants: what does not fit, or is not read in time, is sent over the channel, never waited for beyond PATIENCE of the
deadline; a reader that was given up on cannot take what comes after for what it was told (region.take).
Must not: know what a bucket is for, fence a server, or try anything twice.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from rl_jax.remote import region
from rl_jax.remote.channel import Channel, Lane
from rl_jax.remote.region import NoRoom, Region
from rl_jax.remote.store import Load, Store, StoreRefused
from rl_jax.remote.transfer import Offers, PullRefused

REGIONS = 2
PATIENCE = 0.25  # of the time that is left, for a region that others still read
REACH_S = 5.0  # for a server to try to open a region
TRY_S = 10.0  # and to pull a lone array, and to say so
PULLS = "pulls"  # among the keys of regions
MIN_SIZE = 1 << 16  # bytes of a region: small buckets differ by little

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Held:
    """One of the driver's regions and what it holds."""

    region: Region | None = None
    key: tuple[Any, ...] | None = None
    told: dict[str, Any] | None = None  # None while it is written
    num_readers: int = 0
    used_s: float = field(default_factory=time.monotonic)


class SharedBuckets:
    """The driver's regions. Public methods from any thread."""

    def __init__(self, free: Callable[[], int] = region.free_bytes):
        """free: bytes of memory that this process could still take."""
        self._free, self._changed = free, threading.Condition()
        self._held = [_Held() for _ in range(REGIONS)]
        self._probe: Region | None = None
        self.refused = ""  # why there are no regions any more
        self._closed = False

    @property
    def address(self) -> dict[str, Any] | None:
        """Of a region by which a process can find out whether it could read the others; None where there are none."""
        with self._changed:
            if self._probe is None and not self.refused and not self._closed:
                try:
                    self._probe = Region(0, self._free())
                except NoRoom as error:
                    self._refuse(error)
            return None if self._probe is None else self._probe.address

    @property
    def num_bytes(self) -> int:
        """Of memory held now."""
        with self._changed:
            return sum(held.region.size for held in self._held if held.region is not None)

    @contextmanager
    def lend(self, load: Load) -> Iterator[dict[str, Any] | None]:
        """What a reader must be told of the bucket, which stays there until the context ends; None where there is no
        room for it, or no region gets free in time."""
        held = self._borrow(load)
        try:
            yield None if held is None else held.told
        finally:
            if held is not None:
                with self._changed:
                    held.num_readers -= 1
                    held.used_s = time.monotonic()
                    if self._closed:
                        self._drop(held)
                    self._changed.notify_all()

    def close(self) -> None:
        """Free the memory; what is being read, once it is not."""
        with self._changed:
            self._closed = True
            for held in self._held:
                self._drop(held)
            if self._probe is not None:
                self._probe.close()
                self._probe = None
            self._changed.notify_all()

    def _borrow(self, load: Load) -> _Held | None:
        """The region with the bucket, with one more reader; who comes first writes it."""
        until_s = time.monotonic() + PATIENCE * load.left_s
        with self._changed:
            while True:
                if self.refused or self._closed:
                    return None
                there = next((held for held in self._held if held.key == load.key), None)
                free = [held for held in self._held if not held.num_readers]
                if there is not None and there.told is not None:
                    there.num_readers += 1
                    return there
                if there is None and free:
                    held = min(free, key=lambda held: held.used_s)
                    held.key, held.told, held.num_readers = load.key, None, 1
                    break
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None
        return self._written(held, load)

    def _written(self, held: _Held, load: Load) -> _Held | None:
        """By its one reader, with the lock free."""
        told = None
        try:
            described = region.describe(load.arrays)
            size = region.length_of(described)
            if held.region is None or held.region.size < size:
                if held.region is not None:
                    held.region.close()
                    held.region = None
                held.region = Region(max(size, MIN_SIZE), self._free())
            stamp = held.region.fill(load.sync_id, load.version, load.bucket, load.arrays)
            told = held.region.told(stamp, described)
        except NoRoom as error:
            with self._changed:
                self._refuse(error)
        finally:
            with self._changed:
                held.told = told
                if told is None:
                    held.key, held.num_readers = None, 0
                self._changed.notify_all()
        return held if told is not None else None

    def _refuse(self, error: NoRoom) -> None:
        """The lock is held."""
        self.refused = str(error)
        for held in self._held:
            self._drop(held)

    def _drop(self, held: _Held) -> None:
        """Unless it is read, or written; the lock is held."""
        if held.region is not None and not held.num_readers:
            held.region.close()
            held.region, held.key, held.told = None, None, None


@dataclass
class _Way:
    """How buckets of one sync get to one server's process."""

    channel: Channel
    sync_id: str
    by: "By"


By = SharedBuckets | Store | Offers | None  # None = the channel


class Carriers:
    """Of all servers of a cluster. `carry` from any thread, for one server from one at a time."""

    def __init__(
        self,
        transport: str = "channel",
        stores: Sequence[Store] = (),
        shared: SharedBuckets | None = None,
    ):
        """transport: auto | shared | store | channel | transfer. shared: the driver's regions; None: new ones."""
        self.transport, self.stores = transport, stores
        self.shared = SharedBuckets() if shared is None else shared
        self.offers = Offers()
        self._lock = threading.Lock()
        self._ways: dict[str, _Way] = {}
        # channel -> region's key, or PULLS -> why its process cannot read there, or pull, or ""
        self._reached: WeakKeyDictionary[Channel, dict[str, str]] = WeakKeyDictionary()
        self._said: set[tuple[str, str]] = set()

    def carry(self, server: str, channel: Channel, load: Load) -> int:
        """Bring the bucket to the server's process and have it staged there. Returns: bytes that crossed a socket.

        Raises: what the channel raises; StoreLost where the store died of which the server was to take it; what
        Offers.offer raises.
        """
        way = self._way(server, channel, load)
        body: dict[str, Any] = {
            "sync_id": load.sync_id,
            "version": load.version,
            "bucket": load.bucket,
        }
        if isinstance(way.by, SharedBuckets):
            with way.by.lend(load) as told:
                if told is not None:
                    channel.call("stage", body | {"region": told}, deadline_s=load.left_s)
                    return 0
            why = way.by.refused or "both regions are read by others"
            self._say(server, f"no shared memory: {why}")
        elif isinstance(way.by, Offers):
            try:
                told = way.by.offer(server, channel.host, load)
                channel.call("stage", body | {"offer": told}, deadline_s=load.left_s)
            except Exception as error:
                with self._lock:
                    self._reached[channel][PULLS] = f"bucket {load.bucket} failed: {error}"
                raise
            return load.num_bytes
        elif way.by is not None:
            try:
                told, num_bytes = way.by.place(server, load)
                channel.call("stage", body | {"region": told}, deadline_s=load.left_s)
                return num_bytes
            except StoreRefused as error:
                self._say(server, f"{error}")
        host = [np.asarray(array) for array in load.arrays.values()]
        body["names"] = list(load.arrays)
        channel.call("stage", body, host, deadline_s=load.left_s, lane=Lane.BULK)
        return load.num_bytes

    def over(self, server: str, sync_id: str | None = None) -> None:
        """The server needs nothing more of this sync, or of any."""
        self.offers.over(server, sync_id)
        for store in self.stores:
            store.over(server, sync_id)

    def close(self) -> None:
        self.shared.close()
        self.offers.close()

    def _way(self, server: str, channel: Channel, load: Load) -> _Way:
        with self._lock:
            way = self._ways.get(server)
        if way is None or way.channel is not channel or way.sync_id != load.sync_id:
            before = way.by if way is not None and way.channel is channel else False
            way = _Way(channel, load.sync_id, self._pick(server, channel, load))
            with self._lock:
                self._ways[server] = way
            if way.by is not before:
                log.info("%s gets its weights by %s", server, _name(way.by))
        return way

    def _pick(self, server: str, channel: Channel, load: Load) -> By:
        whys = []
        if self.transport == "transfer":
            if not (why := self._pulls(server, channel, load)):
                return self.offers
            whys.append(f"no transfer between devices: {why}")
        if self.transport in ("auto", "shared"):
            if not (
                why := self.shared.refused or self._reaches(channel, self.shared.address, load)
            ):
                return self.shared
            whys.append(f"no shared memory: {why}")
        if self.transport in ("auto", "store"):
            for store in self.stores:
                if (address := store.address) is None:
                    whys.append(f"{store.name} is not up")
                elif store.refused:
                    whys.append(store.refused)
                elif not (why := self._reaches(channel, address, load)):
                    return store
                else:
                    whys.append(f"{store.name}: {why}")
        is_asked = self.transport in ("shared", "store", "transfer") or (
            self.transport == "auto" and self.stores
        )
        if is_asked or self.shared.refused:
            self._say(server, "; ".join(whys))
        return None

    def _reaches(self, channel: Channel, address: Mapping[str, Any] | None, load: Load) -> str:
        """Why the process cannot read the region, or \"\"."""
        if address is None:
            return self.shared.refused or "it is closed"
        with self._lock:
            known = self._reached.setdefault(channel, {}).get(address["key"])
        if known is None:
            told = channel.call("reach", {"at": address}, deadline_s=min(REACH_S, load.left_s))
            known = str(told.body["why"])
            with self._lock:
                self._reached[channel][address["key"]] = known
        return known

    def _pulls(self, server: str, channel: Channel, load: Load) -> str:
        """Why the process cannot pull, or \"\": it is asked to pull a lone array."""
        with self._lock:
            known = self._reached.setdefault(channel, {}).get(PULLS)
        if known is None:
            lone = {"lone": np.ones(1, np.float32)}
            load = replace(load, arrays=lone, end_s=min(load.end_s, time.monotonic() + TRY_S))
            try:
                told = self.offers.offer(server, channel.host, load)
            except PullRefused as error:
                known = str(error)
            else:
                body = channel.call("try_pull", {"offer": told}, deadline_s=load.left_s).body
                known = str(body["why"])
        with self._lock:
            self._reached[channel][PULLS] = known
        return known

    def _say(self, server: str, why: str) -> None:
        """Once for each server and reason."""
        with self._lock:
            if (server, why) in self._said:
                return
            self._said.add((server, why))
        text = "%s gets its weights over its channel (weights.transport=%s): %s"
        log.warning(text, server, self.transport, why, extra={"kind": "weights over the channel"})


def _name(by: By) -> str:
    if isinstance(by, Offers):
        return "a transfer between devices"
    if isinstance(by, Store):
        return f"the store {by.name}"
    return "its channel" if by is None else "shared memory"
