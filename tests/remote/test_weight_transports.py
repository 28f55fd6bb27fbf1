"""Conformance of all that brings weights to servers: device copies, channels, shared memory, a store and transfers.

A train mesh of two with every matrix cut by columns, a server of one device and one of two that cuts by rows. What
arrives is read where the server swaps it in, byte by byte.
"""

import os
import queue
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rl_jax.mesh import make_mesh
from rl_jax.remote.carriers import Carriers, SharedBuckets
from rl_jax.remote.link import address_text
from rl_jax.remote.region import NAME
from rl_jax.remote.server import RemoteDecodeServer
from rl_jax.remote.spec import StoreSpec
from rl_jax.remote.starter import ExternalStarter, LocalStarter
from rl_jax.remote.store import Store
from rl_jax.remote.transfer import Offers
from rl_jax.settings import ClusterSettings
from rl_jax.testing.fake_servers import fake_spec, make
from rl_jax.testing.slow_link import SlowLink
from rl_jax.weights.host_copy import ByPlace
from rl_jax.weights.plan import SyncPlan
from rl_jax.weights.sync import WeightSync

pytestmark = pytest.mark.slow

TRANSPORTS = ("packed", "reshard", "channel", "shared", "tcp", "store", "transfer")
# Transport -> copies of the model that go through sockets, for two servers.
COPIES = {"packed": 0, "reshard": 0, "channel": 2, "shared": 0, "tcp": 2, "store": 1, "transfer": 2}
BALLAST = {f"layers.{i}.{name}": (24, 36) for i in range(4) for name in ("up", "down")}
BALLAST |= {"embed": (48, 24), "norm": (24,)}
ODD = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
DEADLINE_S = 20.0
FAST = 1e12  # bytes a second of a link that is not slow


class Target:
    """A SyncTarget; `before_stage` is called before each stage, once; `twice`: every bucket is staged again."""

    def __init__(self, server):
        self.server, self.before_stage, self.twice = server, lambda: None, False

    def __getattr__(self, name):
        return getattr(self.server, name)

    def stage(self, *args):
        (hook, self.before_stage) = self.before_stage, lambda: None
        hook()
        num = self.server.stage(*args)
        return (num or 0) + (self.server.stage(*args) or 0) if self.twice else num


class Party:
    """Two decode servers of one way to start them, and whatever they need."""

    def __init__(self, kit, how, log_dir):
        """how: inproc | local | external, which has a store."""
        self.dump, self.stores, self.operator, self.starter = log_dir, [], None, None
        self.link = None  # which all processes of an external one share
        self.version = -1  # servers remember the syncs of every transport
        cluster = ClusterSettings(heartbeat_s=0.5, lease_s=15.0, restarts=0)
        jobs = ({"device": 4}, {"device": 5, "axes": {"tensor": 2}})
        specs = [
            fake_spec(f"decode.{i}", "decode", kit.ENGINE, kit.SERVE, ballast=BALLAST, block_s=0.002, dump=str(log_dir),
                      **(job if how == "inproc" else {**job, "device": 0}))
            for i, job in enumerate(jobs)
        ]  # fmt: skip
        if how == "inproc":
            self.servers = [make(spec.job) for spec in specs]
        elif how == "local":
            self.starter = LocalStarter(cluster, log_dir)
        else:
            stores = [StoreSpec(name="store.0")]
            self.starter = ExternalStarter(cluster, log_dir, [*specs, *stores])
            self.link = SlowLink(self.starter.address, FAST)
            (old, new) = (
                address_text(*address) for address in (self.starter.address, self.link.address)
            )
            commands = [command.replace(old, new) for command in self.starter.commands]
            self.operator = kit.Operator(commands, [s.name for s in (*specs, *stores)])
            self.stores = [Store(spec, cluster, self.starter) for spec in stores]
        if how != "inproc":
            self.servers = [
                RemoteDecodeServer(spec, cluster, log_dir, DEADLINE_S, self.starter)
                for spec in specs
            ]
        for part in (*self.stores, *self.servers):
            part.start()
        for part in (*self.stores, *self.servers):
            part.wait_ready(kit.PATIENCE_S)

    def pid(self, part):
        return part.pid if self.operator is None else self.operator.pid(part.name)

    def close(self):
        if self.operator is not None:
            self.operator.retire()
        for part in (*self.servers, *self.stores):
            part.close()
        if self.operator is not None:
            self.operator.close()
        if self.starter is not None:
            self.starter.close()
        if self.link is not None:
            self.link.close()


