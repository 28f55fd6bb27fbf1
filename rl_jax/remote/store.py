"""Store: the process of another host that keeps a version's buckets there, as the driver sees it.

A host with several servers behind a slow link gets each bucket once: the first server's lane pushes it to the store,
shard by shard; every server of that host is then told where it lies in the store's memory, and reads it there.
Life of a version: 1 it is placed, bucket by bucket, while servers decode; the store keys what it gets by sync, version,
bucket and shard. 2 A server needs it from its first bucket until it committed or discarded, or its process ended.
3 Once no server needs it any more, it is evicted.
Invariants: a bucket of a sync crosses the link once, whatever the number of servers; who waits for a push that failed
learns its cause; a store that dies fails what was asked of it (StoreLost), and is used again by the syncs after another
process of it is up.
Must not: pick who uses it (carriers.py), or fall back.
"""

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rl_jax.remote import region
from rl_jax.remote.channel import Answer, Channel, Lane
from rl_jax.remote.lives import Lives
from rl_jax.remote.spec import StoreSpec
from rl_jax.remote.starter import Starter
from rl_jax.settings import ClusterSettings

CLOSE_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Load:
    """One bucket of one sync on its way to one server."""

    sync_id: str
    version: int
    bucket: int
    arrays: Mapping[str, Any]  # whole ones; jax.Arrays of the train mesh, or of the host
    end_s: float  # on the monotonic clock

    @property
    def left_s(self) -> float:
        return max(0.0, self.end_s - time.monotonic())

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def key(self) -> tuple[Any, ...]:
        """Of what is moved: servers that are given the same arrays share it."""
        return (self.sync_id, self.bucket, *map(id, self.arrays.values()))


class StoreLost(ConnectionError):
    """The store's process ended, or did not answer, with a bucket that a server was to take of it."""


class StoreRefused(RuntimeError):
    """The store has no room."""


class Store:
    """Public methods from any thread; `place` waits."""

    def __init__(self, spec: StoreSpec, cluster: ClusterSettings, starter: Starter):
        self.name = spec.name
        self.refused = ""  # why nothing is asked of it any more
        self._lock = threading.Lock()
        self._pushes: dict[tuple[Any, ...], Future] = {}  # (sync, bucket, arrays) -> what to tell
        self._needed: dict[str, set[str]] = {}  # sync -> servers
        self._num_bytes = self._num_pushes = self._num_begun = 0
        self._lives = Lives(spec, cluster, starter, self._ended)
        self._address: tuple[Channel, dict[str, Any]] | None = None

    def start(self) -> None:
        self._lives.start()

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until its process is there. Raises: TimeoutError; RuntimeError if there will be none."""
        self._lives.wait_ready(deadline_s)

    def close(self) -> None:
        """End the process; its memory goes with it."""
        self._lives.close(CLOSE_S)

    @property
    def pid(self) -> int | None:
        """Of its process, where that was started here, or None."""
        return self._lives.pid

    @property
    def address(self) -> dict[str, Any] | None:
        """Of a region of its process, by which others can find out whether they could read there; None where no process
        is up."""
        channel = self._lives.channel
        if channel is None:
            return None
        if self._address is None or self._address[0] is not channel:
            try:
                told = channel.call("probe", deadline_s=CLOSE_S).body
            except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
                log.warning("%s does not say where it is: %s", self.name, error)
                return None
            self._address = (channel, told["at"])
        return self._address[1]

    def stats(self) -> dict[str, float]:
        """store_pushes, store_bytes: buckets and bytes that went to it; store_held_bytes: of memory now, as of the last
        pulse."""
        held = self._lives.stats.get("held_bytes", 0)
        return {
            "store_pushes": self._num_pushes,
            "store_bytes": self._num_bytes,
            "store_held_bytes": held,
        }

    def place(self, server: str, load: Load) -> tuple[dict[str, Any], int]:
        """Have the bucket there.

        Returns: what the server must be told to read it; bytes that this call sent, 0 where another server's did.
        Raises: StoreLost, StoreRefused; CallTimeout.
        """
        with self._lock:
            self._needed.setdefault(load.sync_id, set()).add(server)
            push = self._pushes.get(load.key)
            is_first = push is None
            if push is None:
                push = self._pushes[load.key] = Future()
        if not is_first:
            try:
                return push.result(load.left_s), 0
            except TimeoutError as error:
                raise StoreLost(f"{self.name} did not get bucket {load.bucket} in time") from error
        try:
            told = self._push(load)
        except BaseException as error:
            push.set_exception(error)
            raise
        push.set_result(told)
        return told, load.num_bytes

    def over(self, server: str, sync_id: str | None = None) -> None:
        """The server needs nothing of this sync, or of any, any more."""
        with self._lock:
            syncs = [sync_id] if sync_id is not None else list(self._needed)
            done = []
            for one in syncs:
                needs = self._needed.get(one)
                if needs is not None:
                    needs.discard(server)
                    if not needs:
                        done.append(one)
                        self._forget(one)
        if done and (channel := self._lives.channel) is not None:
            channel.tell("evict", {"sync_ids": done})

    def _push(self, load: Load) -> dict[str, Any]:
        """Raises: StoreLost, StoreRefused."""
        channel = self._lives.channel
        if channel is None:
            raise StoreLost(f"{self.name} has no process")
        described, parts = region.describe(load.arrays), region.shards(load.arrays)
        with self._lock:
            self._num_begun += 1
            number = self._num_begun
        answers: list[Future] = []
        for at, shard in enumerate(parts):
            body = {
                "sync_id": load.sync_id,
                "version": load.version,
                "bucket": load.bucket,
                "push": number,
                "shard": at,
                "num_shards": len(parts),
                "arrays": described,
                "parts": [[part.name, part.box] for part in shard],
            }
            answers.append(_asked(channel, body, [part.data for part in shard], load.left_s))
        told: Mapping[str, Any] = {}
        try:
            for answer in answers:
                told = answer.result().body
                if "refused" in told:
                    self.refused = f"{self.name} {told['refused']}"
                    raise StoreRefused(self.refused)
        except (ConnectionError, TimeoutError) as error:
            raise StoreLost(f"{self.name} was lost with bucket {load.bucket}: {error}") from error
        with self._lock:
            self._num_pushes += 1
            self._num_bytes += load.num_bytes
        return dict(told["region"])

    def _ended(self, why: str) -> None:
        """The process ended, and what it held."""
        with self._lock:
            for sync_id in list(self._needed):
                self._forget(sync_id)

    def _forget(self, sync_id: str) -> None:
        """The lock is held."""
        self._needed.pop(sync_id, None)
        for key in [key for key in self._pushes if key[0] == sync_id]:
            del self._pushes[key]


def _asked(channel: Channel, body: dict[str, Any], arrays: list[Any], left_s: float) -> Future:
    """The answer to one shard, or its error."""
    future: Future = Future()

    def done(result: Answer | Exception) -> None:
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    channel.ask("put", body, arrays, deadline_s=left_s, done=done, lane=Lane.BULK)
    return future
