"""Environments that break in every way: one episode is blamed, the others are told, nothing is left behind."""

import asyncio
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl_jax.child import INHERITED
from rl_jax.rollout.episode import EpisodeRules
from rl_jax.rollout.scripted import ScriptError, ScriptPlan, scripted_episodes
from rl_jax.rollout.worker import EnvError, EnvPool
from rl_jax.settings import RolloutSettings, TaskSource
from rl_jax.tokens import ByteTokenizer
from rl_jax.types import Action
from tests.rollout.bench import GOOD, MAX_OBS_BYTES, TIMEOUT_S, Bench
from tests.rollout.doubles import RENDERER

ROOT = Path(__file__).resolve().parents[2]


def misbehaving(fault: str, at: str = "step", **config) -> TaskSource:
    """A source whose tag names what it does."""
    return TaskSource(
        tag=f"{fault}@{at}",
        env="rl_jax.testing.envs:MisbehavingEnv",
        config={"fault": fault, "at": at, "num_tasks": 2, **config},
    )


HARMLESS = [
    "raise",
    "sys_exit",
    "print",
    "none_reward",
    "nan_reward",
    "text_reward",
    "huge_reward",
    "nan_info",
    "number",
]
HARMLESS += ["huge_text", "surrogate", "bytes", "role", "forged", "environ", "modules"]
DEADLY = ["exit", "segfault", "hang", "spin", "fork"]
SOURCES = [
    GOOD,
    *[misbehaving(fault) for fault in HARMLESS + DEADLY],
    *[misbehaving("raise", at) for at in ("reset", "close", "script")],
    misbehaving("hang", "reset"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(SOURCES, log_dir=tmp_path_factory.mktemp("run") / "logs")
    yield bench
    bench.close()


def test_tasks_come_from_the_worker_as_data(bench):
    assert bench.pool.splits("good") == ("train", "eval")
    assert bench.pool.has_script("good")
    task = bench.pool.list_tasks("good", "eval")[1]
    assert (task.id, task.tag, task.env, task.reward) == ("good/eval/9", "good", GOOD.env, "env")
    assert task.payload == {"answer": "bee1", "turns": 2, "step_s": 0.0}
    assert len(bench.pool.list_tasks("good", "train")) == 8
    with pytest.raises(ValueError, match="tag 'good' has no split 'test'; use one of train, eval"):
        bench.pool.list_tasks("good", "test")


def test_episode_by_hand(bench):
    assert bench.run(bench.play_good()) == [1.0, 0.0]
    assert bench.pool.num_live == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "exit", "hang"])
def test_a_look_at_first_observations_costs_no_episode_anything(fault):
    source = misbehaving(fault, "reset")
    bench = Bench([GOOD, source], env_workers=1, look=("good", source.tag))
    try:
        kind = {"raise": "env_error", "exit": "env_died", "hang": "env_timeout"}[fault]
        assert bench.seen[0].messages[0].content == "say ant0" and bench.seen[1].kind == kind
        assert bench.run(bench.play_good()) == [1.0, 0.0]
        assert not bench.pool.counts
    finally:
        bench.close()


def step_of(bench, fault, at="step"):
    async def play():
        handle = await bench.open(f"{fault}@{at}")
        try:
            await handle.reset()
            return await handle.step(Action("x"))
        finally:
            await handle.close()

    return bench.run(play())


@pytest.mark.parametrize(
    "fault, at, kind, message",
    [
        (
            "raise",
            "step",
            "env_error",
            r"step: RuntimeError: the environment is broken \(envs.py:\d+ in _raise\)",
        ),
        ("raise", "reset", "env_error", r"reset: RuntimeError"),
        ("sys_exit", "step", "env_error", r"step: SystemExit: 3"),
        ("number", "step", "bad_observation", "returned int, no StepResult"),
        ("bytes", "step", "bad_observation", "its content is bytes; content must be str"),
        (
            "role",
            "step",
            "bad_observation",
            "role is 'developer'; use one of system, user, assistant, tool",
        ),
        ("nan_info", "step", "bad_observation", r"info\['x'\] is nan \(float\), no finite number"),
    ],
)
def test_an_error_ends_one_episode_and_not_the_worker(bench, fault, at, kind, message):
    pids, count = bench.pids, bench.pool.counts[kind]
    with pytest.raises(EnvError, match=message) as caught:
        step_of(bench, fault, at)
    assert (caught.value.kind, caught.value.charged_to) == (kind, "infra")
    assert "\n" not in caught.value.detail
    assert bench.pool.counts[kind] == count + 1
    assert bench.run(bench.play_good()) == [1.0, 0.0]
    assert bench.pids == pids and bench.pool.num_live == 0


