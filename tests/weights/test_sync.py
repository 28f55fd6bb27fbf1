"""WeightSync: what a sync ends in when servers are well, wrong, slow or dead; nothing unverified is ever served."""

import threading
import time

import jax
import numpy as np
import pytest

from rl_jax.settings import WeightSettings
from rl_jax.types import SourceLost
from rl_jax.weights import sync
from rl_jax.weights.host_copy import TRANSPORTS
from rl_jax.weights.lanes import Lane, Overdue, wait
from rl_jax.weights.packed_copy import PackedCopy
from rl_jax.weights.sync import IN_FLIGHT, WeightSync


class Fleet:
    """A train mesh of 2, one prefill server and two decode servers of 2 devices each, and their sync."""

    def __init__(self, kit, faults=None, transport=None, decode=2, by="packed", **settings):
        faults = faults or {}
        self.train = kit.train_side(kit.devices[:2], {"fsdp": 2})
        kinds = [("prefill.0", "prefill")] + [(f"decode.{i}", "decode") for i in range(decode)]
        self.servers = {
            name: kit.FakeServer(
                name,
                kit.devices[2 + 2 * i : 4 + 2 * i],
                {"tensor": 2},
                kind,
                fault=faults.get(name),
            )
            for i, (name, kind) in enumerate(kinds)
        }
        settings = {"deadline_s": 30.0, "bucket_bytes": 6000, **settings}
        plan = kit.make_plan(self.train, list(self.servers.values()), **settings)
        self.sync = WeightSync(
            plan,
            list(self.servers.values()),
            WeightSettings(transport=by, **settings),
            transport and transport(plan),
        )

    def served(self, name) -> dict[str, np.ndarray]:
        return {n: np.asarray(x) for n, x in self.servers[name].params.items()}

    def flush(self) -> None:
        """Waits until the lanes have run what was asked of them (discards are not waited for)."""
        for lane in self.sync._lanes.values():
            lane.submit(lambda: None).result(5)


@pytest.fixture
def fleet(kit):
    made = []

    def make(**kwargs) -> Fleet:
        made.append(Fleet(kit, **kwargs))
        return made[-1]

    yield make
    for f in made:
        f.sync.close()


def equal(a, b) -> bool:
    return set(a) == set(b) and all(np.array_equal(a[n], b[n]) for n in a)


def corrupt(shard, name="up"):
    """A fault that changes one element of one device's shard of what was staged, before the digest."""

    def fault(phase, server):
        if phase != "digest":
            return
        (staged,) = server.staged.values()
        x = staged["arrays"][name]
        parts = [np.array(s.data) for s in x.addressable_shards]
        parts[shard].flat[3] += 1
        devices = [s.device for s in x.addressable_shards]
        staged["arrays"][name] = jax.make_array_from_single_device_arrays(
            x.shape, x.sharding, [jax.device_put(p, d) for p, d in zip(parts, devices, strict=True)]
        )

    return fault


def fail(at, error=RuntimeError("boom")):
    def fault(phase, server):
        if phase == at:
            raise error

    return fault


@pytest.mark.slow
def test_published_weights_are_the_trained_ones_on_every_server(fleet):
    f = fleet()
    result = f.sync.publish(f.train.params, 0)
    assert (result.state, result.version, f.sync.version) == ("PUBLISHED", 0, 0)
    assert set(result.acked) == set(f.servers)
    assert result.num_bytes == sum(r.num_bytes for r in f.sync.plan.targets.values())
    assert 0 <= result.pause_s < result.stage_s
    for name, server in f.servers.items():
        assert server.version == 0
        assert equal(f.served(name), f.train.host)


