"""WeightSync: the protocol that makes trained parameters the served version, on every live server or visibly not.

Owns: the published version, and which servers take part. Life of one sync (steps 1 and 2 together, and each half of
step 3, have `deadline_s`; a server that lets it pass is out, and the others get it anew):
1. Each bucket is sent (a transport, on the train lane, so that it has the deadline, too), and each server stages it in
   shadow buffers while it goes on serving the old version. At most IN_FLIGHT buckets are under way: a bound on memory.
2. Each server's digest of what it staged must equal the train state's, parameter by parameter.
3. Prefill servers commit, then decode servers: each swaps pointers between two of its blocks and acknowledges.
4. Only then is the version published.
Ends: PUBLISHED: every server; PARTIAL: some servers are fenced, at least one decode server has the new version;
ABORTED: nothing was committed, all discarded, the old version serves everywhere; FAILED: commits began and no decode
server acknowledged, so no version can be relied on.
Invariants: a server that failed in any phase, or may hold another version than the published one, is fenced before
publish returns; it is refitted by the next sync it gets through, unless it is still stuck in a call, or failed
max_failures syncs in a row: then it is removed, fenced for good. A process that is away does not count: how often it
may come back is the cluster's to say. The version only rises; every server call is made from that server's lane with a
deadline; calls of one sync carry one sync_id, so a repeated call is harmless.
Must not: retry (the driver's), read servers' state, or hold a lock.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import jax

from kernels import digest
from rl_jax.settings import WeightSettings
from rl_jax.timeline import OFF, Track
from rl_jax.types import Ack, Digest, SourceLost, SyncResult, SyncTarget
from rl_jax.weights.fetch_copy import Elsewhere
from rl_jax.weights.host_copy import ByPlace
from rl_jax.weights.lanes import Lane, Overdue, wait
from rl_jax.weights.packed_copy import Arrays
from rl_jax.weights.plan import Bucket, SyncPlan

IN_FLIGHT = 3  # buckets: one being resharded, one being copied, one being digested and staged
NO_DECODE = "no decode server is left"
GRACE_S = 1.0  # a server that keeps its own deadline is heard before ours gives it up

log = logging.getLogger(__name__)

Params = Mapping[str, jax.Array] | Elsewhere


class WeightSync:
    """Sole writer of the published version. One publish at a time, from the driver's thread."""

    def __init__(
        self,
        plan: SyncPlan,
        targets: Sequence[SyncTarget],
        settings: WeightSettings,
        transport: Any = None,
    ):
        """transport: has PackedCopy's `send`; ByPlace of the plan, by settings.transport, unless given."""
        names = {t.name for t in targets}
        if names != set(plan.targets):
            raise ValueError(
                f"the sync plan is for servers {sorted(plan.targets)}, got {sorted(names)}"
            )
        self.plan, self.settings = plan, settings
        self.version = -1  # of the last published weights; -1 before the first
        self.track: Track = OFF
        self._transport = ByPlace(plan, settings.transport) if transport is None else transport
        self._targets = {t.name: t for t in targets}
        self._lanes = {name: Lane(name) for name in (*self._targets, "train")}
        self._fenced: dict[str, str] = {}  # server -> why
        self._failures: Counter[str] = Counter()  # syncs in a row, by server
        self._attempts = 0
        self._last: SyncResult | None = None

    @property
    def fenced(self) -> Mapping[str, str]:
        """Servers that do not have the published version, and why."""
        return dict(self._fenced)

    def publish(self, params: Params, version: int) -> SyncResult:
        """Makes `params` the served weights under `version`. Blocks until every live server acknowledged or failed.

        Args:    params: the train state's, as planned; may be donated as soon as this returns.
        Raises:  ValueError if version is not above the published one or params are not the planned ones. A version that
                 is published already returns its result again. SourceLost, with all that was staged discarded.
        """
        if self._last is not None and version == self.version:
            return self._last
        if version < self.version:
            raise ValueError(f"version {version} cannot follow {self.version}: versions only rise")
        _check(self.plan, params)
        self._attempts += 1
        result = _Attempt(self, params, version).run()
        if result.state in ("PUBLISHED", "PARTIAL"):
            self.version, self._last = version, result
        level = logging.INFO if result.state == "PUBLISHED" else logging.ERROR
        log.log(level, "weights of version %d: %s %s", version, result.state, result.detail)
        return result

    def close(self) -> None:
        """Ends the lanes' threads; a stuck one is left behind (it is a daemon)."""
        for lane in self._lanes.values():
            lane.close(timeout_s=1.0)

    def taking_part(self) -> dict[str, SyncTarget]:
        """Servers the next sync is for: all but those removed, and those fenced that are still stuck in a call."""
        return {
            name: t
            for name, t in self._targets.items()
            if name not in self.removed
            and not (name in self._fenced and self._lanes[name].is_stuck)
        }

    @property
    def removed(self) -> frozenset[str]:
        """Servers that no sync is for any more."""
        most = self.settings.max_failures
        return frozenset(name for name, num in self._failures.items() if num >= most)

    def failure(self, name: str, why: str) -> str:
        """The server failed a sync, once each. Returns: why it fails this sync, or every one from now on."""
        self._failures[name] += 1
        if name not in self.removed:
            return why
        limit = f"weights.max_failures={self.settings.max_failures}"
        why = f"removed, as it failed {self._failures[name]} syncs in a row ({limit}): {why}"
        log.error("server %s is %s", name, why)
        self.fence(name, why)  # also where the sync as a whole leaves the old version serving
        return why

    def fence(self, name: str, why: str) -> None:
        self._fenced[name] = why
        self._targets[name].fence(why)

    def refitted(self, name: str) -> None:
        self._fenced.pop(name, None)
        del self._failures[name]


