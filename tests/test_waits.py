"""waits.py: what lasts long is named once, again at twice its age, and when it is over; S6, one test a kind of hang."""

import io
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.checkpoint import Checkpointer, CheckpointError
from rl_jax.cluster import Watched
from rl_jax.data.rows import DataError
from rl_jax.data.stream import ExampleStream
from rl_jax.ledger import Ledger
from rl_jax.mesh import make_mesh, named_sharding
from rl_jax.metrics import MetricsWriter
from rl_jax.progress import Progress
from rl_jax.recorder import Recorder
from rl_jax.rollout.buffer import TakeTimeout
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.rollout.worker import EnvError
from rl_jax.settings import (
    CheckpointSettings,
    DataSettings,
    MetricsSettings,
    RewardSettings,
    TaskSource,
    WeightSettings,
)
from rl_jax.testing.trajectories import fake_group
from rl_jax.types import Action, Digest, EpisodeView
from rl_jax.waits import MOST, Wait, Watchdog, stack_head
from rl_jax.weights.plan import SyncPlan
from rl_jax.weights.sync import WeightSync
from tests.rollout.bench import Bench
from tests.rollout.doubles import SETTINGS, running
from tests.test_recorder import some_group

HEARTBEAT_S = 0.6  # scaled: a run's is 30 s, and a hang is to be named within it


def test_wait_is_named_when_it_is_old_again_at_twice_its_age_and_at_its_end():
    dog, wait = Watchdog(20.0), Wait("reset of u in env_0", 100.0, "rollout.reset_timeout_s=600")
    look = lambda now_s, *waits: dog.look(waits, now_s)
    assert look(119.0, wait) == []
    told = "reset of u in env_0 for {} s (at most rollout.reset_timeout_s=600)"
    assert look(121.0, wait) == [f"long wait: {told.format('21.0')}"]
    assert look(141.0, wait) == []
    assert look(142.0, wait._replace(where="half way")) == [
        "long wait: reset of u in env_0 for 42.0 s, half way (at most rollout.reset_timeout_s=600)"
    ]
    assert look(150.0) == ["it is over: reset of u in env_0 for 50.0 s"] and look(151.0) == []
    again = wait._replace(since_s=140.0)  # the same words, another call
    assert look(159.0, again) == [] and len(look(160.0, again)) == 1


def test_many_waits_are_a_few_lines_with_the_oldest_first():
    waits = [Wait(f"w{i}", float(-i)) for i in range(12)]
    lines = Watchdog(1.0).look(waits, 5.0)
    assert len(lines) == MOST and lines[0] == "long wait: w11 for 16.0 s"
    assert lines[-1] == "long wait: w7 for 12.0 s, and 7 more"


def test_stack_head_is_the_line_of_ours():
    release, here = threading.Event(), threading.Event()

    def stuck():
        here.set()
        release.wait(10)

    thread = threading.Thread(target=stuck)
    thread.start()
    here.wait(10)
    try:
        assert stack_head(thread.ident).startswith("test_waits.py:") and "in stuck" in (
            stack_head(thread.ident)
        )
    finally:
        release.set()
        thread.join()
    assert stack_head(thread.ident) == "its end"


class Console:
    """A run's console with a quick heartbeat, and a step's line now and then: others do not feel the hang."""

    def __init__(self, *sources):
        self.out = io.StringIO()
        self.progress = Progress(9, "plain", HEARTBEAT_S, self.out)
        self.progress.start_heartbeat(lambda: "a batch", sources)

    def __enter__(self):
        self.start_s = time.monotonic()
        return self

    def __exit__(self, *_):
        self.progress.close()

    def sees(self, *words, within_s=HEARTBEAT_S):
        """A line with all of the words comes in time. Slack: a starved machine's."""
        while True:
            self.progress.note("a step of others")
            for line in self.out.getvalue().splitlines():
                if all(word in line for word in words):
                    return line
            late_s = time.monotonic() - self.start_s - within_s
            assert late_s < 5.0, f"not told: {words}\n{self.out.getvalue()}"
            time.sleep(0.05)