@pytest.fixture(scope="module")
def parties(kit, tmp_path_factory):
    """how -> its party; each is made when it is first asked for."""
    made = {}

    def party(how):
        if how not in made:
            made[how] = Party(kit, how, tmp_path_factory.mktemp(how))
        return made[how]

    yield party
    for one in made.values():
        one.close()


class World:
    """The sync of one transport to a party."""

    def __init__(self, transport, party, settings):
        self.transport, self.party = transport, party
        self.carriers = None
        if transport not in ("packed", "reshard"):
            self.use(Carriers({"tcp": "channel"}.get(transport, transport), party.stores))
        self.targets = [Target(server) for server in party.servers]
        mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])
        cut = {name: PartitionSpec(*[None] * (len(s) - 1), "fsdp") for name, s in BALLAST.items()}
        self.places = {"offset": NamedSharding(mesh, PartitionSpec())}
        self.places |= {name: NamedSharding(mesh, spec) for name, spec in cut.items()}
        shapes = {name: jax.ShapeDtypeStruct(s, np.float32) for name, s in BALLAST.items()}
        shapes["offset"] = jax.ShapeDtypeStruct((), np.int32)
        settings = replace(settings, transport=transport if self.carriers is None else "auto")
        plan = SyncPlan.build(
            shapes, {n: (None,) * len(a.shape) for n, a in shapes.items()}, mesh, self.places, self.targets,
            "float32", settings,
        )  # fmt: skip
        assert len(plan.buckets) > 4
        self.sync = WeightSync(plan, self.targets, settings)

    @property
    def version(self):
        return self.party.version

    def use(self, carriers):
        self.carriers = carriers
        for server in self.party.servers:
            server._carriers = carriers

    def values(self, seed):
        rng = np.random.default_rng(seed)
        host = {name: rng.normal(size=s).astype(np.float32) for name, s in BALLAST.items()}
        for array in host.values():
            array.view(np.uint32).reshape(-1)[-len(ODD) :] = ODD
        return host | {"offset": np.array(seed, np.int32)}

    def publish(self, deadline_s=DEADLINE_S):
        """(what was trained, how it ended)."""
        host = self.values(self.version + 1)
        self.sync.settings = replace(self.sync.settings, deadline_s=deadline_s)
        params = {name: jax.device_put(x.copy(), self.places[name]) for name, x in host.items()}
        result = self.sync.publish(params, self.version + 1)
        if result.state in ("PUBLISHED", "PARTIAL"):
            self.party.version += 1
        return host, result

    def check(self, server, host):
        """That the server swapped in exactly this."""
        with np.load(self.party.dump / f"{server.name}.npz") as got:
            assert set(got) == set(host)
            for name, want in host.items():
                assert got[name].tobytes() == want.tobytes(), f"{server.name}: {name}"


@pytest.fixture(scope="module")
def settings(kit):
    return replace(kit.WEIGHTS, bucket_bytes=6000, deadline_s=DEADLINE_S)


@pytest.fixture(scope="module", params=TRANSPORTS)
def world(request, parties, settings):
    with world_of(request.param, parties, settings) as world:
        yield world