class _Attempt:
    """One sync: its deadline, what was staged, who failed and why."""

    def __init__(self, sync: WeightSync, params: Params, version: int):
        self.sync, self.params, self.version = sync, params, version
        self.sync_id = f"v{version}.{sync._attempts}"
        self.targets = sync.taking_part()
        self.start = time.monotonic()
        self.deadline = 0.0  # of the phase under way
        self.failed: dict[str, str] = {}
        self.out: set[str] = set()  # of the failed, those fenced in this sync
        self.stage_s = 0.0
        self.link_bytes = 0
        self.digest = ""  # of the train state, once it is known
        self.acks: list[Ack] = []

    def run(self) -> SyncResult:
        self.begin_phase()
        try:
            with self.span("stage"):
                cause = self.stage()
            if cause is None:
                with self.span("verify"):
                    cause = self.verify()
        except SourceLost:
            self.discard(self.targets)
            raise
        self.stage_s = time.monotonic() - self.start
        if cause is None and not self.has_decode():
            cause = NO_DECODE
        if cause is not None:
            self.discard(self.targets)
            return self.result("ABORTED", cause)
        self.fence_failed()
        for kind in ("prefill", "decode"):
            self.begin_phase()
            with self.span("commit", servers=kind):
                self.commit(kind)
            self.fence_failed()
        if not any(self.targets[a.server].kind == "decode" for a in self.acks):
            return self.result("FAILED", "no decode server acknowledged")
        return self.result("PARTIAL" if self.sync.fenced else "PUBLISHED", "")

    def span(self, kind: str, **more: str) -> AbstractContextManager[None]:
        return self.sync.track.span(kind, version=self.version, **more)

    def begin_phase(self) -> None:
        self.deadline = time.monotonic() + self.sync.settings.deadline_s

    def stage(self) -> str | None:
        """Phase 1. Returns why the whole sync must abort, or None; failures of single servers go to `failed`."""
        staging: list[dict[str, Future]] = []
        for bucket in self.sync.plan.buckets:
            try:
                sent = self.send(bucket)
            except SourceLost:
                raise
            except Exception as error:  # the boundary to XLA: out of memory, a dead device, a hang
                return f"bucket {bucket.index} could not be sent from the train mesh: {error}"
            calls = {}
            for name in self.good():
                arrays = sent.pop(name)
                calls[name] = self.call(name, self.stage_one, self.targets[name], bucket, arrays)
                del arrays
            staging.append(calls)
            if len(staging) >= IN_FLIGHT:
                self.staged(staging.pop(0), f"bucket {bucket.index - IN_FLIGHT + 1} to be staged")
            if not self.has_decode():
                return NO_DECODE
        # Behind the last bucket on every lane: the train mesh has its digest done while the last copies are under way.
        self.source = self.call("train", self.source_digest)
        self.digests = {n: self.call(n, t.digest, self.sync_id) for n, t in self.good().items()}
        for calls in staging:
            self.staged(calls, "the last buckets to be staged")
        return None

    def send(self, bucket: Bucket) -> dict[str, Arrays]:
        """Raises: Overdue, and what the transport raises."""
        send = self.sync._transport.send
        asked = (self.params, bucket.names, list(self.good()))
        if isinstance(self.params, Elsewhere):
            return send(*asked)  # has a deadline of its own, and restarts processes on this thread
        what = f"bucket {bucket.index} to be sent ({self.sync.settings.deadline_s:g} s, weights.deadline_s)"
        return wait(self.call("train", send, *asked), self.deadline, what)

    def staged(self, calls: Mapping[str, Future], what: str) -> None:
        self.link_bytes += sum(self.collect(calls, what).values())

    def stage_one(self, target: SyncTarget, bucket: Bucket, arrays: Arrays) -> int:
        """On the target's lane: hands the arrays over, waits until they are there. Returns: bytes through sockets."""
        num_bytes = target.stage(self.sync_id, self.version, bucket.index, arrays)
        jax.block_until_ready(list(arrays.values()))
        return num_bytes or 0

    def verify(self) -> str | None:
        """Phase 2. Returns why the whole sync must abort, or None."""
        try:
            want = wait(self.source, self.deadline, "the digest of the train state")
        except SourceLost:
            raise
        except Exception as error:  # the boundary to XLA, as in stage
            return f"the train state could not be digested: {error}"
        self.digest = digest.of_all(want.values)
        for name, got in self.collect(self.digests, "its digest").items():
            if differing := want.differing(got):
                more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
                why = f"digest differs for parameter {differing[0]}{more}"
                self.failed[name] = self.sync.failure(name, why)
        return None

    def source_digest(self) -> Digest:
        if isinstance(self.params, Elsewhere):
            return self.params.digest(self.sync.plan.dtype.name)
        values = digest.digest_arrays(self.params, self.sync.plan.dtype)
        return Digest({name: (int(a), int(b)) for name, (a, b) in values.items()})

    def commit(self, kind: str) -> None:
        """Phase 3 for one kind of server; all of a kind at once, so that pauses overlap."""
        settings = self.sync.settings
        calls = {
            name: self.call(name, t.commit, self.sync_id, settings.kv, settings.deadline_s)
            for name, t in self.good().items()
            if t.kind == kind
        }
        for name, ack in self.collect(calls, "its commit", GRACE_S).items():
            if ack.version != self.version:
                why = f"acknowledged version {ack.version}, not {self.version}"
                self.failed[name] = self.sync.failure(name, why)
            else:
                self.acks.append(ack)
                self.sync.refitted(name)

    def discard(self, targets: Mapping[str, SyncTarget]) -> None:
        """Frees what was staged. Not waited for: a lane's order puts it before anything a later sync asks."""
        for name, target in targets.items():
            self.call(name, target.discard, self.sync_id).add_done_callback(
                lambda future, name=name: _log_failure(name, self.sync_id, future)
            )

    def fence_failed(self) -> None:
        """Servers that failed are out until refitted, and free what they staged."""
        new = {n: why for n, why in self.failed.items() if n not in self.out}
        for name, why in new.items():
            self.sync.fence(name, why)
        self.discard({n: self.targets[n] for n in new})
        self.out.update(new)

    def good(self) -> dict[str, SyncTarget]:
        return {n: t for n, t in self.targets.items() if n not in self.failed}

    def has_decode(self) -> bool:
        return any(t.kind == "decode" for t in self.good().values())

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Future:
        return self.sync._lanes[name].submit(function, *args)

    def collect(
        self, calls: Mapping[str, Future], what: str, grace_s: float = 0.0
    ) -> dict[str, Any]:
        """Results by server; a server that raised or is late is failed, with the cause."""
        results, overdue = {}, False
        for name, future in calls.items():
            if name in self.failed:
                continue
            try:
                results[name] = wait(future, self.deadline + grace_s, f"{name}: {what}")
            except Overdue as error:
                overdue = True
                self.sync._lanes[name].overdue = future
                why = f"{error} ({self.sync.settings.deadline_s:g} s, weights.deadline_s)"
                self.failed[name] = self.sync.failure(name, why)
            except ConnectionError as error:
                self.failed[name] = f"{type(error).__name__}: {error}"
            except Exception as error:  # the boundary to a server: the others go on
                why = f"{type(error).__name__}: {error}"
                self.failed[name] = self.sync.failure(name, why)
        if overdue:
            self.begin_phase()  # the late one has used up the others' time
        return results

    def result(self, state: str, cause: str) -> SyncResult:
        failures = [f"{name}: {why}" for name, why in {**self.sync.fenced, **self.failed}.items()]
        published = state in ("PUBLISHED", "PARTIAL")
        planned = self.sync.plan.targets
        return SyncResult(
            state=state,
            version=self.version if published else self.sync.version,
            acked=tuple(a.server for a in self.acks),
            fenced=tuple(self.sync.fenced),
            num_bytes=sum(planned[name].num_bytes for name in self.targets),
            stage_s=self.stage_s,
            pause_s=max((a.pause_s for a in self.acks), default=0.0),
            detail="; ".join(text for text in (cause, *failures) if text),
            link_bytes=self.link_bytes,
            digest=self.digest,
        )


def _log_failure(name: str, sync_id: str, future: Future) -> None:
    if (error := future.exception()) is not None:  # it keeps its shadow buffers, not its version
        log.error("server %s did not discard %s: %s", name, sync_id, error)


def _check(plan: SyncPlan, params: Params) -> None:
    """Raises: ValueError if params are not what was planned."""
    if set(params) != set(plan.parameters):
        odd = sorted(set(params) ^ set(plan.parameters))
        raise ValueError(f"params differ from the sync plan in {len(odd)} names, first {odd[0]}")
    for name, p in plan.parameters.items():
        x = params[name]
        if (
            x.shape != p.shape
            or x.dtype != p.trained
            or not (x.sharding == p.source or x.sharding.is_equivalent_to(p.source, x.ndim))
        ):
            raise ValueError(
                f"parameter {name} is {x.dtype}{list(x.shape)} on {x.sharding}, planned as"
                f" {p.trained}{list(p.shape)} on {p.source}"
            )
