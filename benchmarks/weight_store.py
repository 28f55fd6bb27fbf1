"""Weights to servers of other processes: how long a sync takes by each transport, and what a slow link makes of it.

    python benchmarks/weight_store.py                         # CPU, two cores will do; ten minutes
    python benchmarks/weight_store.py --tiny                  # does it run, are the bytes counted right
    python benchmarks/weight_store.py --only link             # one section

Section `host`: two servers on the driver's host, a model of the quickstart's size and one of 200 MB, float32, trained
on a mesh of two (fsdp); a whole sync (stage, digests on both sides, commit), the median of those after the first, and
the CPU seconds of all processes in it, which other work on the machine changes less.
Section `link`: all processes come over one link of LINK_MBPS (testing/slow_link.py, a TCP proxy that counts), with two
and three servers that decode all the while; by their channels, and by a store of their host.
Servers are DecodeServers round a FakeEngine with ballast: what they decode costs a sleep, what they are sent is real.
What of a sync is hidden behind rollout is told twice: by the longest pause, and by the tokens that were decoded during
it, of those that would have been. PREDICTIONS were written before the first run; README.md discusses what came.
"""

import argparse
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rl_jax.backend import simulate_cpu_devices  # noqa: E402

simulate_cpu_devices(4)  # before jax is imported: two train, up to two serve in this process

import jax  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from benchmarks.report import Report  # noqa: E402
from rl_jax.child import clean_environment  # noqa: E402
from rl_jax.mesh import make_mesh  # noqa: E402
from rl_jax.remote.carriers import Carriers  # noqa: E402
from rl_jax.remote.link import address_text  # noqa: E402
from rl_jax.remote.server import RemoteDecodeServer  # noqa: E402
from rl_jax.remote.spec import StoreSpec  # noqa: E402
from rl_jax.remote.starter import ExternalStarter, LocalStarter  # noqa: E402
from rl_jax.remote.store import Store  # noqa: E402
from rl_jax.settings import (  # noqa: E402
    ClusterSettings,
    EngineSettings,
    ServeSettings,
    WeightSettings,
)
from rl_jax.testing.fake_servers import fake_spec, make  # noqa: E402
from rl_jax.testing.slow_link import SlowLink  # noqa: E402
from rl_jax.types import TurnRequest  # noqa: E402
from rl_jax.weights.plan import SyncPlan  # noqa: E402
from rl_jax.weights.sync import WeightSync  # noqa: E402

ENGINE = EngineSettings(
    slots=4, context=64, page_size=8, steps_per_block=4, chunk_sizes=(4, 16), chunk_requests=2,
    num_stop_tokens=2, append_limit=8,
)  # fmt: skip
SERVE = ServeSettings(queue_size=16, stop_deadline_s=10.0)
CLUSTER = ClusterSettings(heartbeat_s=0.5, lease_s=60.0, restarts=0)
DEADLINE_S, PATIENCE_S = 120.0, 120.0
BLOCK_S = 0.02  # of four steps
MIB = 1 << 20
LINK_MBPS = 20.0  # megabytes a second
QUICKSTART, LARGE = (8, 160), (48, 1024)  # layers, and the side of each one's matrix
HOST_WAYS = ("packed, in process", "channel", "shared", "tcp", "store")

# Milliseconds. 200 MB on two cores: a copy into fresh memory 60, a crc32 100, a sum while copying 20, a digest 60 a
# process. A channel's bytes are summed, sent, received and summed for each of two servers.
PREDICTIONS = {
    "200 MB, packed, in process": 350.0,
    "200 MB, channel": 900.0,
    "200 MB, shared": 450.0,
    "200 MB, tcp": 1000.0,
    "200 MB, store": 900.0,
    "quickstart, channel": 25.0,
    "quickstart, shared": 20.0,
    # 25 MB over 20 MB/s: 1.26 s a copy
    "link, 2 servers, channel": 2700.0,
    "link, 2 servers, store": 1500.0,
    "link, 3 servers, channel": 4000.0,
    "link, 3 servers, store": 1500.0,
}