@pytest.mark.slow(seconds=8)
def test_hung_environment_and_hung_scorer_are_named_and_their_workers_replaced():
    env = TaskSource(
        "bad", "rl_jax.testing.envs:MisbehavingEnv", "rl_jax.testing.envs:MisbehavingScorer",
        config={"fault": "hang"},
    )  # fmt: skip
    bench = Bench([env], rewards=RewardSettings(timeout_s=2.0), step_timeout_s=2.0)
    pool, task = bench.pool, bench.pool.list_tasks("bad", "train")[0]
    hang = task.payload | {"answer": "hang"}

    async def step():
        handle = await bench.open("bad", uid="r/0/3/1")
        await handle.reset()
        await handle.step(Action("x"))

    async def score():
        asked = type(task)(**{**vars(task), "payload": hang})
        return await pool.score(env.reward, asked, EpisodeView((), ("x",), {}, ()))

    try:
        with Console(pool.waits) as console:
            hung = threading.Thread(target=lambda: pytest.raises(EnvError, bench.run, step()))
            hung.start()
            line = console.sees("long wait: step of r/0/3/1 in env_0 for")
            assert "at most rollout.step_timeout_s=2" in line
            console.sees("it is over: step of r/0/3/1 in env_0 for", within_s=4)
            hung.join(20)
        with Console(pool.waits) as console:
            hung = threading.Thread(target=lambda: bench.run(score()))
            hung.start()
            line = console.sees(f"long wait: score of {task.id} in reward_0 for")
            assert "at most rewards.timeout_s=2" in line
            console.sees("it is over: score of", within_s=4)
            hung.join(20)
        assert pool.counts["restarts"] == 2
    finally:
        bench.close()


def test_hung_rollout_loop_is_named_with_the_line_that_holds_it(tmp_path):
    release = threading.Event()

    class Stuck(TrajectoryScheduler):
        def decide(self, state, view, event):
            if view.step == 1:
                release.wait(30)
            return super().decide(state, view, event)

    settings = SETTINGS.__class__(**{**vars(SETTINGS), "take_timeout_s": 0.6})
    with running(tmp_path, settings=settings, policy=Stuck(), still_s=0.2) as world:
        world.publish(0)
        with Console(world.rollout.waits) as console:
            world.rollout.want(1, 2)
            line = console.sees("long wait: the rollout's loop stands still for")
            assert "at test_waits.py:" in line and "in decide" in line, line
            with pytest.raises(TakeTimeout, match="loop stands still .* at test_waits.py:"):
                world.buffer.take(1)
            release.set()
            console.sees("it is over: the rollout's loop", within_s=5)


@pytest.mark.slow(seconds=3)
def test_server_that_hangs_in_a_sync_is_named_with_the_call():
    mesh = make_mesh({}, jax.devices()[:1])
    place = named_sharding((), {}, mesh)
    release = threading.Event()

    def server(name, digest):
        same = {"mesh": mesh, "param_shardings": {"offset": place}, "name": name, "kind": "decode"}
        quick = dict.fromkeys(("stage", "discard", "fence", "commit"), lambda *args: None)
        return SimpleNamespace(**same, **quick, digest=digest)

    def hangs(sync_id):
        release.wait(20)
        return Digest({})

    settings = WeightSettings(deadline_s=1.5)
    targets = [Watched(server(f"decode.{i}", hangs), settings.deadline_s) for i in range(2)]
    plan = SyncPlan.build(
        {"offset": jax.ShapeDtypeStruct((), np.int32)}, {"offset": ()}, mesh, {"offset": place},
        targets, "float32", settings,
    )  # fmt: skip
    sync, results = WeightSync(plan, targets, settings), []
    params = {"offset": jax.device_put(jnp.array(1, jnp.int32), place)}
    waits = lambda: [target.under_way for target in targets if target.under_way]
    try:
        with Console(waits) as console:
            syncing = threading.Thread(target=lambda: results.append(sync.publish(params, 1)))
            syncing.start()
            for name in ("decode.0", "decode.1"):
                line = console.sees(f"long wait: {name} in the digest of sync v1.1", within_s=2)
                assert "at most weights.deadline_s=1.5" in line
            syncing.join(20)
            assert results[0].state == "ABORTED"
            release.set()
            console.sees("it is over: decode.0", within_s=5)
    finally:
        release.set()
        sync.close()