@pytest.mark.parametrize("by", TRANSPORTS)
def test_a_publish_puts_arrays_only_where_they_are_laid_out_alike(fleet, monkeypatch, by):
    put, seen = jax.device_put, []

    def spy(tree, places=None, **options):
        pairs = jax.tree.leaves(
            jax.tree.map(lambda x, place: (x, place), tree, places), is_leaf=is_pair
        )
        seen.extend(pair for pair in pairs if isinstance(pair[0], jax.Array))
        return put(tree, places, **options)

    def cuts(sharding, shape):
        return [str(sharding.devices_indices_map(shape)[d]) for d in sharding._device_assignment]

    is_pair = lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], jax.Array)
    f = fleet(by=by)
    assert isinstance(f.sync._transport._here, TRANSPORTS[by])
    monkeypatch.setattr(jax, "device_put", spy)
    assert f.sync.publish(f.train.params, 0).state == "PUBLISHED"
    assert len(seen) >= 6  # three servers of two devices
    for array, place in seen:
        assert cuts(array.sharding, array.shape) == cuts(place, array.shape)


def test_prefill_servers_commit_before_decode_servers(fleet):
    order = []

    def note(phase, server):
        if phase == "commit":
            order.append(server.kind)

    f = fleet(faults=dict.fromkeys(["prefill.0", "decode.0", "decode.1"], note))
    f.sync.publish(f.train.params, 0)
    assert order == ["prefill", "decode", "decode"]


def test_five_swaps_in_a_row_serve_each_version_exactly(fleet, kit):
    f = fleet()
    for version in range(5):
        fresh = kit.train_side(kit.devices[:2], {"fsdp": 2}, seed=version)
        assert f.sync.publish(fresh.params, version).state == "PUBLISHED"
        assert {s.version for s in f.servers.values()} == {version}
        assert all(equal(f.served(name), fresh.host) for name in f.servers)


def test_publish_is_idempotent_and_versions_only_rise(fleet):
    f = fleet()
    first = f.sync.publish(f.train.params, 3)
    calls = list(f.servers["decode.0"].calls)
    assert f.sync.publish(f.train.params, 3) is first
    assert f.servers["decode.0"].calls == calls
    with pytest.raises(ValueError, match="version 2 cannot follow 3"):
        f.sync.publish(f.train.params, 2)


def test_corrupt_shard_on_one_server_fences_it_by_name_and_the_rest_go_on(fleet):
    """The sampler must never keep or take weights that are not the trainer's."""
    f = fleet(faults={"decode.1": corrupt(shard=1)})
    result = f.sync.publish(f.train.params, 0)
    assert (result.state, result.fenced) == ("PARTIAL", ("decode.1",))
    assert result.detail == "decode.1: digest differs for parameter up"
    bad = f.servers["decode.1"]
    assert bad.fenced == "digest differs for parameter up"
    assert bad.version == -1
    assert set(result.acked) == {"prefill.0", "decode.0"}
    f.flush()
    assert bad.staged == {}
    assert f.sync.publish(f.train.params, 1).state == "PARTIAL"  # still corrupt: still out
    assert bad.version == -1
    bad._fault = lambda phase, server: None
    result = f.sync.publish(f.train.params, 2)
    assert (result.state, result.detail, f.sync.fenced) == ("PUBLISHED", "", {})  # refitted
    assert bad.version == 2


def test_corrupt_replica_is_found_too(fleet):
    f = fleet(faults={"decode.0": corrupt(shard=1, name="norm")}, decode=2)
    result = f.sync.publish(f.train.params, 0)
    assert result.state == "PARTIAL"
    assert "decode.0: ReplicasDiffer: parameter norm" in result.detail


def test_corrupt_shard_on_the_only_decode_server_aborts_and_a_retry_can_succeed(fleet):
    faults = {"decode.0": corrupt(shard=0)}
    f = fleet(decode=1)
    f.sync.publish(f.train.params, 0)
    server = f.servers["decode.0"]
    server._fault = faults["decode.0"]
    result = f.sync.publish(f.train.params, 1)
    assert (result.state, result.version, f.sync.version) == ("ABORTED", 0, 0)
    assert result.detail == "no decode server is left; decode.0: digest differs for parameter up"
    f.flush()
    for s in f.servers.values():
        assert (s.version, s.staged, s.fenced) == (0, {}, None)
    server._fault = lambda phase, s: None
    assert f.sync.publish(f.train.params, 1).state == "PUBLISHED"