class Party:
    """A sync of one transport to some servers; closed by its stack."""

    def __init__(self, way, shape, num_servers, log_dir, *, bucket_bytes=1 << 30, link_mbps=0.0):
        """way: of HOST_WAYS. shape: layers, side. link_mbps: of the link that all processes share; 0 = no such link."""
        layers, side = shape
        self.ballast = {f"layers.{i}.up": (side, side) for i in range(layers)}
        self.closing, self.link, self.stores, self.version = ExitStack(), None, [], -1
        self.cpu_s = []  # of each sync, all processes together
        jobs = [{"device": 2 + i} if "process" in way else {} for i in range(num_servers)]
        specs = [
            fake_spec(f"decode.{i}", "decode", ENGINE, SERVE, ballast=self.ballast, block_s=BLOCK_S, **job)
            for i, job in enumerate(jobs)
        ]  # fmt: skip
        self.pids = []
        if "process" in way:
            self.servers = [make(spec.job) for spec in specs]
        else:
            self._start(way, specs, log_dir, link_mbps)
        for part in (*self.stores, *self.servers):
            part.start()
            self.closing.callback(part.close)
        for part in (*self.stores, *self.servers):
            part.wait_ready(PATIENCE_S)
        self.mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])
        cut = NamedSharding(self.mesh, PartitionSpec("fsdp"))
        self.places = dict.fromkeys(self.ballast, cut)
        self.places["offset"] = NamedSharding(self.mesh, PartitionSpec())
        shapes = {n: jax.ShapeDtypeStruct(s, np.float32) for n, s in self.ballast.items()}
        shapes["offset"] = jax.ShapeDtypeStruct((), np.int32)
        settings = WeightSettings(deadline_s=DEADLINE_S, bucket_bytes=bucket_bytes)
        plan = SyncPlan.build(
            shapes, {n: (None,) * len(a.shape) for n, a in shapes.items()}, self.mesh, self.places, self.servers,
            "float32", settings,
        )  # fmt: skip
        self.sync = WeightSync(plan, self.servers, settings)
        self.closing.callback(self.sync.close)

    def _start(self, way, specs, log_dir, link_mbps):
        """Proxies of processes; these are started by the proxies, or here."""
        starter = LocalStarter(CLUSTER, log_dir)
        if way in ("tcp", "store"):
            stores = [StoreSpec("store.0")] if way == "store" else []
            starter = ExternalStarter(CLUSTER, log_dir, [*specs, *stores])
            self.closing.callback(self._wait)  # each ends with its link
            commands = starter.commands
            if link_mbps:
                self.link = SlowLink(starter.address, link_mbps * 1e6)
                self.closing.callback(self.link.close)
                old, new = (address_text(*a) for a in (starter.address, self.link.address))
                commands = [command.replace(old, new) for command in commands]
            self.processes = [run(command) for command in commands]
            self.stores = [Store(spec, CLUSTER, starter) for spec in stores]
        self.closing.callback(starter.close)
        carriers = Carriers({"tcp": "channel"}.get(way, way), self.stores)
        self.closing.callback(carriers.close)
        more = (CLUSTER, log_dir, DEADLINE_S, starter, carriers)
        self.servers = [RemoteDecodeServer(spec, *more) for spec in specs]

    def _wait(self):
        for process in self.processes:
            process.wait(PATIENCE_S)

    @property
    def num_bytes(self):
        """Of the model."""
        return self.sync.plan.num_bytes

    def publish(self):
        """(seconds, result) of a sync of new weights."""
        self.version += 1
        rng = np.random.default_rng(self.version)
        host = {n: rng.random(s, np.float32) for n, s in self.ballast.items()}
        host["offset"] = np.array(self.version, np.int32)
        params = {n: jax.device_put(x, self.places[n]) for n, x in host.items()}
        jax.block_until_ready(params)
        cpu_s, start = used_cpu_s(), time.perf_counter()
        result = self.sync.publish(params, self.version)
        seconds = time.perf_counter() - start
        self.cpu_s.append(used_cpu_s() - cpu_s)
        if result.state != "PUBLISHED":
            raise SystemExit(f"the sync ended {result.state}: {result.detail}")
        return seconds, result


def run(command):
    """A process of a command that the driver tells."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**clean_environment(), "PATH": path}
    words = ["sh", "-c", f"exec env {command}"]
    return subprocess.Popen(words, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)


def used_cpu_s():
    """Of this process and those it started, until now."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(one.user + one.system for one in times)