@contextmanager
def world_of(transport, parties, settings):
    how = {"packed": "inproc", "reshard": "inproc", "channel": "local", "shared": "local"}
    world = World(transport, parties(how.get(transport, "external")), settings)
    yield world
    world.sync.close()
    if world.carriers is not None:
        world.carriers.close()


@pytest.fixture
def shared(parties, settings):
    with world_of("shared", parties, settings) as world:
        yield world


@pytest.fixture
def store(parties, settings):
    with world_of("store", parties, settings) as world:
        yield world


@pytest.fixture
def transfer(parties, settings):
    with world_of("transfer", parties, settings) as world:
        yield world


def test_every_bit_arrives_whatever_the_layouts_and_no_more_crosses_a_socket(world):
    for _ in range(3):
        host, result = world.publish()
        assert result.state == "PUBLISHED", result
        assert result.link_bytes == COPIES[world.transport] * world.sync.plan.num_bytes
        for server in world.party.servers:
            world.check(server, host)
            assert server.version == world.version
    if world.transport == "transfer":
        assert {name: type(way.by) for name, way in world.carriers._ways.items()} == {
            "decode.0": Offers,
            "decode.1": Offers,
        }


def test_bucket_that_is_staged_again_changes_nothing(world):
    for target in world.targets:
        target.twice = True
    host, result = world.publish()
    for target in world.targets:
        target.twice = False
    assert result.state == "PUBLISHED", result
    again = 1 if world.transport == "store" else 2 * COPIES[world.transport]
    assert result.link_bytes == again * world.sync.plan.num_bytes
    for server in world.party.servers:
        world.check(server, host)


def test_one_changed_bit_is_found_by_the_digest_and_nothing_is_served(world):
    good, before = world.sync._transport, world.publish()[0]

    class Flipping(ByPlace):
        def send(self, params, names, targets):
            sent = super().send(params, names, targets)
            for arrays in sent.values():
                if "layers.2.up" in arrays:
                    old = arrays["layers.2.up"]
                    new = np.array(old)
                    new.view(np.uint32)[3, 5] ^= 1
                    arrays["layers.2.up"] = jax.device_put(new, old.sharding)
            return sent

    world.sync._transport = Flipping(world.sync.plan, world.sync.settings.transport)
    result = world.publish()[1]
    world.sync._transport = good
    assert result.state == "ABORTED" and not result.acked
    assert "decode.0: digest differs for parameter layers.2.up" in result.detail
    for server in world.party.servers:
        assert server.version == world.version and server.fenced is None
        world.check(server, before)


def test_sync_that_moved_nothing_to_one_server_is_found_and_fences_it(world):
    """Fault 30: everything says that it went well, and the old bytes lie there."""
    good, before = world.sync._transport, world.publish()[0]

    class Still(ByPlace):
        def send(self, params, names, targets):
            old = {name: jax.device_put(before[name], world.places[name]) for name in names}
            kept = super().send(old, names, ["decode.0"])
            return super().send(params, names, targets) | kept

    world.sync._transport = Still(world.sync.plan, world.sync.settings.transport)
    host, result = world.publish()
    world.sync._transport = good
    assert (result.state, result.fenced) == ("PARTIAL", ("decode.0",)), result
    assert "decode.0: digest differs for parameter" in result.detail
    stale, other = world.party.servers
    world.check(other, host)
    world.check(stale, before)
    assert stale.fenced is not None
    assert world.publish()[1].state == "PUBLISHED" and stale.fenced is None


def test_server_that_fails_in_the_swap_is_fenced_with_its_cause_and_others_advance(world):
    """Fault 29."""
    broken, other = world.party.servers
    before = world.publish()[0]
    refuse = world.party.dump / f"{broken.name}.refuse"
    refuse.touch()
    host, result = world.publish()
    refuse.unlink()
    assert (result.state, result.fenced) == ("PARTIAL", ("decode.0",)), result
    assert "told to refuse" in result.detail and broken.fenced is not None
    world.check(other, host)
    world.check(broken, before)
    assert other.version == world.version == broken.version + 1
    assert world.publish()[1].state == "PUBLISHED" and broken.fenced is None