def test_server_whose_digests_are_wrong_in_a_row_is_removed_and_not_asked_again(fleet):
    f = fleet(faults={"decode.0": corrupt(shard=0)}, max_failures=2)
    bad = f.servers["decode.0"]
    assert f.sync.publish(f.train.params, 0).state == "PARTIAL" and not f.sync.removed
    well, bad._fault = bad._fault, lambda phase, s: None
    assert f.sync.publish(f.train.params, 1).state == "PUBLISHED"  # which ends the row
    bad._fault = well
    assert f.sync.publish(f.train.params, 2).state == "PARTIAL" and not f.sync.removed
    result = f.sync.publish(f.train.params, 3)
    why = "removed, as it failed 2 syncs in a row (weights.max_failures=2): digest differs"
    assert result.state == "PARTIAL" and why in result.detail and why in bad.fenced
    f.flush()
    asked, bad._fault = list(bad.calls), lambda phase, s: None
    result = f.sync.publish(f.train.params, 4)
    assert (result.state, result.fenced) == ("PARTIAL", ("decode.0",)) and why in result.detail
    assert bad.calls == asked and bad.fenced and f.servers["decode.1"].version == 4


@pytest.mark.parametrize("phase", ["stage", "digest", "commit"])
def test_server_that_fails_in_a_row_is_removed_and_one_that_is_away_is_not(fleet, phase):
    f = fleet(faults={"decode.0": fail(phase)}, max_failures=2)
    bad = f.servers["decode.0"]
    for version in range(2):
        assert f.sync.publish(f.train.params, version).state == "PARTIAL"
    assert f.sync.removed == {"decode.0"} and "it failed 2 syncs in a row" in bad.fenced

    def away(now, server):
        if now == phase:
            raise ConnectionError("its process ended")

    g = fleet(faults={"decode.0": away}, max_failures=2)
    for version in range(4):
        assert g.sync.publish(g.train.params, version).state == "PARTIAL"
    assert not g.sync.removed
    g.servers["decode.0"]._fault = lambda phase, server: None
    assert g.sync.publish(g.train.params, 4).state == "PUBLISHED"


def test_last_decode_server_that_is_removed_ends_every_sync_by_its_cause(fleet):
    f = fleet(faults={"decode.0": corrupt(shard=0)}, decode=1, max_failures=2)
    for _ in range(2):
        assert f.sync.publish(f.train.params, 0).state == "ABORTED"
    start, result = time.monotonic(), f.sync.publish(f.train.params, 0)
    assert (result.state, result.fenced) == ("ABORTED", ("decode.0",))
    assert result.detail.startswith("no decode server is left; decode.0: removed, as it failed 2")
    assert not result.acked and time.monotonic() - start < 5


def test_transport_that_hangs_ends_with_the_deadline(fleet):
    release = threading.Event()

    class Hanging(PackedCopy):
        def send(self, params, names, targets):
            release.wait(30)
            return super().send(params, names, targets)

    f = fleet(transport=Hanging, deadline_s=0.3)
    start = time.monotonic()
    result = f.sync.publish(f.train.params, 0)
    assert result.state == "ABORTED" and time.monotonic() - start < 5
    assert "bucket 0 could not be sent from the train mesh: no answer by the deadline" in (
        result.detail
    )
    assert "weights.deadline_s" in result.detail
    release.set()
    f.flush()
    f.sync.settings = WeightSettings(deadline_s=30.0)
    assert f.sync.publish(f.train.params, 0).state == "PUBLISHED"


