"""Does training overlap rollout: a step at max_staleness 1 against 0, where each takes about half of the time.

RollArt's workload as benchmarks/rollout.py has it (128 trajectories of 10 to 30 turns, 3 s of generation and a latency
of Gaussian(10 s, 5 s) a turn, all times --scale), at most 128 in flight on either side. A decode server round a
FakeEngine whose blocks take a quarter of a turn, and a FakeLearner, are processes of their own; rollout's dispatcher,
buffer and router, a weight sync through the real protocol at every step, and the batch's way to the learner over its
link are real. The learner holds a batch for --train seconds, which is about what the rollout of a synchronous step
takes, so that the phases are balanced; their shares are printed. A ratio is of whole steps after the first WARM ones.
What it says: who waits for whom, on this machine's clock; nothing of how fast hardware is.

    python benchmarks/async_processes.py
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.process_sampler import ProcessSampler  # noqa: E402
from benchmarks.report import Report  # noqa: E402
from benchmarks.rollout import BLOCKS, ENGINE, STALENESS, scaled  # noqa: E402
from rl_jax.settings import ClusterSettings, RolloutSettings  # noqa: E402
from rl_jax.simulate.latency import TURN_S, played, turns_of  # noqa: E402
from rl_jax.testing.fake_learner import FakeLearner  # noqa: E402
from rl_jax.types import Group  # noqa: E402

WARM = 2
PREDICTION = (
    "0.52: a synchronous step is the slowest of 128 episodes (about 445 s) and the train step; an asynchronous one is "
    "the longer of the train step and 128 mean episodes on 128 slots (about 260 s), and a sync"
)


@dataclass
class Loop:
    """One run of num_steps steps; seconds are the clock's."""

    scale: float
    train_s: float
    num_steps: int
    seed: int

    def __post_init__(self):
        self.ends_s: list[float] = []  # of train steps
        self.trained_s: list[float] = []
        self.synced_s: list[float] = []

    async def play(self, settings: RolloutSettings) -> "Loop":
        with tempfile.TemporaryDirectory() as folder:
            sampler = ProcessSampler(self.scale * TURN_S / BLOCKS, ENGINE, Path(folder))
            learner = FakeLearner(ClusterSettings(), Path(folder))

            async def train(groups: Sequence[Group]) -> None:
                begin_s = time.monotonic()
                await learner.step(groups, self.scale * self.train_s)
                self.ends_s.append(time.monotonic())
                self.trained_s.append(self.ends_s[-1] - begin_s)

            try:
                await played(
                    sampler, scaled(turns_of(5), self.scale), settings, num_steps=self.num_steps,
                    seed=self.seed, train=train, look_s=0.002,
                )  # fmt: skip
            finally:
                learner.close()
                sampler.close()
        self.synced_s = sampler.sync_s
        return self

    @property
    def step_s(self) -> float:
        """Of the steps after the first WARM ones, on average."""
        return (self.ends_s[-1] - self.ends_s[WARM - 1]) / (len(self.ends_s) - WARM)

    @property
    def train_share(self) -> float:
        return statistics.mean(self.trained_s[WARM:]) / self.step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--train", type=float, default=445.0, help="seconds of a train step, before --scale"
    )
    parser.add_argument("--scale", type=float, default=0.01, help="of every second")
    out = ROOT / "benchmarks/results/async_processes.json"
    parser.add_argument("--out", type=Path, default=out)
    args = parser.parse_args()
    report = Report(args.out, {})
    report.head |= {"prediction": PREDICTION, "cpus": os.cpu_count(), "scale": args.scale}
    ratios = []
    for seed in range(args.seeds):
        slow, fast = (
            asyncio.run(Loop(args.scale, args.train, args.steps, seed).play(settings))
            for settings in STALENESS
        )
        ratios.append(fast.step_s / slow.step_s)
        report.add(f"seed {seed}, synchronous", slow.step_s, train_share=round(slow.train_share, 3))
        synced = statistics.mean(fast.synced_s) / fast.step_s
        report.add(
            f"seed {seed}, asynchronous",
            fast.step_s,
            limit_s=slow.step_s,
            sync_share=round(synced, 4),
        )
    report.print_table()
    print(f"asynchronous over synchronous, median: {statistics.median(ratios):.3f} (target 0.65)")


if __name__ == "__main__":
    main()