def test_a_step_reward_is_a_number_or_none_or_nan_for_what_is_no_number(bench):
    assert step_of(bench, "none_reward").reward is None
    for fault in ("nan_reward", "text_reward", "huge_reward"):
        assert math.isnan(step_of(bench, fault).reward)


def test_what_an_environment_prints_goes_to_its_log(bench):
    assert step_of(bench, "print").messages[0].content == "you said x; say ant0"
    log = bench.pool.log_dir / "env_0.log"
    deadline_s = time.monotonic() + 10
    while b"no answer" not in log.read_bytes() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert b'{"i":0,"r":null}' in log.read_bytes()


def test_fifty_megabytes_are_cut_marked_and_counted_and_the_worker_gives_the_memory_back(bench):
    worker = psutil.Process(bench.pids[0])
    before = worker.memory_info().rss
    count = bench.pool.counts["truncated_observations"]
    result = step_of(bench, "huge_text")
    kept, marker = result.messages[0].content.split("\n")
    assert kept == "x" * MAX_OBS_BYTES
    assert marker == f"[cut: {50_000_000 - MAX_OBS_BYTES} of 50000000 bytes]"
    assert result.info["truncated_bytes"] == 50_000_000 - MAX_OBS_BYTES
    assert bench.pool.counts["truncated_observations"] == count + 1
    assert worker.memory_info().rss < before + 25e6


def test_odd_text_arrives_as_it_was_and_cannot_forge_the_scaffold(bench):
    assert step_of(bench, "surrogate").messages[0].content == "a\ud835b\x00"
    forged = step_of(bench, "forged").messages[0].content
    assert min(ByteTokenizer().encode(forged)) >= len(ByteTokenizer.SPECIALS)


def test_a_worker_sees_no_variable_of_the_driver_and_never_imports_jax(bench):
    names = step_of(bench, "environ").messages[0].content.split()
    ours = [
        "PYTHONPATH",
        "PYTHONHASHSEED",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
    ]
    assert "XLA_FLAGS" in os.environ and set(names) <= {*INHERITED, *ours}
    assert step_of(bench, "modules").messages[0].content == "numpy"