@pytest.mark.parametrize("asked", ["send", "source_digest"])
def test_source_that_is_gone_for_good_is_told_as_it_is_and_leaves_nothing_staged(
    fleet, monkeypatch, asked
):
    """No server's failure, and none that another try could mend."""
    f = fleet()
    f.sync.publish(f.train.params, 0)
    why, ask = "the learner's processes were lost 2 times", getattr(sync._Attempt, asked)

    def lost(attempt, *words):
        if words and words[0] is not f.sync.plan.buckets[-1]:
            return ask(attempt, *words)
        raise SourceLost(why)

    monkeypatch.setattr(sync._Attempt, asked, lost)
    with pytest.raises(SourceLost, match=f"^{why}$"):
        f.sync.publish(f.train.params, 1)
    f.flush()
    for server in f.servers.values():
        assert (server.version, server.staged, server.fenced) == (0, {}, None)
    monkeypatch.undo()
    assert f.sync.publish(f.train.params, 1).state == "PUBLISHED"


@pytest.mark.parametrize("phase", ["stage", "digest", "commit"])
def test_server_that_raises_is_fenced_with_its_cause(fleet, phase):
    f = fleet(faults={"decode.0": fail(phase)})
    result = f.sync.publish(f.train.params, 0)
    assert (result.state, result.fenced) == ("PARTIAL", ("decode.0",))
    assert result.detail == "decode.0: RuntimeError: boom"
    assert f.servers["decode.1"].version == 0


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["stage", "digest", "commit"])
def test_server_that_hangs_is_fenced_by_the_deadline(fleet, phase):
    f = fleet()
    f.sync.publish(f.train.params, 0)  # compiles: the deadline below is for the hang alone
    release = threading.Event()
    f.servers["decode.1"]._fault = lambda at, server: at == phase and release.wait(30)
    f.sync.settings = WeightSettings(deadline_s=0.5)
    start = time.monotonic()
    result = f.sync.publish(f.train.params, 1)
    assert (result.state, result.fenced) == ("PARTIAL", ("decode.1",))
    assert "no answer by the deadline while waiting for decode.1" in result.detail
    assert time.monotonic() - start < 10
    assert f.servers["decode.0"].version == 1
    asked = list(f.servers["decode.1"].calls)
    assert f.sync.publish(f.train.params, 2).state == "PARTIAL"
    assert f.servers["decode.1"].calls == asked  # stuck: not asked, so not waited for, again
    release.set()
    f.flush()
    f.servers["decode.1"]._fault = lambda at, server: None
    f.sync.settings = WeightSettings(deadline_s=30.0)
    assert f.sync.publish(f.train.params, 3).state == "PUBLISHED"
    assert f.servers["decode.1"].version == 3


def test_no_acknowledgement_from_any_decode_server_is_failed(fleet):
    f = fleet(faults={n: fail("commit") for n in ("decode.0", "decode.1")})
    result = f.sync.publish(f.train.params, 0)
    assert (result.state, result.version) == ("FAILED", -1)
    assert set(result.fenced) == {"decode.0", "decode.1"}


def test_transport_that_moves_nothing_is_detected(fleet, kit):
    class OldWeights:
        """Says it sent the bucket, but sends what it sent first."""

        def __init__(self, plan):
            self._real, self._sent = PackedCopy(plan), {}

        def send(self, params, names, targets):
            if names not in self._sent:
                self._sent[names] = self._real.send(params, names, targets)
            return {t: dict(arrays) for t, arrays in self._sent[names].items()}

    f = fleet(transport=OldWeights)
    assert f.sync.publish(f.train.params, 0).state == "PUBLISHED"
    fresh = kit.train_side(kit.devices[:2], {"fsdp": 2}, seed=1)
    result = f.sync.publish(fresh.params, 1)
    assert result.state == "ABORTED"
    assert "digest differs for parameter bias and 7 more" in result.detail
    assert {s.version for s in f.servers.values()} == {0}


def test_train_mesh_failure_aborts_with_the_bucket(fleet):
    class Broken(PackedCopy):
        def send(self, params, names, targets):
            if "down" in names:
                raise MemoryError("out of memory")
            return super().send(params, names, targets)

    f = fleet(transport=Broken)
    result = f.sync.publish(f.train.params, 0)
    assert result.state == "ABORTED"
    assert "could not be sent from the train mesh: out of memory" in result.detail


