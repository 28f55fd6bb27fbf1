"""The program of a store's process: a version's buckets in the memory of its host, for the servers there to read.

Life: 1 the channel to the driver is opened (program.py). 2 `put` brings a bucket shard by shard: a region is made at
its first, and stamped at its last, whose answer says where it lies. 3 Servers of this host read it (region.take), which
the store does not notice. 4 `evict` frees all buckets of a sync. 5 The channel ends: so does the process, and its
memory.
Keyed: (sync, version, bucket, push) and within it by shard. A bucket that is pushed again is another one.
Invariants: at most KEPT_SYNCS syncs are held, the latest; a bucket that does not fit is refused, and nothing of it
kept; what was not put whole is never told of.
Must not: know servers, keep anything on a disk, or use a device.
"""

import logging
import socket
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_jax.remote import region
from rl_jax.remote.channel import Request
from rl_jax.remote.program import run_program
from rl_jax.remote.region import NoRoom, Part, Region
from rl_jax.remote.service import Service
from rl_jax.remote.spec import STORE_PROGRAM

KEPT_SYNCS = 2  # one that is read still, and one that is put

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Bucket:
    region: Region
    arrays: list[list[Any]]  # region.describe
    num_shards: int
    came: set[int] = field(default_factory=set)


class StoreService(Service):
    """The store of this process, as its channel sees it. Only `run`'s thread touches the buckets."""

    orders = ("build", "probe", "put", "evict", "stats", "close")

    def __init__(self, sock: socket.socket, told: Mapping[str, Any]):
        self._syncs: OrderedDict[str, dict[tuple[int, int, int], _Bucket]] = OrderedDict()
        self._shown: Region | None = None
        self._held_bytes = self._num_puts = 0
        super().__init__(sock, told)

    def pulse(self) -> dict[str, Any]:
        doing = "it holds weights" if self._syncs else "it holds nothing"
        return {
            "ready": True,
            "dead": None,
            "progress": [self._num_puts, doing, False, True],
            "stats": {"held_bytes": self._held_bytes},
        }

    def _build(self, request: Request) -> None:
        request.answer()

    def _stats(self, request: Request) -> None:
        request.answer({"stats": {"held_bytes": self._held_bytes}})

    def _close(self, request: Request) -> None:
        for sync_id in list(self._syncs):
            self._drop(sync_id)
        request.answer()

    def _probe(self, request: Request) -> None:
        """Of a region that only shows where this process is."""
        if self._shown is None:
            self._shown = Region(0)
        request.answer({"at": self._shown.address})

    def _put(self, request: Request) -> None:
        body = request.body
        buckets = self._sync(body["sync_id"])
        key = (body["version"], body["bucket"], body["push"])
        bucket = buckets.get(key)
        if bucket is None:
            try:
                made = Region(region.length_of(body["arrays"]))
            except NoRoom as error:
                request.answer({"refused": f"has no room: {error}"})
                return
            bucket = buckets[key] = _Bucket(made, body["arrays"], body["num_shards"])
            self._held_bytes += made.size
            made.begin()
        parts = [
            Part(name, tuple((start, stop) for start, stop in box), array)
            for (name, box), array in zip(body["parts"], request.arrays, strict=True)
        ]
        bucket.region.write(bucket.arrays, parts)
        bucket.came.add(body["shard"])
        if len(bucket.came) < bucket.num_shards:
            request.answer({})
            return
        self._num_puts += 1
        stamp = bucket.region.stamp(body["sync_id"], body["version"], body["bucket"], bucket.arrays)
        request.answer({"region": bucket.region.told(stamp, bucket.arrays)})

    def _evict(self, request: Request) -> None:
        for sync_id in request.body["sync_ids"]:
            self._drop(sync_id)

    def _sync(self, sync_id: str) -> dict[tuple[int, int, int], _Bucket]:
        """Its buckets; of a new one, the oldest makes room for it."""
        if sync_id not in self._syncs:
            while len(self._syncs) >= KEPT_SYNCS:
                self._drop(next(iter(self._syncs)))
            self._syncs[sync_id] = {}
        return self._syncs[sync_id]

    def _drop(self, sync_id: str) -> None:
        for bucket in self._syncs.pop(sync_id, {}).values():
            self._held_bytes -= bucket.region.size
            bucket.region.close()


def main() -> None:
    run_program(STORE_PROGRAM, lambda sock, told: StoreService(sock, told).run())


if __name__ == "__main__":
    main()