def test_target_that_stalls_is_fenced_and_the_other_gets_the_version(world):
    server, other = world.party.servers
    hold = threading.Event()
    if world.carriers is None:
        world.targets[0].before_stage = lambda: hold.wait(DEADLINE_S)
    else:
        world.targets[0].before_stage = lambda: os.kill(world.party.pid(server), signal.SIGSTOP)
    # A pull wakes more threads than a call, which a busy host shows.
    host, result = world.publish(deadline_s=2.0 if world.transport == "transfer" else 1.0)
    hold.set()
    if world.carriers is not None:
        os.kill(world.party.pid(server), signal.SIGCONT)
    assert (result.state, result.fenced) == ("PARTIAL", ("decode.0",)), result
    assert "weights.deadline_s" in result.detail
    world.check(other, host)
    world.sync._lanes["decode.0"].submit(lambda: None).result(DEADLINE_S)
    host, result = world.publish()
    assert result.state == "PUBLISHED", result
    for one in world.party.servers:
        world.check(one, host)


def regions(pid):
    """Descriptors of regions that a process holds, and how many regions it has mapped."""
    held = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            held += NAME in os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            pass  # closed meanwhile
    with open(f"/proc/{pid}/maps") as maps:
        return held, sum(NAME in line for line in maps)


def test_memory_is_given_back_between_syncs_and_at_the_end(world, kit):
    """The driver keeps two regions; servers and a store keep nothing but the store's sign of where it is."""
    world.publish()
    if world.carriers is None:
        assert regions(os.getpid()) == (0, 0)
        return
    for server in world.party.servers:
        assert regions(world.party.pid(server)) == (0, 0)
    for store in world.party.stores:
        kit.until(lambda one=store: regions(world.party.pid(one))[1] <= 1, "the eviction")
        kit.until(lambda one=store: one.stats()["store_held_bytes"] == 0)
        assert store._pushes == store._needed == {}
    if world.transport == "shared":
        assert regions(os.getpid())[1] == 3  # and a sign of where it is
    assert world.carriers.offers.num_servers == 0
    world.carriers.close()
    assert regions(os.getpid()) == (0, 0)
    world.use(Carriers(world.carriers.transport, world.party.stores))


def test_damaged_region_is_no_bucket(shared):
    """Damage behind the stamp, which the digest would find later, has a name of its own."""

    class Damaged(SharedBuckets):
        def _written(self, held, load):
            held = super()._written(held, load)
            held.region._bytes[5000] ^= 1
            return held

    good = shared.carriers
    shared.use(Carriers("shared", shared=Damaged()))
    result = shared.publish()[1]
    shared.carriers.close()
    shared.use(good)
    assert result.state == "ABORTED" and "the checksum of bucket 0" in result.detail
    assert shared.publish()[1].state == "PUBLISHED"


def test_no_memory_for_a_region_leaves_the_channel_and_one_line(shared, caplog):
    good = shared.carriers
    shared.use(Carriers("auto", shared=SharedBuckets(free=lambda: 300 << 20)))
    assert shared.carriers.shared.address is not None
    shared.carriers.shared._free = lambda: 1 << 20  # what there was when it was asked is gone
    for _ in range(2):
        host, result = shared.publish()
        assert result.state == "PUBLISHED" and result.link_bytes == 2 * shared.sync.plan.num_bytes
        shared.check(shared.party.servers[1], host)
    shared.use(good)
    lines = [r.getMessage() for r in caplog.records if "over its channel" in r.getMessage()]
    assert len(lines) == 2 and {line.split()[0] for line in lines} == {"decode.0", "decode.1"}
    assert "1,048,576 bytes of memory are free" in lines[0]


