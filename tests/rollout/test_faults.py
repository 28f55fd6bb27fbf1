"""Faults 2, 5, 23, 25 and 26: slow tails, blocking code, odd text on disk, groups that teach nothing, stragglers."""

import asyncio
import json
import textwrap
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.rollout.traces import read_traces, write_traces
from rl_jax.rollout.worker import EnvError
from rl_jax.settings import RolloutSettings, TaskSource
from rl_jax.simulate import clock
from rl_jax.simulate.rollout import SimulatedRollout
from rl_jax.simulate.workload import Constant, Lognormal, TaskShape
from rl_jax.testing.envs import EchoEnv
from rl_jax.testing.fake_pool import FakePool
from rl_jax.testing.fake_sampler import FakeSampler
from rl_jax.types import Action, Message
from tests.algorithms.test_common import estimates, make
from tests.rollout.bench import GOOD, Bench
from tests.rollout.doubles import SETTINGS, TOKENIZER, echo_tasks, running, say

# Blocks its step until the file that the action names is there, in Python or in C code that keeps the interpreter.
BLOCKING = """
    import ctypes, os, time
    from rl_jax.testing.envs import EchoEnv


    class Blocking(EchoEnv):
        def step(self, action):
            how, path = action.text.split(" ")
            while not os.path.exists(path):
                if how == "sleeps":
                    time.sleep(0.005)
                elif how == "holds":
                    ctypes.PyDLL(None).usleep(2000)
            return super().step(action)


    class Async(EchoEnv):
        async def step(self, action):
            time.sleep(1e9)
"""


@pytest.fixture
def blocking(tmp_path, monkeypatch):
    (tmp_path / "blocking_env.py").write_text(textwrap.dedent(BLOCKING), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(name):
        source = TaskSource(name.lower(), f"blocking_env:{name}")
        made.append(Bench([GOOD, source], env_workers=2, step_timeout_s=20.0))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.mark.slow
def test_blocking_code_of_an_environment_never_holds_the_drivers_loop(tmp_path, blocking):
    """Fault 5. The environments wait for what the loop itself does later: a loop that they held would never do it."""
    bench = blocking("Blocking")

    async def play():
        held = await bench.open("blocking")
        other = await bench.open("good", uid="r/0/0/1")
        assert held._worker is not other._worker
        await held.reset()
        await other.reset()
        for how in ("sleeps", "holds", "spins"):
            path = tmp_path / how
            stepping = asyncio.create_task(held.step(Action(f"{how} {path}")))
            for _ in range(5):  # the loop goes on, and so does an episode of another worker
                await asyncio.sleep(0.01)
                assert not stepping.done()
                await other.reset()
            path.touch()
            await stepping
        await held.close()
        await other.close()

    bench.run(play())


@pytest.mark.slow
def test_an_async_step_is_refused_with_the_remedy(blocking):
    """Fault 5: nobody awaits it, wherever it would block."""
    line = r"step\(\) of Async is async; write plain code, which may block"
    with pytest.raises(EnvError, match=line):
        blocking("Async")


class OneIn:
    """A tenth of all episodes are 20 times as slow."""

    def __call__(self, rng):
        return 20.0 if rng.random() < 0.1 else 1.0


EVEN = TaskShape("a", Constant(3), Constant(9), Constant(4), Constant(3), Constant(1), Constant(1))


def step_s(directory, shape, **redundancy):
    """Seconds of a step, of three."""

    async def main():
        sampler = FakeSampler(alphabet=range(8), slots={"": 64})
        settings = RolloutSettings(batch_groups=2, group_size=4, max_staleness=0, **redundancy)
        rollout = SimulatedRollout(sampler, (shape,), settings, directory, context=256)
        taken = await rollout.steps(3, commit=sampler.publish)
        versions = [t.oldest_version for _, groups in taken for g in groups for t in g.trajectories]
        await rollout.close()
        return taken[-1][0] / 3, versions

    return clock.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(replace(EVEN, pace=OneIn()), id="fault 26: stragglers"),
        pytest.param(replace(EVEN, reset_s=Lognormal(0.5, 1.5)), id="fault 2: slow resets"),
    ],
)
def test_slow_environments_hold_up_no_step_beyond_the_rule_of_redundancy(tmp_path, shape):
    """On a virtual clock. The bound on staleness holds: each step trains what its own version sampled."""
    even_s, _ = step_s(tmp_path / "even", EVEN)
    slow_s, _ = step_s(tmp_path / "slow", shape)
    kept_s, versions = step_s(tmp_path / "kept", shape, extra_groups=2, extra_members=4)
    assert slow_s > 1.5 * even_s and kept_s < 1.3 * even_s
    assert versions == [0] * 8 + [1] * 8 + [2] * 8


class Odd(EchoEnv):
    """Says what no UTF-8 holds, in one episode of all."""

    def step(self, action):
        seen = super().step(action)
        odd = (Message("user", "\ud835 \x00 \x1b[31m é"),)
        return replace(seen, messages=odd) if "ant0" in action.text and not seen.done else seen


def test_odd_text_of_one_episode_is_on_disk_in_escapes(tmp_path):
    """Fault 23."""
    pool = FakePool({"echo": Odd})
    with running(tmp_path, pool=pool) as world:
        world.publish(0)
        groups = world.step(1)
    trajectories = [t for group in groups for t in group.trajectories]
    write_traces(tmp_path / "traces", trajectories, TOKENIZER.decode)
    lines = (tmp_path / "traces" / "traces.jsonl").read_bytes().splitlines()
    assert len(lines) == 4 and all(line.isascii() for line in lines)
    odd = [json.loads(line)["task_id"] for line in lines if rb"\u0000 \u001b[31m \u00e9" in line]
    assert odd == ["echo/train/0"] * 2
    for kept, read in zip(trajectories, read_traces(tmp_path / "traces")):
        np.testing.assert_array_equal(kept.tokens, read.tokens)


def test_groups_that_teach_nothing_have_no_advantage_and_no_nan(tmp_path):
    """Fault 25: a group without a sampled token, and one of equal rewards, beside one that teaches something."""

    def play(request):
        if "/0/0/" in request.uid:
            return [TOKENIZER.end]
        is_right = request.uid.endswith("/0") or "/0/1/" in request.uid
        return say(f"{'bee0' if '/0/1/' in request.uid else 'cat0'}" if is_right else "no")

    settings = replace(SETTINGS, batch_groups=3)
    sampler = FakeSampler(script=play)
    tasks = {"echo": echo_tasks(num=3, turns=1)}
    with running(tmp_path, settings=settings, sampler=sampler, tasks=tasks) as world:
        world.publish(0)
        groups = sorted(world.step(1), key=lambda g: g.index)
    rewards = [[t.reward.value for t in g.trajectories] for g in groups]
    assert rewards == [[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]]
    values = estimates(make("grpo"), groups)
    assert all(np.isfinite(v).all() for v in values)
    assert [bool(v.any()) for v in values] == [False] * 4 + [True] * 2
