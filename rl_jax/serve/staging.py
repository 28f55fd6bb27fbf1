"""Shadow weights of one server between stage and commit: the device-side half of a SyncTarget.

Owns: at most one staged set of arrays, and the acknowledgements of the last syncs. Invariants: what
is committed is complete, laid out as the engine compiled for and digested as it lies on the
server's devices; a commit repeated under its sync_id gets the same Ack and swaps nothing. The lock that the server's
thread takes is held for dictionary operations only.
Life: stage (bucket by bucket) -> digest -> commit (or discard): packed on the caller's thread, beside generation ->
claim and acknowledge on the server's thread. A new sync_id drops what an older one left.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from kernels import digest
from rl_jax.serve.commands import Commit
from rl_jax.types import Ack, Digest

Pack = Callable[[dict[str, Any]], dict[str, Any]]  # types.Engine.pack

KEPT_ACKS = 8  # a repeated commit comes from a retry of the last sync or the one before


class StagedWeights:
    def __init__(self, server: str, param_shardings: Mapping[str, Any], pack: Pack):
        self._server, self._shardings, self._pack = server, param_shardings, pack
        self._lock, self._pack_lock = threading.Lock(), threading.Lock()
        self._sync_id: str | None = None
        self._version = -1
        self._arrays: dict[str, Any] = {}
        self._packed: dict[str, Any] | None = None  # of _arrays, once a commit came
        self._digests: dict[int, digest.PendingDigest] = {}  # by bucket
        self._acks: OrderedDict[str, Ack] = OrderedDict()
        self._retired: dict[str, Any] = {}  # weights that served before, until a caller drops them

    def stage(self, sync_id: str, version: int, bucket: int, arrays: Mapping[str, Any]) -> None:
        """Raises: ValueError if an array is not one of the server's or is not laid out as
        param_shardings say.
        """
        for name, array in arrays.items():
            want = self._shardings.get(name)
            if want is None:
                raise ValueError(
                    f"{self._server}: bucket {bucket} holds {name!r}, which its model does not have; "
                    "train and serving meshes must be built from the same model settings"
                )
            if array.sharding != want and not array.sharding.is_equivalent_to(want, array.ndim):
                raise ValueError(
                    f"{self._server}: {name} was staged as {array.sharding} but the engine compiled for {want}; "
                    "reshard on the train mesh first"
                )
        pending = digest.start(arrays)  # runs while the next bucket is on its way
        with self._lock:
            if sync_id in self._acks:
                return
            if sync_id != self._sync_id:
                self._forget(sync_id)
            self._version = version
            self._arrays.update(arrays)
            self._digests[bucket] = pending

    def digest(self, sync_id: str) -> Digest:
        """Of the staged arrays, computed on the server's devices.

        Raises: KeyError if nothing is staged under sync_id.
        """
        with self._lock:
            self._check(sync_id)
            pending = list(self._digests.values())
        values = [item for one in pending for item in one.result().items()]
        return Digest({name: (int(a), int(b)) for name, (a, b) in values})

    def commit(
        self, sync_id: str, kv: str, deadline_s: float, put: Callable[[Commit], None]
    ) -> Ack:
        """The caller's side of a commit: ask the server's thread through `put` and wait. A repeated
        one swaps nothing.

        Raises: TimeoutError (the swap will not happen, unless it was under way), and what `claim`
        and the loop fail with.
        """
        if (ack := self.acknowledged(sync_id)) is not None:
            return ack
        self._pack_staged(sync_id)
        commit = Commit(sync_id, kv)
        put(commit)
        try:
            return commit.reply.wait(deadline_s, f"{self._server}: commit of {sync_id}")
        finally:
            self._drop_retired()

    def claim(self, commit: Commit) -> tuple[int, dict[str, Any]] | None:
        """The thread's side: (version, params) to swap to, or None if the caller gave up or got it
        wrong.
        """
        if not commit.reply.claim():
            return None
        self._pack_staged(commit.sync_id)  # already done, unless `commit` was gone round
        try:
            return self._take(commit.sync_id)
        except (KeyError, ValueError) as error:  # the caller's mistake, not the server's end
            commit.reply.fail(error)
            return None

    def acknowledge(self, commit: Commit, ack: Ack, retired: dict[str, Any] | None) -> None:
        """The thread's side: the swap is done. The weights that served before are dropped on the
        caller's thread, which empties the dict: freeing hundreds of arrays takes milliseconds, which
        no request should see.
        """
        with self._lock:
            self._retired = retired or {}
            self._acks[commit.sync_id] = ack
            while len(self._acks) > KEPT_ACKS:
                self._acks.popitem(last=False)
        commit.reply.set(ack)

    def discard(self, sync_id: str) -> None:
        with self._lock:
            if sync_id == self._sync_id:
                self._forget()

    def acknowledged(self, sync_id: str) -> Ack | None:
        """The Ack of a sync that was committed before."""
        with self._lock:
            return self._acks.get(sync_id)

    def _drop_retired(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, {}
        while retired:  # one by one, so that the server's thread gets the interpreter in between
            retired.popitem()

    def _take(self, sync_id: str) -> tuple[int, dict[str, Any]]:
        """(version, params) of a complete set, which is staged no more.

        Raises: KeyError, ValueError.
        """
        with self._lock:
            self._check(sync_id)
            if self._packed is None:
                missing = sorted(set(self._shardings) - set(self._arrays))
                raise ValueError(
                    f"{self._server}: sync {sync_id} lacks {len(missing)} of {len(self._shardings)} parameters, "
                    f"first {missing[0]!r}; stage every bucket before the commit"
                )
            version, packed = self._version, self._packed
            self._forget()
            return version, packed

    def _pack_staged(self, sync_id: str) -> None:
        """Pack a complete set once; an incomplete one is told by `_take`."""
        with self._pack_lock:
            with self._lock:
                is_complete = not set(self._shardings) - set(self._arrays)
                if sync_id != self._sync_id or self._packed is not None or not is_complete:
                    return
                arrays, self._arrays = self._arrays, {}
            packed = self._pack(arrays)
            with self._lock:
                if sync_id == self._sync_id:
                    self._packed = packed

    def _forget(self, sync_id: str | None = None) -> None:
        """Drop what is staged, in favour of sync_id's; the lock is held."""
        self._sync_id, self._arrays, self._packed, self._digests = sync_id, {}, None, {}

    def _check(self, sync_id: str) -> None:
        if sync_id != self._sync_id:
            raise KeyError(f"{self._server}: nothing is staged under sync {sync_id!r}")
