"""What a learner's process says to its driver, without a model: it counts its steps, and saves nothing."""

import os
import signal

from rl_jax.metrics import Metric
from rl_jax.remote.learner_wire import metrics_to_wire
from rl_jax.remote.program import run_program
from rl_jax.remote.service import Service


class Double(Service):
    orders = ("build", "warm", "warm_step", "warmed", "open", "step", "save", "saved")

    def _build(self, request):
        self.job, self.num = request.body, 0
        request.answer({"notes": [], "state": {}, "extra": {}})

    def _step(self, request):
        self.num += 1
        names, arrays = metrics_to_wire({"num": Metric.of([self.num])})
        request.answer({"names": names}, arrays)

    def _done(self, request):
        if self.job.get("dies_in") == request.verb:
            os.kill(os.getpid(), signal.SIGKILL)
        request.answer({"notes": [], "names": []})

    _warm = _warm_step = _warmed = _open = _save = _saved = _done


if __name__ == "__main__":
    run_program(__spec__.name, lambda sock, told: Double(sock, told).run())
