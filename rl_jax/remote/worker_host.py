"""The program beside a worker of environments or scorers on another host (how it begins: program.py): it starts the
worker there, as its own child, and passes lines between its pipes and the driver's channel.

What an environment does cannot reach the channel, or keep it from giving signs of life: its process has two pipes and
nothing else, as on the driver's host. The child is killed here, with all it started: when the driver says so, when the
channel ends, or with this process.
Life: 1 the child is started, the channel opened. 2 `line` goes to the child, its lines come back as `line`; `stack` has
it write its stack; `end_input` lets it close what it has. 3 The child ends, or `end` comes: it is killed, `over` says
how it ended, and the driver closes the channel. 4 The channel is closed, by the driver, its end, or a lease without a
sign of it: this process ends at once.
Must not: read a line, start a second child, or import jax.
"""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rl_jax.exporter import open_exporter
from rl_jax.exposition import Text, tell_process
from rl_jax.remote.channel import Channel, Request
from rl_jax.remote.program import leave, run_program
from rl_jax.remote.spec import WORKER_PROGRAM
from rl_jax.rollout.place import LocalChild
from rl_jax.settings import ClusterSettings

LEAVE_S = 30.0  # for the driver to close the channel, once it was told how the child ended


async def serve(sock: socket.socket, told: Mapping[str, Any]) -> None:
    """Until the channel ends, and the process with it. told: attempt and the cluster's settings."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    child = LocalChild("worker", [f"--parent={os.getpid()}"])
    child.log.echo()

    def here(do: Callable[[Request], None]) -> Callable[[Request], None]:
        def handle(request: Request) -> None:
            loop.call_soon_threadsafe(do, request)

        return handle

    async def tell_stack(request: Request) -> None:
        request.answer({"log": await child.stack()})

    def ended(error: Exception) -> None:
        child.kill_now()
        leave(error)

    tasks, lines = set(), Counter()

    def metrics() -> str:
        text = Text(process=told.get("name", ""))
        tell_process(text)
        text.add("rl_jax:workers", float(not over.is_set()))
        for direction in ("to", "from"):
            text.add("rl_jax:worker_lines_total", lines[direction], direction=direction)
        return str(text)

    def send(request: Request) -> None:
        lines["to"] += 1
        child.send(request.arrays[0].tobytes())

    def on_line(line: bytes) -> None:
        lines["from"] += 1
        channel.tell("line", None, (np.frombuffer(line + b"\n", np.uint8),))

    channel = Channel(
        sock,
        "the driver",
        told["attempt"],
        ClusterSettings(**told["settings"]),
        handlers={
            "line": here(send),
            "end_input": here(lambda request: child.end_input()),
            "stack": here(lambda request: tasks.add(loop.create_task(tell_stack(request)))),
            "note": here(lambda request: child.note(request.body["text"])),
            "end": here(lambda request: over.set()),
        },
        on_close=ended,
    )
    open_exporter(told.get("scrape", {}), metrics)
    child.attach(loop, on_line, over.set)
    channel.start()
    await over.wait()
    await child.kill()
    channel.tell("over", {"how": child.how()})
    await asyncio.sleep(LEAVE_S)
    leave(TimeoutError(f"the driver did not close the channel within {LEAVE_S:g} s"))


def main() -> None:
    run_program(WORKER_PROGRAM, lambda sock, told: asyncio.run(serve(sock, told)))


if __name__ == "__main__":
    main()