def test_params_that_are_not_the_planned_ones_are_refused(fleet, kit):
    f = fleet()
    with pytest.raises(ValueError, match="first norm"):
        f.sync.publish({n: x for n, x in f.train.params.items() if n != "norm"}, 0)
    moved = dict(f.train.params, up=jax.device_put(np.ones((24, 36), np.float32), kit.devices[7]))
    with pytest.raises(ValueError, match="parameter up is float32.*planned as"):
        f.sync.publish(moved, 0)


def test_learner_may_donate_its_state_after_publish_on_shared_devices(kit):
    """Where train and serve share a device, a copy that aliases would change or die with the next step."""
    train = kit.train_side(kit.devices[:2], {"tensor": 2}, rules=kit.SERVE)
    server = kit.FakeServer("decode.0", kit.devices[:2], {"tensor": 2})
    sync = WeightSync(kit.make_plan(train, [server]), [server], WeightSettings())
    assert sync.publish(train.params, 0).state == "PUBLISHED"
    step = jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p), donate_argnums=0)
    params = step(train.params)
    jax.block_until_ready(params)
    assert train.params["up"].is_deleted()
    assert all(np.array_equal(np.asarray(server.params[n]), x) for n, x in train.host.items())
    sync.close()


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 8000])
def test_buffers_in_transit_are_never_reused(kit, bucket_bytes):
    """One sync, small buckets, receivers that look late: each publish's arrays hold its values after all the others."""
    kept = []
    train = kit.train_side(kit.devices[:2], {"fsdp": 2})
    server = kit.FakeServer("decode.0", kit.devices[4:6], {"tensor": 2})
    server._fault = lambda phase, s: phase == "stage" and time.sleep(0.002)
    sync = WeightSync(
        kit.make_plan(train, [server], bucket_bytes=bucket_bytes), [server], WeightSettings()
    )
    for version in range(4):
        fresh = kit.train_side(kit.devices[:2], {"fsdp": 2}, seed=version)
        # A transposed view on the host and a transpose computed on the device.
        transposed = np.asarray(fresh.host["down"]).T
        fresh.params["up"] = jax.jit(lambda x: x.T, out_shardings=fresh.shardings["up"])(
            fresh.params["down"]
        )
        fresh.host["up"] = transposed
        assert sync.publish(fresh.params, version).state == "PUBLISHED"
        step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
        jax.block_until_ready(step(fresh.params))
        kept.append((server.params, fresh.host))
    sync.close()
    for arrays, host in kept:
        assert all(np.array_equal(np.asarray(arrays[n]), x) for n, x in host.items())


@pytest.mark.slow
def test_no_more_buckets_are_sent_than_may_be_in_flight(fleet):
    """Memory on both sides is bounded by buckets, however slow a server is."""
    sent = []

    class Counting(PackedCopy):
        def send(self, params, names, targets):
            sent.append(names)
            return super().send(params, names, targets)

    f = fleet(transport=Counting, decode=1, bucket_bytes=1)
    f.sync.publish(f.train.params, 0)
    assert len(sent) == 8
    release = threading.Event()
    f.servers["decode.0"]._fault = lambda phase, server: phase == "stage" and release.wait(30)
    f.sync.settings = WeightSettings(deadline_s=0.3)
    assert f.sync.publish(f.train.params, 1).state == "ABORTED"
    release.set()
    assert len(sent) == 8 + IN_FLIGHT


def test_lane_that_is_stuck_refuses_more_calls_instead_of_blocking():
    lane, release = Lane("decode.0"), threading.Event()
    calls = [lane.submit(release.wait, 30) for _ in range(40)]
    with pytest.raises(Overdue, match="decode.0 is stuck"):
        calls[-1].result(1)
    with pytest.raises(Overdue, match="waiting for the answer"):
        wait(calls[0], time.monotonic() + 0.01, "the answer")
    assert not lane.close(timeout_s=0.01)
    release.set()
    assert lane.close(timeout_s=5)
