"""serve.loop.Loop on a virtual clock: a server's iterations as a coroutine instead of a thread.

One iteration runs in one go, at the end of the one before: commands that came until then are obeyed, the engine's verbs
spend time (clock.spend), and what is answered leaves at the time at which it was answered. Others see the server's
state (its version, how many turns run) from the iteration's begin on, so up to one chunk and one block early.
Invariants: as Loop's; iterations do not overlap in virtual time; an iteration that raises ends the server as its thread
would end.
A commit's caller blocks until it is answered, which no coroutine may; so it is obeyed inside `put`, at the end of the
iteration under way, and the caller finds its answer. A drain that waits for turns cannot be had here.
Must not: be started off a VirtualLoop.
"""

import asyncio

from rl_jax.serve.commands import Command, Commit
from rl_jax.serve.loop import Loop
from rl_jax.simulate.clock import VirtualLoop


class SteppedLoop(Loop):
    def start(self) -> None:
        """Compiles at once, in no time."""
        clock = asyncio.get_running_loop()
        if not isinstance(clock, VirtualLoop):
            raise RuntimeError(
                f"{self.server}: a SteppedLoop runs on a VirtualLoop; see simulate.run"
            )
        self._clock, self._free_s, self._wake = clock, clock.time(), asyncio.Event()
        for _ in self._prepare():
            self.num_done += 1
        self._ready.set()
        self._task = clock.create_task(self._go_on(), name=f"serve-{self.server}")

    def put(self, command: Command) -> None:
        super().put(command)
        if isinstance(command, Commit):
            self._iterate()
        self._wake.set()

    def close(self) -> None:
        """End it between two iterations."""
        self._closing = True
        for command in self._inbox.close():
            self._refuse(command, self.error())
        if not self.is_dead:
            self._fail(self.error())
        self._task.cancel()

    async def _go_on(self) -> None:
        while not self._closing and not self.is_dead:
            wait_s = self._idle_s()
            self.doing, self._is_idle = "waiting for commands", wait_s > 0
            if wait_s > 0:
                timer = self._clock.call_later(wait_s, self._wake.set)
                await self._wake.wait()  # a command that came before ends it at once
                timer.cancel()
            self._wake.clear()
            self._is_idle = False
            self._iterate()
            # Once more where a commit came meanwhile; at least one turn of the loop, for those that come at this time.
            await asyncio.sleep(0)
            while (left_s := self._free_s - self._clock.time()) > 0:
                await asyncio.sleep(left_s)

    def _iterate(self) -> None:
        if self.is_dead:
            return

        def step() -> None:
            try:
                self._step(self._inbox.take(0.0))
            except Exception as error:  # as Loop's thread: everyone who waits must learn of it
                self._die(error)

        self._free_s = self._clock.apart(step, self._free_s)
