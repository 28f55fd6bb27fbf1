"""A run driven cell by cell: what it does between steps, when it is interrupted, and how it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import rl_jax
from rl_jax.config import ConfigError
from rl_jax.models import hf_files
from rl_jax.notebook.run import RunClosed
from rl_jax.resume import RunDirError, checkpoint_steps
from rl_jax.rollout.buffer import Interrupted
from rl_jax.rollout.traces import read_groups
from rl_jax.tools import steer

pytestmark = pytest.mark.slow(seconds=15)

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "job_config.py"
FOUR = {
    "rollout.group_size": 4
}  # rewards of a group of two may be equal, and then nothing is learned


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Four steps at most; tests of this module take them in the order of the file."""
    where = tmp_path_factory.mktemp("cells") / "run"

    async def cell():  # as in a notebook: a thread whose loop runs
        return rl_jax.run(CONFIG, FOUR, run_dir=where, steps=4)

    run = asyncio.run(cell())
    with run:
        yield run


def digests(directory):
    events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [e["digest"] for e in events if e["kind"] == "published"]


def status(run):
    return json.loads((run.path / "STATUS.json").read_text())["state"]


def test_steps_in_a_running_loop_are_shown_and_read_back(live):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    async def cell():
        return live.step(2)

    assert asyncio.run(cell()) is live and live.version == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    steps, values = live.metric("reward/mean")
    assert steps.tolist() == [1, 2] and values.dtype == np.float64
    assert len(live.episodes) == 16  # asking waits for what is being written
    groups = [t for g in read_groups(live.path / "rollouts/step_2/train") for t in g.trajectories]
    assert live.episodes[-1].trajectory.uid == groups[-1].uid
    assert live.episodes[-1].texts[0][0].startswith("<|bos|><|user|>even ")
    assert "span" in live.episodes[-1]._repr_html_() and len(live.eval_episodes) == 2
    shown = repr(live)
    assert "step        2 of 4" in shown and "open, 2 steps left" in shown and "eval even" in shown
    assert "2 of 4" in live._repr_html_() and "reward/mean" in repr(live.plot())
    assert repr(live.plan).startswith("mesh one_device")
    assert {row[0]: row[1:] for row in live.diff().rows}["steps"] == (4, 100)
    with pytest.raises(KeyError, match="did you mean reward/mean"):
        live.metric("reward/men")


def test_a_chat_goes_on_from_its_own_tokens_and_is_in_no_record(live):
    counts = live._driver.parts.ledger.counts()
    first = live.chat("hello", max_new_tokens=5)
    second = live.chat("and now", max_new_tokens=5)
    assert first.version == second.version == 2 and 1 <= len(first.turn.tokens) <= 5
    assert [m.role for m in live.chat.messages] == ["user", "assistant"] * 2
    renderer = live._job.renderer
    opening = renderer.first(live.chat.messages[:1])
    closed = renderer.is_closed(first.turn.tokens)
    bridge = renderer.next(live.chat.messages[2:3], closed=closed)
    parts = (opening, first.turn.tokens, bridge, second.turn.tokens)
    assert live.chat._context.tolist() == np.concatenate(parts).tolist()
    with pytest.raises(ValueError, match="begin another with new=True"):
        live.chat("x" * 200)
    again = live.chat("hello", new=True, max_new_tokens=5, temperature=0.0)
    same = live.chat("hello", new=True, max_new_tokens=5, temperature=0.0)
    assert again.text == same.text and len(live.chat.messages) == 2
    assert live._driver.parts.ledger.counts() == counts
    assert "version 2" in same._repr_html_() and "user: hello" in repr(live.chat)


def test_an_interrupt_while_it_waits_keeps_the_state_and_the_next_call_goes_on(live, monkeypatch):
    take, seen = live._driver.parts.buffer.take, []

    def slow(step, **given):
        """Nothing is there until somebody stops."""
        seen.append(step)
        if len(seen) == 1:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            until = time.monotonic() + 20
            while not given["should_stop"]():
                assert time.monotonic() < until, "nobody says that it shall stop"
                time.sleep(0.01)
            raise Interrupted
        return take(step, **given)

    monkeypatch.setattr(live._driver.parts.buffer, "take", slow)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(
        KeyboardInterrupt, match="before step 3; version 2 is kept, the next call goes on"
    ):
        live.step(2)
    assert signal.getsignal(signal.SIGINT) is handler and live._driver.is_between
    live.step()
    assert live.version == 3 and status(live) == "running"


def test_an_interrupt_within_an_update_is_heard_after_it(live, monkeypatch):
    update = live._driver.update

    def interrupted(step, batch):
        os.kill(os.getpid(), signal.SIGINT)
        return update(step, batch)

    monkeypatch.setattr(live._driver, "update", interrupted)
    before = len(live.metrics)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 4; version 4 is kept"):
        live.step()
    assert live.version == 4 and len(live.metrics) > before


