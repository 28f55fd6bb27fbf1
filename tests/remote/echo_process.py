"""What the processes of a tested group do: say what they were told, fail when told to, or hang."""

import time

from rl_jax.remote.program import run_program
from rl_jax.remote.service import Service


class Echo(Service):
    orders = ("echo", "fail", "sleep")

    def failed(self, request, error):
        request.answer({"raised": type(error).__name__, "text": str(error)})

    def _echo(self, request):
        request.answer(request.body, request.arrays)

    def _fail(self, request):
        if request.body["fails"]:
            raise LookupError("as told")
        time.sleep(request.body.get("sleep_s", 0.0))
        request.answer({})

    def _sleep(self, request):
        time.sleep(request.body["sleep_s"])
        request.answer({})


if __name__ == "__main__":
    run_program(__spec__.name, lambda sock, told: Echo(sock, told).run())
