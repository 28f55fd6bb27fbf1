"""Shared set-up of the rollout's tests: a rollout whose environments, sampler and stream are the shipped fakes."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace

from rl_jax.ledger import Ledger
from rl_jax.rollout.buffer import SampleBuffer
from rl_jax.rollout.rollout import Rollout
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.settings import RewardSettings, RolloutSettings
from rl_jax.testing.envs import EchoEnv
from rl_jax.testing.fake_pool import FakePool, FakeStream
from rl_jax.testing.fake_sampler import FakeSampler
from rl_jax.tokens import ByteTokenizer, ChatRenderer

TOKENIZER = ByteTokenizer()
RENDERER = ChatRenderer(TOKENIZER)
SETTINGS = RolloutSettings(
    batch_groups=2,
    group_size=2,
    max_staleness=0,
    max_new_tokens=12,
    take_timeout_s=20.0,
    max_env_failures=12,
)


def echo_tasks(tag="echo", num=4, turns=2, max_turns=8, reward="env"):
    tasks = EchoEnv.tasks({"num_tasks": num, "turns": turns, "max_turns": max_turns}, "train")
    return [replace(t, id=f"{tag}/{t.id}", tag=tag, env="echo", reward=reward) for t in tasks]


def say(text, end=True):
    """Sampled tokens of a text, with the end token."""
    return [*TOKENIZER.encode(text), *([TOKENIZER.end] if end else [])]


def echo_script(request):
    """Says the word that EchoEnv asks for."""
    return say(re.findall(r"say (\w+)", TOKENIZER.decode(request.tokens))[-1])


class World:
    """All parts of one rollout; `rollout` is not started."""

    def __init__(
        self, path, settings=SETTINGS, tasks=None, sampler=None, pool=None, policy=None, *,
        stream=FakeStream, **kwargs,
    ):  # fmt: skip
        tasks = {"echo": echo_tasks()} if tasks is None else tasks
        self.settings = settings
        self.ledger = Ledger(path / "ledger.jsonl", "r")
        self.buffer = SampleBuffer(settings, self.ledger, list(tasks))
        self.sampler = sampler or FakeSampler(script=echo_script)
        self.pool = pool or FakePool({"echo": EchoEnv})
        self.stream = stream(tasks)
        self.rollout = Rollout(
            self.sampler,
            self.stream,
            self.pool,
            RENDERER,
            self.buffer,
            self.ledger,
            policy or TrajectoryScheduler(),
            settings,
            run_id="r",
            seed=7,
            **{
                "context": 256,
                "stop_deadline_s": 5.0,
                "rewards": RewardSettings(timeout_s=5.0),
                **kwargs,
            },
        )

    def step(self, step, select=None):
        """The driver's order without a learner: want, take, consumed, publish."""
        self.buffer.select = select
        self.rollout.want(step, self.settings.batch_groups)
        groups = self.buffer.take(step)
        self.rollout.consumed(step, groups)
        self.publish(step)
        self.rollout.check()
        return groups

    def publish(self, version):
        self.sampler.publish(version)
        self.rollout.published(version)

    def records(self):
        """All ledger records so far."""
        self.ledger.flush()
        return [json.loads(line) for line in self.ledger.path.read_text().splitlines()]


@contextmanager
def running(path, **kwargs):
    """A started World; closed, with its conservation law checked, at the end."""
    world = World(path, **kwargs)
    try:
        world.rollout.start()
        yield world
    finally:
        world.rollout.close()
        world.ledger.check(in_flight=0)
        world.ledger.close()