def test_from_another_thread_and_one_call_at_a_time(live, monkeypatch):
    found, inside, go = [], threading.Event(), threading.Event()
    evaluate = live._driver.evaluate

    def waits(when):
        inside.set()
        go.wait(10)
        return evaluate(when)

    monkeypatch.setattr(live._driver, "evaluate", waits)
    thread = threading.Thread(target=lambda: found.append(live.evaluate()))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(RuntimeError, match="does something else already"):
        live.save()
    go.set()
    thread.join(30)
    assert list(found[0]) == ["even"] and 0 <= found[0]["even"] <= 1


def test_the_current_policy_is_exported_and_read_back(live, tmp_path):
    out = live.export(tmp_path / "out")
    assert hf_files.weight_files(out) and live.version in checkpoint_steps(live.path)


def test_after_the_last_step_it_answers_and_says_how_to_go_on(live):
    live.step()  # what is left of the end: the last evaluation, the save
    assert status(live) == "done" and (live.path / "summary.json").is_file()
    assert live.chat("still there?", new=True, max_new_tokens=3).version == 4
    with pytest.raises(ValueError, match=r"it is over at step 4 of steps=4.*steps=54"):
        live.step()
    assert "finished; its servers still answer" in repr(live)


def test_it_took_the_steps_that_launch_takes(live, tmp_path):
    """At staleness 0 they depend on the seed alone, whatever was done in between."""
    with rl_jax.run(CONFIG, FOUR, run_dir=tmp_path / "run", steps=4) as other:
        other.step(1)
        assert digests(other.path) == digests(live.path)[:2]
        closed = other
    assert checkpoint_steps(closed.path) == [1] and status(closed) == "interrupted"
    closed.close()
    assert len(closed.metrics) == len(rl_jax.open(closed.path).metrics) > 0
    for call in (closed.step, closed.evaluate, closed.save, lambda: closed.chat("x")):
        with pytest.raises(RunClosed, match="the run is closed"):
            call()


def test_a_cell_is_paused_interrupted_resumed_and_stopped_from_outside(tmp_path):
    with rl_jax.run(CONFIG, run_dir=tmp_path / "run", steps=4000) as run:
        say = lambda verb: steer.main([str(run.path), verb])

        def beside(act):
            """step() of this run with `act` on a thread beside it, which must be over soon; what act returned."""
            found = []
            thread = threading.Thread(target=lambda: found.append(act()))
            thread.start()
            try:
                run.step(3000)
            finally:
                thread.join(60)
                assert not thread.is_alive()
                told.extend(found)

        def pause():
            code, state = say("pause"), status(run)
            run.interrupt()
            return code, state

        def resume():
            code, version = say("resume"), run.version
            until = time.monotonic() + 60
            while run.version < version + 2 and time.monotonic() < until:
                time.sleep(0.01)
            return code, run.version >= version + 2, say("stop")

        told = []
        with pytest.raises(KeyboardInterrupt, match="stopped before step .* the next call goes on"):
            beside(pause)
        assert told == [(0, "paused")] and status(run) == "running" and run.version < 3000
        beside(resume)  # it is paused still
        assert told[1:] == [(0, True, 0)]
        assert status(run) == "done" and run.version in checkpoint_steps(run.path)
        assert sum("time/paused_s" in row for row in run.metrics) == 1
        with pytest.raises(ValueError, match=f"it is over at step {run.version} of steps=4000"):
            run.step()
    assert status(run) == "done"


def test_what_is_wrong_is_raised_and_nothing_is_left_open(tmp_path):
    with pytest.raises(ConfigError, match="learner.learning_rte is not a key"):
        rl_jax.run(CONFIG, {"learner.learning_rte": 1.0})
    with pytest.raises(RunDirError, match="holds no run"):
        rl_jax.open(tmp_path)
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="no_such_module"):
        changes = {
            "tasks.sources[0].reward": "no_such_module:X",
            "algorithm.name": "no_such_module:Y",
        }
        rl_jax.run(CONFIG, changes, run_dir=tmp_path / "run")
    assert threading.active_count() <= threads and not (tmp_path / "run").exists()


def test_python_ends_without_close_and_nothing_hangs(tmp_path):
    code = (
        "import rl_jax, sys; assert 'jax' not in sys.modules\n"
        f"run = rl_jax.run({str(CONFIG)!r}, run_dir={str(tmp_path / 'run')!r}); run.step()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    state = json.loads((tmp_path / "run" / "STATUS.json").read_text())
    assert state["state"] == "interrupted" and "before close()" in state["error"]
