"""A11: environments that fail, hang and raise at random cost attempts, never a group, a place or the run."""

import threading
import time
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from rl_jax.ledger import NEXT
from rl_jax.rollout.worker import EnvPool
from rl_jax.settings import TaskSource
from tests.rollout.doubles import SETTINGS, running

RESET, STEP, HANG = 0.05, 0.01, 0.01
STEP_S = 1.0  # rollout.step_timeout_s
STEPS = 20


class Watched:
    """The longest that any worker worked at one call, seen from another thread."""

    def __init__(self, pool):
        self.longest_s, self._pool = 0.0, pool
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._closing.set()
        self._thread.join(5)

    def _run(self):
        while not self._closing.wait(0.02):
            now_s = time.monotonic()
            ages = [now_s - wait.since_s for wait in self._pool.waits()]
            self.longest_s = max([self.longest_s, *ages])


@pytest.mark.slow(seconds=10)
def test_run_goes_on_when_environments_fail_to_reset_hang_and_raise(tmp_path):
    flaky = TaskSource(
        "flaky", "rl_jax.testing.envs:FlakyEnv",
        config={"draws": str(tmp_path / "draws"), "reset": RESET, "step": STEP, "hang": HANG},
    )  # fmt: skip
    settings = replace(
        SETTINGS, batch_groups=4, group_size=4, env_workers=3, envs_per_worker=8, max_staleness=1,
        step_timeout_s=STEP_S, reset_timeout_s=STEP_S, max_env_failures=64,
    )  # fmt: skip
    pool = EnvPool([flaky], settings)
    pool.prepare()
    tasks = {"flaky": pool.list_tasks("flaky", "train")}
    trained = []
    with (
        running(tmp_path, settings=settings, tasks=tasks, pool=pool) as world,
        Watched(pool) as seen,
    ):
        world.publish(0)
        for step in range(1, STEPS + 1):
            groups = world.step(step)  # the ledger's law is checked in each
            assert [len(g.trajectories) for g in groups] == [settings.group_size] * 4
            trained += [t for g in groups for t in g.trajectories]
        world.rollout.drain()
        counts, records = world.rollout.counts(), world.records()
        deadline_s = time.monotonic() + 20
        while sum(w.is_usable for w in pool._workers.values()) < 3:
            assert time.monotonic() < deadline_s, "a worker was not replaced"
            time.sleep(0.01)
    num_calls = (tmp_path / "draws").stat().st_size
    faults = {name: counts[f"episodes/errored.{name}"] for name in ("env_error", "env_timeout")}
    assert faults["env_timeout"] >= 1 and faults["env_error"] >= 0.01 * num_calls, (
        faults,
        num_calls,
    )
    assert counts["envs/restarts"] >= faults["env_timeout"]
    assert seen.longest_s < STEP_S + 10
    assert len(trained) == len({t.uid for t in trained}) == STEPS * 16
    assert all(t.reward.status == "scored" for t in trained), "no failure is a zero"
    history = defaultdict(list)
    for record in records:
        history[record["uid"], record["attempt"]].append(record)
    ends = Counter(states[-1]["state"] for states in history.values())
    assert not any(NEXT[state] for state in ends)
    assert sum(ends.values()) == counts["episodes/issued"] and ends["TRAINED"] == len(trained)
    # Who failed was played again, unless its group had used up its attempts, or the run was over.
    replaced = 0
    for (uid, attempt), states in history.items():
        if states[-1]["state"] == "ERRORED":
            group = uid.rpartition("/")[0]
            said = [r["reason"] for r in records if r["uid"].startswith(group + "/")]
            gone = {reason.split(":")[0] for reason in said if reason}
            replaced += (uid, attempt + 1) in history
            assert (uid, attempt + 1) in history or gone & {"short", "run_end"}, (uid, attempt)
    assert replaced > ends["ERRORED"] / 2 and counts["episodes/retried"] == replaced
    assert pool.num_live == 0 and pool.failed is None
