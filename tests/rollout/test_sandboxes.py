"""Sandboxes in worker processes: a worker that is killed takes its own along; without isolation no run begins."""

import asyncio
import time
from pathlib import Path

import pytest

from rl_jax import launch
from rl_jax.rollout.worker import EnvError
from rl_jax.sandbox import owner
from rl_jax.settings import RewardSettings, TaskSource
from rl_jax.types import Action, EpisodeView, ToolCall
from tests.rollout.bench import Bench
from tests.sandbox.opened import sandbox_or_skip

CONFIG = f"--config={Path(__file__).parents[1] / 'job_config.py'}"
SMALL = {"num_tasks": 2, "eval_size": 2}
HANG = "import os\nif os.fork(): os.setsid()\nwhile True: pass"


def sandboxes_of(pids):
    return [pid for pid, tag in owner.tagged() if int(tag.split("/")[1]) in pids]


def gone(pids, patience_s=5.0):
    """Whether no sandbox of these workers is left within patience_s."""
    end_s = time.monotonic() + patience_s
    while sandboxes_of(pids) and time.monotonic() < end_s:
        time.sleep(0.02)
    return not sandboxes_of(pids)


@pytest.mark.slow(seconds=4)
def test_a_worker_that_is_killed_takes_its_sandboxes_along():
    """The step's deadline passes before the sandbox's, as a machine that starves may have it."""
    sandbox_or_skip()
    source = TaskSource("code", "code_tool", config={**SMALL, "wall_s": 60.0})
    bench = Bench([source], env_workers=1, step_timeout_s=2.0, max_obs_bytes=60_000)
    try:
        pids, seen = bench.pids, []

        async def hang():
            handle = await bench.open("code")
            await handle.reset()
            step = bench.loop.create_task(
                handle.step(Action("", (ToolCall("python", {"code": HANG}),)))
            )
            while not seen:  # it runs
                seen.extend(sandboxes_of(pids))
                await asyncio.sleep(0.02)
            await step

        with pytest.raises(EnvError, match="env_timeout"):
            bench.run(hang())
        assert seen and gone(pids)

        async def play():
            handle = await bench.open("code")
            await handle.reset()
            said = await handle.script(0, 1.0)
            while not (result := await handle.step(Action(said.content, said.tool_calls))).done:
                said = await handle.script(0, 1.0)
            await handle.close()
            return result.reward

        assert bench.run(play()) == 1.0  # the next worker's work is as ever
    finally:
        bench.close()


@pytest.mark.slow
def test_code_is_scored_in_the_scorers_own_process():
    sandbox_or_skip()
    env = "rl_jax.testing.envs:EchoEnv"
    source = TaskSource("echo", env, reward="code", config={"num_tasks": 2})
    bench = Bench([source], rewards=RewardSettings(workers=1), env_workers=1, max_obs_bytes=60_000)
    try:
        task = bench.pool.list_tasks("echo", "train")[0]
        task.payload["tests"] = [{"args": [2], "expected": 4}]

        def score(code):
            view = EpisodeView((), (code,), {}, (0.0,))
            return bench.run(bench.pool.scorers.score("code", task, view)).reward

        assert score("def f(n): return n * n").value == 1.0
        wrong = score("def f(n): return n")
        assert (wrong.value, wrong.parts["tests_passed"]) == (0.0, 0.0)
        task.payload["tests"] = []
        assert score("def f(n): return n").status == "error"
    finally:
        bench.close()


@pytest.mark.slow
@pytest.mark.parametrize("dry", [True, False])
def test_a_run_whose_sandbox_is_missing_is_refused_before_it_begins(dry, tmp_path, capsys):
    """One line with the remedy, exit code 2, and no run directory."""
    code = launch.main(
        [
            CONFIG,
            f"--run_dir={tmp_path / 'r'}",
            "--config.tasks.sources[0].env=code_tool",
            "--config.tasks.sources[0].config.sandbox=nsjail:/no/nsjail",
            "--config.tasks.sources[0].script_episodes=0",
            *(["--dry_run"] if dry else []),
        ]
    )
    told = capsys.readouterr().err
    assert code == 2 and told.count("\n") == 1, told
    assert "sandbox nsjail: /no/nsjail is no program; install it" in told
    assert not (tmp_path / "r").exists()