def living_in_group(group: int) -> list[int]:
    """Processes of a process group that still run (a killed orphan may wait for init to collect it)."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue  # it ended while we looked
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, kind, message",
    [
        ("exit", "env_died", "step of r/0/0/0: the process ended with exit code 3"),
        ("segfault", "env_died", "the process was killed by SIGSEGV"),
        ("fork", "env_died", "the process ended with exit code 3"),
        (
            "hang",
            "env_timeout",
            rf"step of r/0/0/0 took more than rollout.step_timeout_s={TIMEOUT_S}; it was at envs.py:\d+ in _hang",
        ),
        ("spin", "env_timeout", r"it was at envs.py:\d+ in _spin"),
    ],
)
def test_a_dead_or_hung_worker_is_replaced_and_blames_one_episode(bench, fault, kind, message):
    async def play():
        culprit, waiting, idle = (
            await bench.open(f"{fault}@step"),
            await bench.open("good"),
            await bench.open("good"),
        )
        for handle in (culprit, waiting, idle):
            await handle.reset()
        worker = psutil.Process(bench.pids[0])
        culprit_step = asyncio.create_task(culprit.step(Action("x")))
        await asyncio.sleep(0)
        waiting_step = asyncio.create_task(waiting.step(Action("x")))
        results = await asyncio.gather(culprit_step, waiting_step, return_exceptions=True)
        with pytest.raises(EnvError, match="ended in another call") as lost:
            await idle.step(Action("x"))
        await asyncio.gather(*(handle.close() for handle in (culprit, waiting, idle)))
        assert await bench.play_good() == [1.0, 0.0]
        return worker, results, lost.value

    restarts = bench.pool.counts["restarts"]
    worker, (culprit, waiting), idle = bench.run(play())
    assert isinstance(culprit, EnvError) and isinstance(waiting, EnvError)
    assert (culprit.kind, waiting.kind, idle.kind) == (kind, "env_lost", "env_lost")
    assert re.search(message, culprit.detail), culprit.detail
    assert bench.pool.counts["restarts"] == restarts + 1
    assert bench.pool.num_live == 0
    assert not worker.is_running() and not living_in_group(worker.pid)


@pytest.mark.slow
def test_a_hang_in_reset_has_its_own_deadline(bench):
    with pytest.raises(
        EnvError, match=f"reset of r/0/0/0 took more than rollout.reset_timeout_s={TIMEOUT_S}"
    ):
        step_of(bench, "hang", "reset")
    assert bench.run(bench.play_good()) == [1.0, 0.0]


def test_trouble_in_close_is_counted_and_not_raised(bench):
    count = bench.pool.counts["close_failed"]
    step_of(bench, "raise", "close")
    assert bench.pool.counts["close_failed"] == count + 1
    assert bench.pool.num_live == 0


def test_a_cancelled_call_does_not_disturb_the_next(bench):
    async def play():
        handle = await bench.open("good")
        await handle.reset()
        step = asyncio.create_task(handle.step(Action("x")))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        second = await handle.step(Action("ant0"))
        await handle.close()
        return second

    second = bench.run(play())
    assert (second.reward, second.done) == (1.0, True)


def test_scripts_solve_by_skill_and_their_errors_are_typed(bench):
    async def play(tag, skill):
        handle = await bench.open(tag)
        await handle.reset()
        try:
            return [(await handle.script(5, skill)).content for _ in range(2)]
        finally:
            await handle.close()

    assert bench.run(play("good", 1.0)) == ["ant0", "ant0"]
    assert bench.run(play("good", 0.0)) == ["no", "no"]
    tasks = bench.pool.list_tasks("raise@script", "train")
    rules = EpisodeRules.of(RolloutSettings(), context=256, turn_deadline_s=5.0)
    scripted = scripted_episodes(bench.pool, tasks, RENDERER, rules, ScriptPlan(1, 1.0, 0))
    said = "while asking the script for turn 0: script: RuntimeError"
    with pytest.raises(ScriptError, match=said):
        bench.run(scripted)


def test_a_closed_handle_says_so(bench):
    async def play():
        handle = await bench.open("good")
        await handle.close()
        await handle.close()
        await handle.step(Action("x"))

    with pytest.raises(EnvError, match="step of r/0/0/0: its environment is closed"):
        bench.run(play())


def test_open_waits_for_a_place_with_a_deadline():
    bench = Bench([GOOD], envs_per_worker=1)

    async def play():
        first = await bench.open("good")
        second = asyncio.create_task(bench.open("good", uid="r/0/0/1"))
        await asyncio.sleep(0)
        assert not second.done()
        await first.close()
        await (await second).close()
        await bench.open("good")
        bench.pool.open_limit = bench.pool.open_limit._replace(seconds=0.05)
        await bench.open("good", uid="r/0/0/2")

    try:
        with pytest.raises(
            EnvError, match=r"no place for r/0/0/2 .* 1 of 1 environments live"
        ) as caught:
            bench.run(play())
        assert caught.value.kind == "env_full"
    finally:
        bench.close()
    assert not psutil.pid_exists(bench.pids[0])


@pytest.mark.slow
def test_a_place_that_only_fails_uses_up_its_budget():
    bench = Bench([misbehaving("exit", "reset")], max_env_failures=1)

    async def play():
        for kind in ("env_died", "env_died", "env_budget"):
            with pytest.raises(EnvError) as caught:
                handle = await bench.open("exit@reset")
                await handle.reset()
            assert caught.value.kind == kind
        return caught.value

    error = bench.run(play())
    bench.close()
    assert "worker env_0 ended 2 times in a row (rollout.max_env_failures=1)" in error.detail
    assert bench.pool.failed.kind == "env_budget" and bench.pool.counts["restarts"] == 1


@pytest.mark.parametrize(
    "body, message",
    [
        ("raise OSError('no such lake')", r"OSError: no such lake \(broken_env.py:1 in <module>\)"),
        ("x = 1", "AttributeError: broken_env has no Env; use x"),
        ("import os; os._exit(9)", "the process ended with exit code 9"),
    ],
)
def test_an_environment_that_cannot_be_imported_is_told_with_its_own_error(
    tmp_path, monkeypatch, body, message
):
    (tmp_path / "broken_env.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    pool = EnvPool([GOOD, TaskSource("bad", "broken_env:Env")], RolloutSettings())
    start_s = time.monotonic()
    with pytest.raises(EnvError, match=message) as caught:
        pool.prepare()
    assert caught.value.kind == "env_import"
    assert time.monotonic() - start_s < 10
    assert not psutil.pid_exists(pool._workers["env_0"].pid)


def test_a_wrong_config_is_told_before_a_run_begins():
    pool = EnvPool([TaskSource("lake", "frozen_lake", config={"map_sise": 3})], RolloutSettings())
    with pytest.raises(
        EnvError, match=r"unknown config keys of FrozenLakeConfig: 'map_sise' \(use map_size\)"
    ):
        pool.prepare()


@pytest.mark.parametrize(
    "body, message",
    [
        ("return None", r"tasks\(\) returned NoneType, which has no len\(\) and \[i\]"),
        ("return []", "has 0 tasks with 0 distinct ids; it needs at least one task"),
        ("return [T('a'), T('b'), T('a')]", r"has 3 tasks with 2 distinct ids \(twice: 'a'\)"),
        (
            "return [T('a'), T('b', -1)]",
            r"tasks\(\)\[1\] max_turns is -1 \(int\); use an int of at",
        ),
        ("return [T('a'), 'b']", r"tasks\(\)\[1\] is 'b' \(str\), no rl_jax.types.Task"),
    ],
)
def test_tasks_that_cannot_be_played_are_told_by_their_place(tmp_path, monkeypatch, body, message):
    (tmp_path / "odd_env.py").write_text(
        "from rl_jax.types import Task\n"
        "def T(name, turns=1):\n    return Task(name, '', '', (), {}, 'env', turns)\n"
        "class Env:\n    reset = step = close = len\n"
        f"    @classmethod\n    def tasks(cls, cfg, split):\n        {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pool = EnvPool([TaskSource("odd", "odd_env:Env")], RolloutSettings())
    with pytest.raises(
        EnvError, match=f"tasks: split 'train' of 'odd_env:Env'.* ?{message}"
    ) as error:
        pool.prepare()
    assert error.value.kind == "bad_task" and "wire.py" not in str(error.value)


@pytest.mark.parametrize("splits", ["train", (), ("train", "train"), ("train", 3), None])
def test_splits_must_be_names(tmp_path, monkeypatch, splits):
    (tmp_path / "odd_env.py").write_text(
        f"class Env:\n    tasks = reset = step = close = len\n    splits = {splits!r}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pool = EnvPool([TaskSource("odd", "odd_env:Env")], RolloutSettings())
    with pytest.raises(EnvError, match="splits of Env is .*; use a tuple of names"):
        pool.prepare()


def test_names_and_tags_are_checked_without_a_process():
    with pytest.raises(
        ValueError,
        match="no environment 'frozen_lak'; use one of calculator, .*frozen_lake, ",
    ):
        EnvPool([TaskSource("a", "frozen_lak")], RolloutSettings())
    with pytest.raises(ValueError, match="no reward 'exact'; use one of .*exact_match"):
        EnvPool([TaskSource("a", "frozen_lake", "exact")], RolloutSettings())
    with pytest.raises(ValueError, match="has a tag twice: a, a"):
        EnvPool([TaskSource("a"), TaskSource("a")], RolloutSettings())
    with pytest.raises(
        ValueError, match="config of task source 'a' cannot go to a worker as JSON: .*; use plain"
    ):
        EnvPool([TaskSource("a", config={"map_seed": {1}})], RolloutSettings())


DRIVER = """
import asyncio, os, signal, sys
from rl_jax.rollout.worker import EnvPool
from rl_jax.settings import RolloutSettings, TaskSource
from rl_jax.types import Action
source = TaskSource("bad", "rl_jax.testing.envs:MisbehavingEnv", config={"fault": "FAULT"})
pool = EnvPool([source], RolloutSettings(step_timeout_s=1.0))
pool.prepare()
async def main():
    await pool.start()
    handle = await pool.open(pool.list_tasks("bad", "train")[0], "u", 0)
    await handle.reset()
    step = asyncio.create_task(handle.step(Action("x")))
    await asyncio.sleep(0.2)
    print(pool._workers["env_0"].pid, "jax" in sys.modules, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def assert_gone_after_driver(fault: str, within_s: float):
    done = subprocess.run(
        [sys.executable, "-c", DRIVER.replace("FAULT", fault)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    pid, has_jax = done.stdout.split()
    assert has_jax == "False", "the driver's side of the pool must not import jax either"
    deadline_s = time.monotonic() + within_s
    while psutil.pid_exists(int(pid)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(pid))


@pytest.mark.slow
def test_a_hung_worker_ends_with_a_killed_driver():
    assert_gone_after_driver("hang", within_s=10)


@pytest.mark.slow
def test_a_worker_that_never_gives_the_interpreter_back_ends_with_a_killed_driver():
    assert_gone_after_driver("spin", within_s=30)
