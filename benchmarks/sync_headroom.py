"""Does a weight sync succeed where weights fill nine tenths of the memory, and does it give all of it back?

    python benchmarks/sync_headroom.py                 # 1 GPU: train and serving roles on one card
    python benchmarks/sync_headroom.py --split         # 2 GPUs: one trains, one serves
    python benchmarks/sync_headroom.py --tiny          # CPU: does it run; bytes are counted over live arrays

The memory is a set fraction of the card (--fraction, allocated at once), so that a small model fills it. What fills it:
on a shared card the trained weights, those that serve, and the copy that a sync stages beside them; on a serving card
of its own the last two. The rest holds --buckets buckets, of which a sync has at most weights/sync.py's IN_FLIGHT under
way, and the KV of a few slots. A DecodeServer, WeightSync and transport as in a run; every sync gets new weights.
Fails (exit code 1) if a sync does not end PUBLISHED, or if the bytes of live arrays differ before and after one.
"""

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CPU_LIMIT = 2 << 20  # bytes, for --tiny
NUM_SYNCS = 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fraction", type=float, default=0.1, help="of the card's memory")
    parser.add_argument("--fill", type=float, default=0.9, help="of that, by copies of the weights")
    parser.add_argument("--buckets", type=int, default=4, help="that fit beside them")
    parser.add_argument(
        "--split", action="store_true", help="train on one device, serve on another"
    )
    parser.add_argument("--tiny", action="store_true", help="CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/sync_headroom.json")
    return parser.parse_args()


ARGS = arguments()
if ARGS.tiny:
    from rl_jax.backend import simulate_cpu_devices

    simulate_cpu_devices(2)  # before jax is imported
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(ARGS.fraction)

import jax  # noqa: E402

from benchmarks.report import card  # noqa: E402
from benchmarks.served_model import draw  # noqa: E402
from benchmarks.train_step import QWEN_1_5B, SHAPES  # noqa: E402
from rl_jax.engine.engine import JaxEngine  # noqa: E402
from rl_jax.mesh import SERVE_RULES, TRAIN_RULES, make_mesh, shardings  # noqa: E402
from rl_jax.models.decoder import build_model  # noqa: E402
from rl_jax.models.model import Model  # noqa: E402
from rl_jax.serve import DecodeServer  # noqa: E402
from rl_jax.settings import EngineSettings, ServeSettings, WeightSettings  # noqa: E402
from rl_jax.weights.plan import SyncPlan  # noqa: E402
from rl_jax.weights.sync import WeightSync  # noqa: E402

ENGINE = EngineSettings(slots=4, context=256, chunk_sizes=(64,), chunk_requests=4)
DEADLINE_S = 300.0


def stats(device: jax.Device) -> dict[str, int]:
    """Bytes of live arrays, what the allocator says is in use, its peak, and its limit.

    A GPU's allocator counts whole pieces, of which it may leave up to 128 MB unused rather than cut them again: its
    bytes in use vary from sync to sync where those of arrays do not.
    """
    buffers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.device == device
    }
    found = device.memory_stats() or {}
    return {
        "array_bytes": sum(buffers.values()),
        "bytes_in_use": found.get("bytes_in_use", 0),
        "peak_bytes_in_use": found.get("peak_bytes_in_use", 0),
        "bytes_limit": found.get("bytes_limit", CPU_LIMIT),
    }


def model_of(num_bytes: float) -> Model:
    """As many layers as fit."""
    shape, vocab = (SHAPES["tiny"], 512) if ARGS.tiny else (QWEN_1_5B, 151_936)
    shape = replace(shape, dtype="bfloat16", param_dtype="bfloat16")

    def build(num_layers: int) -> Model:
        return build_model(replace(shape, num_layers=num_layers), vocab)

    one, two = (bytes_of(build(n)) for n in (1, 2))
    num_layers = 1 + int((num_bytes - one) // (two - one))
    if num_layers < 1:
        sys.exit(f"{num_bytes:,.0f} bytes hold no layer ({one:,}); raise --fraction or --fill")
    return build(num_layers)


def bytes_of(model: Model) -> int:
    return sum(2 * array.size for array in model.abstract.values())


def settled(devices: list[jax.Device]) -> list[dict[str, int]]:
    gc.collect()
    return [stats(device) for device in devices]


def main() -> None:
    devices = jax.devices()[: 2 if ARGS.split else 1]
    limit = stats(devices[-1])["bytes_limit"]
    copies = 2 if ARGS.split else 3
    model = model_of(ARGS.fill * limit / copies)
    train, serve = make_mesh({}, devices[:1]), make_mesh({}, devices[-1:])
    places = shardings(model.logical_axes, TRAIN_RULES, train)
    settings = WeightSettings(
        bucket_bytes=int((1 - ARGS.fill) * limit / ARGS.buckets), deadline_s=DEADLINE_S
    )
    server = DecodeServer(
        "decode.0",
        "decode",
        JaxEngine(model, serve, SERVE_RULES, ENGINE, "decode.0"),
        ServeSettings(),
    )
    server.start()
    server.wait_ready(ServeSettings().compile_deadline_s)
    plan = SyncPlan.build(
        model.abstract, model.logical_axes, train, places, [server], "bfloat16", settings
    )
    sync = WeightSync(plan, [server], settings)
    trained = draw(model, places)
    step = jax.jit(lambda params: {n: x * 1.001 for n, x in params.items()}, donate_argnums=0)
    report = {
        "card": card(),
        "memory_fraction": ARGS.fraction,
        "split": ARGS.split,
        "bytes_limit": limit,
        "weight_bytes": plan.num_bytes,
        "filled_by_weights": round(copies * plan.num_bytes / limit, 4),
        "num_buckets": len(plan.buckets),
        "largest_bucket_bytes": max(bucket.num_bytes for bucket in plan.buckets),
        "syncs": [],
    }
    before, ok = settled(devices), True
    for version in range(NUM_SYNCS):
        trained = jax.block_until_ready(step(trained))
        start = time.perf_counter()
        result = sync.publish(trained, version)
        seconds, after = time.perf_counter() - start, settled(devices)
        same = [a["array_bytes"] == b["array_bytes"] for a, b in zip(after, before, strict=True)]
        # The first sync brings the weights that serve; from then on nothing may be left behind.
        ok = ok and result.state == "PUBLISHED" and (version == 0 or all(same))
        report["syncs"].append(
            {
                "version": version,
                "state": result.state,
                "detail": result.detail,
                "seconds": round(seconds, 4),
                "array_bytes": [a["array_bytes"] for a in after],
                "bytes_in_use": [a["bytes_in_use"] for a in after],
                "peak_bytes": [a["peak_bytes_in_use"] for a in after],
            }
        )
        print(json.dumps(report["syncs"][-1]), flush=True)
        before = after
    sync.close()
    server.close()
    report["ok"] = ok
    ARGS.out.parent.mkdir(parents=True, exist_ok=True)
    ARGS.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "syncs"}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