def test_slow_link_is_crossed_once_while_servers_decode(store, kit):
    """Two servers of a host behind it: one copy of the model, and turns go on but for the swap."""
    server, link, size = store.party.servers[0], store.party.link, store.sync.plan.num_bytes
    request = kit.ask("slow", max_new_tokens=30)
    before, tokens = link.down_bytes, server.stats()["decode_tokens"]
    link.bytes_per_s = size / 0.6
    done: queue.Queue = queue.Queue()
    server.submit(request, None, done.put)
    host, result = store.publish()
    link.bytes_per_s = FAST
    assert result.state == "PUBLISHED" and result.link_bytes == size
    assert size <= link.down_bytes - before < 1.5 * size  # of calls and pulses the rest
    assert result.stage_s > 0.5 and result.pause_s < result.stage_s / 3
    assert server.stats()["decode_tokens"] == tokens + 30
    assert done.get(timeout=1).versions.tolist() == [store.version - 1] * 30
    server.release(request.session)
    store.check(server, host)


def test_pull_that_hangs_fences_its_server_by_name_and_its_channel_carries_the_next(
    transfer, caplog
):
    """Its number was never offered, which the library would wait for without end."""

    class Wrong(Offers):
        def offer(self, server, host, load):
            told = super().offer(server, host, load)
            is_hit = server == "decode.0" and load.bucket == 2
            return told | {"number": told["number"] ^ 1} if is_hit else told

    server, other = transfer.party.servers
    good, server._deadline_s = transfer.carriers, 3.0
    transfer.use(Carriers("transfer"))
    transfer.carriers.offers = Wrong()
    host, result = transfer.publish()
    assert (result.state, result.fenced) == ("PARTIAL", ("decode.0",)), result
    assert "decode.0: TimeoutError: the pull of bucket 2 of sync v" in result.detail
    transfer.check(other, host)
    server._deadline_s = DEADLINE_S
    host, result = transfer.publish()
    assert result.state == "PUBLISHED", result
    for one in transfer.party.servers:
        transfer.check(one, host)
    ways = {name: way.by for name, way in transfer.carriers._ways.items()}
    assert ways == {"decode.0": None, "decode.1": transfer.carriers.offers}
    assert "no transfer between devices: bucket 2 failed: the pull of bucket 2" in caplog.text
    transfer.carriers.close()
    transfer.use(good)


@pytest.mark.parametrize("transport", ["shared", "store"])
def test_target_that_dies_mid_stage_is_fenced_and_the_other_gets_the_version(transport, request):
    """The last one of a party: its server is gone. Of threads test_sync tells, of channels test_faults."""
    world = request.getfixturevalue(transport)
    server, other = world.party.servers
    if world.party.operator is not None:
        world.party.operator.pause()
    world.targets[0].before_stage = lambda: os.kill(world.party.pid(server), signal.SIGKILL)
    host, result = world.publish()
    assert (result.state, result.fenced) == ("PARTIAL", ("decode.0",)), result
    world.check(other, host)
    assert not any(held.num_readers for held in world.carriers.shared._held)


def test_store_that_dies_ends_the_sync_by_name_and_channels_carry_the_next(store, caplog):
    """After the party's first server is gone: the other one had to take it."""
    (lost,) = store.party.stores
    server, buckets = store.party.servers[1], iter(range(100))

    def hook():
        if next(buckets) == 2:
            os.kill(store.party.pid(lost), signal.SIGKILL)
        else:
            store.targets[1].before_stage = hook

    store.party.operator.pause()
    store.targets[1].before_stage = hook
    result = store.publish()[1]
    assert result.state == "ABORTED", result
    assert "decode.1: StoreLost: store.0 was lost with bucket 2" in result.detail
    host, result = store.publish()
    assert result.acked == ("decode.1",) and result.link_bytes == store.sync.plan.num_bytes
    store.check(server, host)
    assert "(weights.transport=store): store.0 is not up" in caplog.text