def test_hung_checkpoint_writer_is_named_with_how_far_it_came_and_ends_the_wait(tmp_path):
    release = threading.Event()

    class Stuck(Checkpointer):
        def _commit(self, step, temporary):
            release.wait(30)
            super()._commit(step, temporary)

    checkpointer = Stuck(tmp_path, CheckpointSettings(deadline_s=1.5))
    with Console(checkpointer.waits) as console:
        checkpointer.save(3, {"x": jnp.ones(3)}, {})
        line = console.sees("long wait: the save of step 3 into", "it gets its name", within_s=3)
        assert "at most checkpoint.deadline_s=1.5" in line
        with pytest.raises(
            CheckpointError, match=r"not done after 1.5 s \(checkpoint.deadline_s\)"
        ):
            checkpointer.wait()
        release.set()
        console.sees("it is over: the save of step 3", within_s=5)


class StuckRows(list):
    """Rows of which one is never there."""

    def __init__(self, rows, stuck):
        super().__init__(rows)
        self.stuck, self.release = stuck, threading.Event()

    def __getitem__(self, i):
        if i == self.stuck:
            self.release.wait(30)
        return super().__getitem__(i)


def test_hung_data_loader_is_named_and_ends_the_run(tmp_path):
    rows = StuckRows([fake_group(i, [None], [8]) for i in range(64)], 40)
    stream = ExampleStream(
        rows, "d", DataSettings(batch_rows=4, shuffle=False, deadline_s=1.5), seed=0
    )
    for _ in range(9):
        stream.next()
    with Console(stream.waits) as console:
        errors = []

        def read():
            try:
                stream.next(), stream.next()
            except DataError as error:
                errors.append(str(error))

        reading = threading.Thread(target=read)
        reading.start()
        line = console.sees("long wait: batch 11 of rows for")
        assert "at most data.deadline_s=1.5" in line
        reading.join(20)
    assert errors == [
        "batch 11 of rows did not come within data.deadline_s=1.5; is the file system of data.path stuck?"
    ]
    start_s = time.monotonic()
    stream.close()  # does not wait for what is stuck
    assert time.monotonic() - start_s < 1
    rows.release.set()


def test_hung_writer_of_traces_and_of_the_ledger_are_named(tmp_path):
    release = threading.Event()

    class Stuck(Ledger):
        def _flush(self):
            release.wait(30)
            super()._flush()

    def render(tokens):
        release.wait(30)
        return ""

    ledger = Stuck(tmp_path / "ledger.jsonl", "r")
    run_dir = SimpleNamespace(
        path=tmp_path, status=lambda *a, **k: None, rollouts=lambda s, k: tmp_path / "traces"
    )
    quiet = Progress(2, "none")
    recorder = Recorder(
        run_dir, MetricsWriter(tmp_path, 0), quiet, MetricsSettings(rollouts_every=1), render
    )
    with Console(ledger.waits, recorder.waits) as console:
        threading.Thread(target=ledger.flush).start()
        recorder.step(4, [some_group()], {}, {})
        console.sees("long wait:", "ledger.jsonl to be on disk for")
        console.sees(f"long wait: the traces of step 4 for {tmp_path}/traces for")
        release.set()
        console.sees("it is over: the traces", within_s=5)
    recorder.close()
    ledger.close()
