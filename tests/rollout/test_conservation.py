"""L27, E1-E5: nothing is lost or counted twice while everything fails at random, and malformed turns are kept apart."""

import json
import random
import time
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.ledger import NEXT
from rl_jax.rollout.worker import EnvError
from rl_jax.settings import EvalSettings
from rl_jax.testing.envs import EchoEnv
from rl_jax.testing.fake_pool import FakePool
from rl_jax.testing.fake_sampler import FakeSampler
from rl_jax.types import TurnError
from tests.rollout.doubles import SETTINGS, echo_script, echo_tasks, running


def chaos(seed, charged_to=("infra", "policy")):
    """A pool and a sampler that fail, abort and dawdle at random."""
    rng = random.Random(seed)

    def fail_env(verb, uid):
        if rng.random() < 0.04:
            return EnvError(
                rng.choice(["env_timeout", "env_died", "env_lost"]),
                "chaos",
                rng.choice(charged_to),
            )

    def fail_turn(request):
        if rng.random() < 0.05:
            return TurnError("queue_full", "fake", "chaos", retryable=rng.random() < 0.7)

    def interrupt(request, num_tokens):
        if rng.random() < 0.1:
            sampler.abort(request.uid, "chaos")

    dawdle = lambda *args: rng.choice([0.0, 0.0, 0.002])
    sampler = FakeSampler(
        script=echo_script,
        slots={"": 7},
        fail=fail_turn,
        on_block=interrupt,
        latency=dawdle,
        block=2,
    )
    return FakePool({"echo": EchoEnv}, fail=fail_env, latency=dawdle), sampler


def picky(groups):
    """Dynamic sampling at random, the same for the same group: every third group goes, and a member of every fifth."""
    kept, dropped = [], []
    for group in groups:
        draw = random.Random(group.uid).randrange(15)
        members = list(group.trajectories)
        if draw % 3 == 0:
            dropped.append((group.uid, "equal_rewards"))
            continue
        if draw % 5 == 1:
            dropped.append((members[0].uid, "best_of"))
            members[0] = replace(members[0], loss_mask=np.zeros_like(members[0].loss_mask))
        kept.append(replace(group, trajectories=tuple(members)))
    return kept, dropped


SELECTORS = {0: picky, 2: picky, 3: picky}  # seed -> select
MORE = {
    3: {"partial_rollouts": False},
    6: {"extra_groups": 2, "extra_members": 1, "env_stepping": "batch"},
}  # seed -> settings


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed, staleness, age_of, stale",
    [
        (0, 0, "oldest", "drop"),
        (1, 1, "oldest", "drop"),
        (2, 1, "start", "drop"),
        (3, 3, "oldest", "drop"),
        (4, 1, "oldest", "replace"),
        (5, 1, "start", "survivors"),
        (6, 1, "oldest", "drop"),
    ],
)
def test_every_attempt_ends_in_exactly_one_state_under_random_faults(
    tmp_path, seed, staleness, age_of, stale
):
    bound = {"max_staleness": staleness, "age_of": age_of, "short_group_stale": stale}
    bound |= {**MORE.get(seed, {}), "max_env_failures": 10**6}
    settings = replace(SETTINGS, group_size=3, **bound, batch_groups=4)
    tasks = {"a": echo_tasks("a", 3), "b": echo_tasks("b", 5, turns=3)}
    # Who fails by its own fault is never replaced.
    pool, sampler = chaos(seed, ("infra",) if stale == "replace" else ("infra", "policy"))
    late = 1 if stale == "drop" else 3  # versions a step: two are published that nobody trains on
    trained, sizes = [], set()
    with running(tmp_path, settings=settings, tasks=tasks, pool=pool, sampler=sampler) as world:
        world.publish(0)
        for step in range(1, 6 * late + 1, late):
            for version in range(step - late + 1, step):
                time.sleep(0.01)
                world.publish(max(version, 0))
            groups = world.step(step, SELECTORS.get(seed))  # checks the law
            assert Counter(g.tag for g in groups) == {"a": 2, "b": 2}
            mine = [t for g in groups for t in g.trajectories if t.num_trained]
            assert all(step - 1 - t.oldest_version <= staleness for t in mine)
            trained += mine
            sizes |= {len(g.trajectories) for g in groups}
            if age_of == "start":
                starts = [t.start_version for g in groups for t in g.trajectories]
                assert step - 1 - min(starts) <= staleness
        world.rollout.evaluate("eval", echo_tasks("a", 4), EvalSettings())
        world.rollout.check()
        world.rollout.drain()
        records = world.records()
        counts = world.rollout.counts()
    assert world.pool.num_live == 0 and sampler.live == ()
    history = defaultdict(list)
    for record in records:
        history[record["uid"], record["attempt"]].append(record["state"])
    for states in history.values():
        assert states[0] == "ISSUED" and not NEXT[states[-1]]
        assert all(after in NEXT[before] for before, after in zip(states, states[1:]))
    assert [r["seq"] for r in records] == list(range(len(records)))
    ends = Counter(states[-1] for states in history.values())
    assert ends["TRAINED"] == len(trained) == len({t.uid for t in trained})
    assert sum(ends.values()) == counts["episodes/issued"]
    assert counts["episodes/errored"] == ends["ERRORED"] > 0
    stales = Counter(r["state"] for r in records if r["reason"] == "stale")
    assert counts["episodes/dropped_stale"] == stales["DROPPED"]
    assert late == 1 or stales["DROPPED"] > 0
    assert stale != "replace" or sizes == {settings.group_size}
    by_reason = Counter(r["reason"] for r in records if r["state"] == "DROPPED")
    filtered = {r: n for r, n in by_reason.items() if r.startswith("filtered")}
    assert set(filtered) == (
        {"filtered: equal_rewards", "filtered: best_of"} if seed in SELECTORS else set()
    )
    assert counts["episodes/dropped_filtered"] == sum(filtered.values())
    for reason, num in filtered.items():
        assert counts[f"episodes/dropped_filtered.{reason.partition(': ')[2]}"] == num
    recorded = {r["uid"]: r["sha256"] for r in records if r["state"] == "TRAINED"}
    assert set(recorded) == {t.uid for t in trained} and all(recorded.values())
    # E4: the members of every group that was issued are all accounted for, attempt by attempt.
    members = defaultdict(set)
    for uid, _ in history:
        group, _, sample = uid.rpartition("/")
        if "eval" not in uid:
            members[group].add(int(sample))
    assert all(samples <= {0, 1, 2, 3} for samples in members.values())
    assert seed == 6 or not any(3 in samples for samples in members.values())


def test_malformed_turn_is_quarantined_and_its_member_issued_again(tmp_path):
    class Malformed(FakeSampler):
        async def generate(self, request):
            turn = await super().generate(request)
            if request.uid == "r/0/0/1" and request.attempt == 0 and request.turn == 1:
                return replace(turn, logprobs=np.full(len(turn.tokens), np.nan, np.float32))
            return turn

    sampler = Malformed(script=echo_script)
    with running(tmp_path, sampler=sampler, quarantine_dir=tmp_path / "quarantine") as world:
        world.publish(0)
        groups = world.step(1)
        assert [t.attempt for g in groups for t in g.trajectories] == [0, 1, 0, 0]
        assert world.rollout.counts()["episodes/errored.rollout_schema"] == 1
        path = tmp_path / "quarantine" / "r_0_0_1#0.json"
        deadline_s = time.monotonic() + 5
        while not path.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    record = json.loads(path.read_text())
    assert record["uid"] == "r/0/0/1" and "logprobs that are not finite" in record["detail"]
    assert len(record["turns"]) == 1
