"""A learner in a process of its own that trains nothing: it takes a batch over the link, as learner_process does, and
holds it for as long as it is told.

For questions of who waits for whom: what a real one computes is not asked. Its process is asked, watched and ended as a
learner's is (remote/group.py).
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl_jax.remote.channel import Request
from rl_jax.remote.group import Group as Processes
from rl_jax.remote.program import run_program
from rl_jax.remote.service import Service
from rl_jax.remote.spec import Spec
from rl_jax.remote.starter import LocalStarter
from rl_jax.settings import ClusterSettings
from rl_jax.types import Group

PROGRAM = "rl_jax.testing.fake_learner"
GRACE_S = 30.0  # for a step, beyond what it holds


class FakeLearner:
    """The driver's side. `step` one at a time; `close` ends the process."""

    def __init__(self, settings: ClusterSettings, log_dir: Path):
        """Raises: remote.group.GroupLost if the process does not come."""
        spec = Spec(name="learner.0", program=PROGRAM)
        self._processes = Processes([spec], settings, LocalStarter(settings, log_dir))
        self._processes.start()

    async def step(self, groups: Sequence[Group], hold_s: float) -> int:
        """Tokens that the process got, hold_s after they came. Raises: remote.group.GroupLost."""
        arrays = [
            array
            for group in groups
            for trajectory in group.trajectories
            for array in (trajectory.tokens, trajectory.logprobs, trajectory.versions)
        ]
        body, deadline_s = {"hold_s": hold_s}, hold_s + GRACE_S
        (answer,) = await asyncio.to_thread(
            self._processes.order, "step", body, arrays, deadline_s=deadline_s
        )
        return answer.body["tokens"]

    def close(self) -> None:
        self._processes.end()


class _Process(Service):
    orders = ("step",)

    def _step(self, request: Request) -> None:
        tokens = sum(len(np.asarray(array)) for array in request.arrays[::3])
        time.sleep(request.body["hold_s"])
        request.answer({"tokens": tokens})


if __name__ == "__main__":
    run_program(PROGRAM, lambda sock, told: _Process(sock, told).run())
