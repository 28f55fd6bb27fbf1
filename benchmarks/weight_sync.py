"""Weight sync: how close to a plain same-layout copy is moving trained weights to servers of another layout?

    python benchmarks/weight_sync.py              # 4 GPUs: Qwen2.5-7B shapes, bf16, random weights, 15.2 GB
    python benchmarks/weight_sync.py --tiny       # 4 simulated CPU devices, a small model: does it run, is it exact
    python benchmarks/weight_sync.py --only pause --out benchmarks/results/weight_sync_pause.json    # some sections

`pause` alone also runs on 2 GPUs, one each.

Train mesh: fsdp 2 on devices 0 and 1. Serving mesh: tensor 2 on devices 2 and 3. Limit: the same bytes between the same
devices where the layouts already match. Peer: `jax.device_put` across the two layouts. Every way is checked by digest
before it is timed. PREDICTIONS were written before the first run; README.md discusses what came.
"""

import argparse
import sys
import time
from collections import deque
from functools import lru_cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rl_jax.backend import simulate_cpu_devices  # noqa: E402

if "--tiny" in sys.argv:
    simulate_cpu_devices(4)  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

from benchmarks.generation_pause import bench_pause  # noqa: E402
from benchmarks.report import Report, bytes_in_use, copy_s_of, median_s  # noqa: E402
from kernels import digest  # noqa: E402
from rl_jax.mesh import SERVE_RULES, TRAIN_RULES, make_mesh, shardings  # noqa: E402
from rl_jax.models.decoder import build_model  # noqa: E402
from rl_jax.settings import ModelSettings, WeightSettings  # noqa: E402
from rl_jax.types import Ack, Digest  # noqa: E402
from rl_jax.weights.packed_copy import PackedCopy  # noqa: E402
from rl_jax.weights.plan import SyncPlan  # noqa: E402
from rl_jax.weights.reshard_copy import ReshardCopy  # noqa: E402
from rl_jax.weights.sync import IN_FLIGHT, WeightSync  # noqa: E402