class Load:
    """Turns that keep every slot of the servers busy."""

    def __init__(self, servers):
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._play, args=(server, slot), daemon=True)
            for server in servers
            for slot in range(ENGINE.slots)
        ]
        for thread in self._threads:
            thread.start()

    def _play(self, server, slot):
        number = 0
        while not self._stop.is_set():
            number += 1
            request = TurnRequest(
                uid=f"{slot}.{number}", attempt=0, turn=0, tokens=np.array([1, 2, 3], np.int32), temperature=1.0,
                top_p=1.0, top_k=0, max_new_tokens=60, stop_token_ids=(), stop=(), seed=0, tag="",
                deadline_s=PATIENCE_S,
            )  # fmt: skip
            done = queue.Queue()
            server.submit(request, None, done.put)
            done.get(timeout=PATIENCE_S)
            server.release(request.session)

    def close(self):
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


def decoded(servers):
    return sum(server.stats()["decode_tokens"] for server in servers)


def bench_host(report, log_dir, tiny):
    """Every transport, on one host."""
    sizes = {"quickstart": (QUICKSTART, 1 << 30), "200 MB": (LARGE, 1 << 30)}
    sizes["200 MB in 32 MiB"] = (LARGE, 32 * MIB)
    if tiny:
        sizes = {"quickstart": sizes["quickstart"]}
    for size, (shape, bucket_bytes) in sizes.items():
        for way in HOST_WAYS if bucket_bytes == 1 << 30 else ("channel", "shared", "store"):
            party = Party(way, shape, 2, log_dir, bucket_bytes=bucket_bytes)
            with party.closing:
                party.publish()
                rss = psutil.Process().memory_info().rss
                syncs = [party.publish() for _ in range(3 if tiny else 4)]
                grown = psutil.Process().memory_info().rss - rss
                copies = {result.link_bytes / party.num_bytes for _, result in syncs}
                times = sorted(seconds for seconds, _ in syncs)
                report.add(
                    f"{size}, {way}",
                    statistics.median(times),
                    2 * party.num_bytes,
                    copies_through_sockets=copies.pop() if len(copies) == 1 else sorted(copies),
                    cpu_ms=round(1e3 * statistics.median(party.cpu_s[1:]), 1),
                    least_ms=round(1e3 * times[0], 1),
                    pause_ms=round(1e3 * max(result.pause_s for _, result in syncs), 2),
                    driver_rss_mb=round(rss / 1e6),
                    driver_rss_grown_mb=round(grown / 1e6),
                )


def bench_link(report, log_dir, tiny):
    """A link that is slow, with two and three servers behind it."""
    shape = (4, 256) if tiny else (6, 1024)
    for num in (2, 3):
        for way in ("tcp", "store"):
            party = Party(way, shape, num, log_dir, bucket_bytes=8 * MIB, link_mbps=LINK_MBPS)
            with party.closing:
                party.publish()
                load = Load(party.servers)
                time.sleep(1.0)
                start, tokens = time.perf_counter(), decoded(party.servers)
                time.sleep(1.0 if tiny else 3.0)
                rate = (decoded(party.servers) - tokens) / (time.perf_counter() - start)
                rows = [one_slow(party, rate) for _ in range(2 if tiny else 4)]
                load.close()
            middle = sorted(rows, key=lambda row: row["seconds"])[len(rows) // 2]
            name = "channel" if way == "tcp" else way
            report.add(
                f"link, {num} servers, {name}",
                middle.pop("seconds"),
                party.num_bytes,
                limit_s=party.num_bytes / (LINK_MBPS * 1e6),
                **middle,
                least_hidden_by_tokens=min(row["hidden_by_tokens"] for row in rows),
            )


def one_slow(party, rate):
    """A sync while servers decode. rate: tokens a second that they do without one."""
    link_bytes, tokens = party.link.down_bytes, decoded(party.servers)
    start = time.perf_counter()
    seconds, result = party.publish()
    done = decoded(party.servers) - tokens
    window_s = time.perf_counter() - start
    return {
        "seconds": seconds,
        "copies_through_sockets": result.link_bytes / party.num_bytes,
        "link_bytes_per_model": round((party.link.down_bytes - link_bytes) / party.num_bytes, 3),
        "pause_ms": round(1e3 * result.pause_s, 2),
        "hidden_by_pause": round(1 - result.pause_s / result.stage_s, 4),
        "hidden_by_tokens": round(done / (rate * window_s), 3),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=("host", "link"), default=("host", "link"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/weight_store.json")
    args = parser.parse_args()
    report = Report(args.out, {} if args.tiny else PREDICTIONS)
    with tempfile.TemporaryDirectory() as folder:
        for section, bench in (("link", bench_link), ("host", bench_host)):
            if section in args.only:
                bench(report, Path(folder), args.tiny)
    report.print_table()


if __name__ == "__main__":
    main()
