"""What a decode block costs beside a running train step, on the quickstart's meshes in one process.

    python benchmarks/decode_beside_train.py        # CPU, simulated devices: two decode servers, one device that trains

Limit: the same blocks with the train device idle, measured before and after. Target: at most 4 times that. On CPU only
one-device programs of a process overlap, so the servers have one device each and here the learner has one too.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from rl_jax import backend
from rl_jax.config import parse
from rl_jax.mesh import MeshPlan, build_meshes

PREDICTIONS = {
    "decode block alone": 3.0,
    "decode block beside train": 9.0,
}  # two cores shared by three programs
ROUNDS, ROUND_S = 3, 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/decode_beside_train.json")
    )
    args = parser.parse_args()
    settings = parse(["--config=quickstart"]).settings
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    backend.avoid_broken_fusions()
    backend.simulate_cpu_devices(plan.num_devices)
    backend.use_platform(settings.mesh.platform)
    backend.enable_compile_cache()
    measure(settings, plan, args.out)


def measure(settings, plan: MeshPlan, out: Path) -> None:
    """Everything that needs jax, which the flags above must precede."""
    import threading

    import jax
    import numpy as np
    from report import Report

    from rl_jax.algorithms.grpo import Grpo
    from rl_jax.cluster import InProcCluster
    from rl_jax.learner.batch import pack, with_advantages
    from rl_jax.learner.learner import Learner
    from rl_jax.models.decoder import build_model
    from rl_jax.testing.trajectories import fake_group
    from rl_jax.types import TurnRequest
    from rl_jax.weights.plan import SyncPlan
    from rl_jax.weights.sync import WeightSync

    model = build_model(settings.model, 264)
    meshes = build_meshes(plan)
    cluster = InProcCluster(plan, meshes.servers, model, settings)
    learner = Learner(
        model, meshes.train, plan.train.rules, Grpo(settings.algorithm), settings.learner,
        max_rows=64, temperature=1.0, total_steps=1000,
    )  # fmt: skip
    learner.init(jax.random.key(0))
    cluster.start()
    targets = cluster.targets
    sync_plan = SyncPlan.build(
        model.abstract, model.logical_axes, learner.mesh, learner.param_shardings, targets,
        settings.model.dtype, replace(settings.weights, deadline_s=300.0),
    )  # fmt: skip
    sync = WeightSync(sync_plan, targets, replace(settings.weights, deadline_s=300.0))
    sync.publish(learner.params, 0)
    groups = [fake_group(i, [0.0, 1.0] * 4, [200] * 8) for i in range(4)]
    batch = pack(groups, settings.learner)
    batch, _ = with_advantages(batch, groups, {}, learner.algorithm, None, settings.algorithm)
    learner.step(batch)

    stop = threading.Event()
    number = iter(range(1 << 30))

    def feed(server, _=None):
        """A new request for each that ends, so that all slots stay busy."""
        if stop.is_set():
            return
        i = next(number)
        request = TurnRequest(
            f"bench/{i}",
            0,
            0,
            np.arange(8, 40, dtype=np.int32),
            1.0,
            1.0,
            0,
            200,
            (),
            (),
            i,
            "bench",
        )
        server.submit(request, None, lambda turn: (server.release(request.session), feed(server)))

    for server in cluster.decode:
        for _ in range(settings.engine.slots):
            feed(server)

    def block_s() -> float:
        before = cluster.counters()
        time.sleep(ROUND_S)
        after = cluster.counters()
        return (after["block_s"] - before["block_s"]) / max(after["blocks"] - before["blocks"], 1)

    block_s()  # warm
    alone, beside, steps = [], [], []
    for _ in range(ROUNDS):
        alone.append(block_s())
        training = threading.Event()
        train = threading.Thread(target=_train, args=(learner, batch, training, steps))
        train.start()
        beside.append(block_s())
        training.set()
        train.join()
    stop.set()
    report = Report(out, PREDICTIONS)
    report.add("decode block alone", median(alone), slots=settings.engine.slots)
    report.add("decode block beside train", median(beside), limit_s=median(alone), target_ratio=4)
    report.add("train step beside decode", median(steps))
    report.print_table()
    cluster.close()
    sync.close()


def _train(learner, batch, done, steps: list[float]) -> None:
    while not done.is_set():
        start = time.monotonic()
        learner.step(batch)
        steps.append(time.monotonic() - start)


if __name__ == "__main__":
    main()