SECTIONS = ("copy", "digest", "publish", "unequal", "memory", "pause")
TRANSPORTS = {"packed": PackedCopy, "reshard": ReshardCopy}
QWEN_7B = ModelSettings(
    num_layers=28, embed_size=3584, num_heads=28, num_kv_heads=4, head_dim=128, mlp_size=18944,
    rope_theta=1e6, qkv_bias=True, tie_embeddings=False, dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip
TINY = ModelSettings(
    num_layers=3, embed_size=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=128,
    qkv_bias=True, tie_embeddings=False, dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip
MIB = 1 << 20

# Milliseconds for 15.2 GB on 4 H100 or H200. Measured before on 4 H200: same layout 25 (two links of 302 GB/s),
# device_put across layouts 3463, reshard then copy in one piece 34. The rest is arithmetic on those and on 3 TB/s of
# memory.
PREDICTIONS = {
    "same layout": 25.0,
    "device_put across layouts": 3400.0,
    "reshard, one bucket": 34.0,  # 9 of all-to-all, then 25 of copies
    "reshard, 256 MiB": 30.0,  # overlapped, but both cross the source's links: 11.4 GB at 400 GB/s
    "reshard, 1024 MiB": 31.0,
    "packed, 64 MiB": 40.0,  # the host: about 115 buckets at 0.35 ms
    "packed, 256 MiB": 29.0,
    "packed, 512 MiB": 27.0,  # one layer a bucket: 25, and the first pack and last unpack uncovered
    "packed, 1024 MiB": 27.0,
    "packed, 2048 MiB": 37.0,  # after the first run: the host's 1.5 ms a bucket halves once more
    "digest, train state": 4.0,  # 3.8 G elements a card, about 12 integer operations each at 14 T/s
    "digest, served weights": 4.0,
    "publish, digests overlapped": 29.0,
    "publish, digests at the end": 32.0,
    "2 to 1": 52.0,  # one card's links take 15.2 GB in
    "1 to 2": 52.0,
    "3 to 1": 52.0,
    "keep: pause": 2.0,
}


class World:
    """The model, the meshes and the trained params; what several sections share."""

    def __init__(self, tiny: bool, report: Report):
        self.tiny, self.report = tiny, report
        self.model = build_model(TINY if tiny else QWEN_7B, 512 if tiny else 152_064)
        self.devices = jax.devices()
        self.repeats = 2 if tiny else 5
        size = min(2, len(self.devices) // 2)
        self.train = make_mesh({"fsdp": size}, self.devices[:size])
        self.serve = make_mesh({"tensor": size}, self.devices[size : 2 * size])
        self.params = self.random_params(self.train)
        self.num_bytes = sum(x.nbytes for x in self.params.values())
        self.limit_s = same_layout_s(self)  # of moving all bytes from the train to the serving mesh

    def places(self, mesh, rules):
        return shardings(self.model.logical_axes, rules, mesh)

    def random_params(self, mesh, seed: int = 0) -> dict[str, jax.Array]:
        """One small program a shape; a whole-model init would take a minute to compile."""
        places = self.places(mesh, TRAIN_RULES)
        key = jax.random.key(seed)
        params = {
            name: _random(a.shape, a.dtype, places[name])(jax.random.fold_in(key, i))
            for i, (name, a) in enumerate(self.model.abstract.items())
        }
        return jax.block_until_ready(params)

    def plan(self, train_mesh, servers, bucket_bytes: int) -> SyncPlan:
        settings = WeightSettings(bucket_bytes=bucket_bytes)
        places = self.places(train_mesh, TRAIN_RULES)
        model = self.model
        return SyncPlan.build(
            model.abstract, model.logical_axes, train_mesh, places, servers, "bfloat16", settings
        )


class BenchServer:
    """A SyncTarget that holds weights. `in_place`: each bucket replaces the live one at once, as no server may."""

    kind = "decode"

    def __init__(self, mesh, param_shardings, in_place: bool = False, early_digest: bool = True):
        self.name, self.mesh, self.param_shardings = "decode.0", mesh, param_shardings
        self.in_place, self.early_digest = in_place, early_digest
        self.live: dict[str, jax.Array] = {}
        self.staged: dict[str, jax.Array] = {}
        self.digests: list[digest.PendingDigest] = []
        self.most_bytes = 0

    def stage(self, sync_id, version, bucket, arrays):
        (self.live if self.in_place else self.staged).update(arrays)
        if self.early_digest:  # as serve/staging.py does
            self.digests.append(digest.start(arrays))
        self.version = version
        self.most_bytes = max(self.most_bytes, bytes_in_use(self.mesh.devices.flat[0]))

    def digest(self, sync_id) -> Digest:
        weights = self.live if self.in_place else self.staged
        found = [d.result() for d in self.digests] or [digest.digest_arrays(weights)]
        self.digests = []
        return Digest({n: (int(v[0]), int(v[1])) for values in found for n, v in values.items()})

    def commit(self, sync_id, kv, deadline_s) -> Ack:
        start = time.monotonic()
        if not self.in_place:
            self.live, self.staged = self.staged, {}
        return Ack(self.name, self.version, 0, time.monotonic() - start)

    def discard(self, sync_id):
        self.staged, self.digests = {}, []

    def fence(self, reason):
        raise RuntimeError(f"fenced: {reason}")


def move(transport, params) -> dict[str, jax.Array]:
    """All buckets to the one target, at most IN_FLIGHT under way: what a sync does, without protocol and digests."""
    out: dict[str, jax.Array] = {}
    under_way: deque = deque()
    for bucket in transport.plan.buckets:
        arrays = transport.send(params, bucket.names, ["decode.0"])["decode.0"]
        out.update(arrays)
        under_way.append(list(arrays.values()))
        if len(under_way) > IN_FLIGHT:
            jax.block_until_ready(under_way.popleft())
    return out


def check(want, got) -> None:
    """Raises AssertionError if a parameter arrived with other bits."""
    a, b = digest.digest_arrays(want), digest.digest_arrays(got)
    wrong = [n for n in a if tuple(a[n]) != tuple(b[n])]
    assert not wrong, f"{len(wrong)} parameters arrived wrong, first {wrong[0]}"


def same_layout_s(w: World) -> float:
    """The limit: the bytes are on the right devices already, in the serving layout; only the copies are left."""
    twin = w.places(make_mesh({"tensor": w.train.size}, w.train.devices.flat), SERVE_RULES)
    laid_out = jax.block_until_ready(jax.jit(lambda p: p, out_shardings=twin)(w.params))
    serve = w.places(w.serve, SERVE_RULES)
    return median_s(lambda: jax.device_put(laid_out, serve), w.repeats)


def bench_copy(w: World) -> None:
    """The limit, the peer, and both transports in several bucket sizes."""
    serve = w.places(w.serve, SERVE_RULES)
    server = BenchServer(w.serve, serve)
    w.report.add("same layout", w.limit_s, w.num_bytes, w.limit_s)
    peer_s = median_s(lambda: jax.device_put(w.params, serve), 2)
    w.report.add("device_put across layouts", peer_s, w.num_bytes, w.limit_s)
    unit, name = (1 << 10, "KiB") if w.tiny else (MIB, "MiB")
    for kind, size in [
        ("reshard", 0),
        *((k, s) for k in TRANSPORTS for s in (256, 512, 1024, 2048)),
    ]:
        plan = w.plan(w.train, [server], size * unit or 1 << 40)
        transport = TRANSPORTS[kind](plan)
        check(w.params, move(transport, w.params))
        seconds = median_s(partial(move, transport, w.params), w.repeats)
        notes = {"buckets": len(plan.buckets), "times_faster_than_peer": round(peer_s / seconds, 1)}
        row = f"{kind}, {f'{size} {name}' if size else 'one bucket'}"
        w.report.add(row, seconds, w.num_bytes, w.limit_s, **notes)


def bench_digest(w: World) -> None:
    """The digest alone, against one read of the weights at the card's copy rate; and other ways to write it."""
    size = 16 * MIB if w.tiny else 4096 * MIB
    copy_s = copy_s_of(w.devices[0], size)
    w.report.add("copy within a card", copy_s, 2 * size, note="bytes read plus written")
    read_s = w.num_bytes / 2 / (2 * size / copy_s)  # each of two cards reads half of the weights
    seconds = median_s(lambda: digest.start(w.params).partials, w.repeats)
    w.report.add("digest, train state", seconds, w.num_bytes, read_s)
    served = jax.device_put(w.params, w.places(w.serve, SERVE_RULES))
    seconds = median_s(lambda: digest.start(served).partials, w.repeats)
    w.report.add("digest, served weights", seconds, w.num_bytes, read_s)
    seconds = median_s(lambda: jax.tree.leaves(digest.digest_arrays(served)), w.repeats)
    w.report.add("digest, served weights, to the host", seconds, w.num_bytes, read_s)
    shards = [x.addressable_shards[0].data for x in served.values()]
    for name, function in DIGESTS.items():
        program = jax.jit(lambda xs, f=function: [f(x) for x in xs])
        seconds = median_s(lambda p=program: p(shards), w.repeats)
        w.report.add(f"digest of one card's shards: {name}", seconds, w.num_bytes // 2, read_s)


def bench_publish(w: World, bucket_bytes: int) -> None:
    """The whole protocol: lanes, digests on both sides, commit. Digest share = what it adds to the bare copies."""
    for early in (True, False):
        server = BenchServer(w.serve, w.places(w.serve, SERVE_RULES), early_digest=early)
        plan = w.plan(w.train, [server], bucket_bytes)
        sync = WeightSync(plan, [server], WeightSettings(bucket_bytes=bucket_bytes))
        versions = iter(range(100))
        bare_s = median_s(partial(move, PackedCopy(plan), w.params), w.repeats)

        def publish(sync=sync, versions=versions):
            result = sync.publish(w.params, next(versions))
            assert result.state == "PUBLISHED", result.detail

        seconds = median_s(publish, w.repeats, warmup=2)
        check(w.params, server.live)
        sync.close()
        name = f"publish, digests {'overlapped' if early else 'at the end'}"
        share = round((seconds - bare_s) / bare_s, 3)
        notes = {"bare_copies_ms": round(bare_s * 1e3, 3), "added_by_digest_and_protocol": share}
        w.report.add(name, seconds, w.num_bytes, w.limit_s, **notes)


def one_to_one_s(w: World) -> float:
    single = w.random_params(make_mesh({}, w.devices[:1]))
    there = w.places(make_mesh({}, w.devices[3:4]), SERVE_RULES)
    return median_s(lambda: jax.device_put(single, there), w.repeats)


def bench_unequal(w: World, bucket_bytes: int) -> None:
    """Meshes of different sizes; limit: all bytes over one card's links in one plain copy."""
    limit_s = one_to_one_s(w)
    w.report.add("one card to one card, same layout", limit_s, w.num_bytes, limit_s)
    cases = {
        "2 to 1": ({"fsdp": 2}, w.devices[:2], {}, w.devices[3:4]),
        "1 to 2": ({}, w.devices[:1], {"tensor": 2}, w.devices[2:4]),
        "3 to 1": ({"data": 3}, w.devices[:3], {}, w.devices[3:4]),
    }
    for name, (train_axes, sources, serve_axes, targets) in cases.items():
        train, serve = make_mesh(train_axes, sources), make_mesh(serve_axes, targets)
        params = w.random_params(train)
        server = BenchServer(serve, w.places(serve, SERVE_RULES))
        for kind in TRANSPORTS:
            transport = TRANSPORTS[kind](w.plan(train, [server], bucket_bytes))
            check(params, move(transport, params))
            seconds = median_s(partial(move, transport, params), w.repeats)
            row = name if kind == "packed" else f"{name}, {kind}"
            w.report.add(row, seconds, w.num_bytes, limit_s)
        seconds = median_s(partial(jax.device_put, params, server.param_shardings), 1)
        w.report.add(f"{name}, device_put across layouts", seconds, w.num_bytes, limit_s)


def bench_memory(w: World, bucket_bytes: int) -> None:
    """Shadow weights beside the live ones (the old version serves on) against replacing them bucket by bucket."""
    for in_place in (False, True):
        server = BenchServer(w.serve, w.places(w.serve, SERVE_RULES), in_place=in_place)
        sync = WeightSync(w.plan(w.train, [server], bucket_bytes), [server], WeightSettings())
        sync.publish(w.params, 0)
        before, server.most_bytes = bytes_in_use(w.devices[2]), 0
        start = time.perf_counter()
        result = sync.publish(w.params, 1)
        seconds = time.perf_counter() - start
        assert result.state == "PUBLISHED", result.detail
        sync.close()
        extra = round((server.most_bytes - before) / 1e9, 3)
        name = "bucket by bucket in place" if in_place else "beside the live weights"
        w.report.add(f"staging {name}", seconds, w.num_bytes, w.limit_s, extra_gb_a_card=extra)
        del server, sync


def _flat_index(x: jax.Array) -> jax.Array:
    """Of the flattened shard: the index needs no arithmetic on dimensions."""
    return digest.partial_digest(x.reshape(-1), 0, (1,))


def _one_reduction(x: jax.Array) -> jax.Array:
    """Both sums in one variadic reduction, should XLA not fuse the two."""
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32).reshape(-1)
    weight = lax.iota(jnp.uint32, bits.size) * np.uint32(2) + np.uint32(1)
    zero = np.uint32(0)
    both = lax.reduce(
        (bits * weight, (bits ^ (bits >> np.uint32(7))) * weight),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        (0,),
    )
    return jnp.stack(both)


DIGESTS = {
    "as shipped": lambda x: digest.partial_digest(x, 0, digest.strides_of(x.shape)),
    "flat index": _flat_index,
    "one reduction": _one_reduction,
    "a plain sum, for comparison": lambda x: jnp.sum(x, dtype=jnp.float32),
}


@lru_cache(maxsize=64)
def _random(shape, dtype, sharding):
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype) * 0.02, out_shardings=sharding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="4 simulated CPU devices, a small model"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/weight_sync.json")
    parser.add_argument("--bucket_mib", type=float, default=1024, help="of the sections after copy")
    args = parser.parse_args()
    needed = 2 if args.only == ["pause"] else 4
    if (found := len(jax.devices())) < needed:
        sys.exit(f"weight_sync needs {needed} devices, {found} are present; use --tiny on a CPU")
    report = Report(args.out, {} if args.tiny else PREDICTIONS)
    world = World(args.tiny, report)
    bucket_bytes = 1 << 18 if args.tiny else int(args.bucket_mib * MIB)
    run = {
        "copy": lambda: bench_copy(world),
        "digest": lambda: bench_digest(world),
        "publish": lambda: bench_publish(world, bucket_bytes),
        "unequal": lambda: bench_unequal(world, bucket_bytes),
        "memory": lambda: bench_memory(world, bucket_bytes),
        "pause": lambda: bench_pause(world, bucket_bytes),
    }
    for section in SECTIONS:
        if section in args.only:
            print(f"--- {section}", flush=True)
            run[section]()
    report.print_table()


if __name__ == "__main__":
    main()
