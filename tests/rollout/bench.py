"""A pool of worker processes for tests, driven from a test's own thread."""

import asyncio

from rl_jax.rollout.worker import EnvPool
from rl_jax.settings import RolloutSettings, TaskSource
from rl_jax.types import Action

MAX_OBS_BYTES = 1000
# A hang is only known by its deadline; half of it is what a starved machine may add to a call of microseconds.
TIMEOUT_S = 1.5
GOOD = TaskSource(tag="good", env="rl_jax.testing.envs:EchoEnv")


class Bench:
    """A started pool on a loop of its own."""

    def __init__(self, sources, log_dir=None, rewards=None, look=(), place=None, **settings):
        """look: tags whose first observation is asked for before the start. place: the workers move to, before it."""
        settings = {
            "step_timeout_s": TIMEOUT_S,
            "reset_timeout_s": TIMEOUT_S,
            "max_obs_bytes": MAX_OBS_BYTES,
        } | settings
        scouts = None if place is None else 1
        self.pool = EnvPool(sources, RolloutSettings(**settings), rewards, log_dir, scouts=scouts)
        self.pool.prepare()
        if look:
            tasks = [self.pool.list_tasks(tag, "train")[0] for tag in look]
            self.seen = self.pool.first_observations(tasks, seed=1, patience_s=0.5)
        if place is not None:
            self.pool.move(place)
        self.loop = asyncio.new_event_loop()
        self.run(self.pool.start())

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    def close(self):
        self.run(self.pool.close())
        self.loop.close()

    async def open(self, tag, i=0, uid="r/0/0/0"):
        return await self.pool.open(self.pool.list_tasks(tag, "train")[i], uid, seed=1)

    async def play_good(self):
        """A whole episode of EchoEnv; its rewards."""
        handle = await self.open("good", uid="r/0/9/9")
        assert (await handle.reset()).messages[0].content == "say ant0"
        steps = [await handle.step(Action(text)) for text in ("ant0", "nothing")]
        await handle.close()
        assert [step.done for step in steps] == [False, True]
        assert steps[0].messages[0].content == "you said ant0; say ant0"
        return [step.reward for step in steps]

    @property
    def pids(self):
        return [worker.pid for worker in self.pool._workers.values()]
