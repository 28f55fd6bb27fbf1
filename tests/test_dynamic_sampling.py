"""Dynamic sampling through whole jobs: exact batches, a resume that changes nothing, and a clear end."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from rl_jax.checkpoint import Checkpointer
from rl_jax.config import parse
from rl_jax.driver import Driver, DriverState
from rl_jax.exit_codes import exit_code
from rl_jax.guards import GuardTripped
from rl_jax.rollout.selection import SelectionExhausted
from rl_jax.rollout.traces import read_groups
from rl_jax.settings import Settings
from tests.test_driver import CONFIG, Reference, rows, run_job


@pytest.fixture(scope="session")
def picky(tmp_path_factory):
    """(a straight run with dynamic sampling, the same run stopped after a step and resumed)."""
    words = ["--config.algorithm.filter.equal_rewards=true"]
    words += [f"--config.algorithm.entropy.{w}" for w in ("target=5.0", "delta=0.02")]
    words += ["--config.guards.lag0_above=1e-12"]  # below any rounding: it trips
    words += [f"--config.rollout.{w}" for w in ("top_p=0.8", "top_k=24", "temperature=0.7")]
    root = tmp_path_factory.mktemp("picky")
    run_job(root / "resumed", *words, "--config.steps=1")
    words += ["--config.steps=2"]
    return run_job(root / "straight", *words), run_job(root / "resumed", *words)


@pytest.mark.slow
def test_a_resumed_run_ends_where_a_straight_one_does(picky):
    """With groups that are filtered and replaced before and after the checkpoint."""
    reference = Reference(parse([CONFIG]).settings).learner
    states = [
        Checkpointer(d, parse([CONFIG]).settings.checkpoint).restore(2, reference.abstract_state())[
            0
        ]
        for d in picky
    ]
    for name in states[0].params:
        np.testing.assert_array_equal(states[0].params[name], states[1].params[name], err_msg=name)
    assert [row["step"] for row in rows(picky[1])] == [1, 2]
    for (
        directory
    ) in picky:  # the entropy is below its target: the coefficient grew, and is in the checkpoint
        assert [row["policy/entropy_coef"] for row in rows(directory)] == pytest.approx([0, 0.02])


@pytest.mark.slow
def test_trainer_and_sampler_agree_where_sampling_was_cut(picky):
    """L7: temperature 0.7, top-p 0.8 of 24 ids; the trainer's distribution is over the ids that were left."""
    first = rows(picky[0])[0]
    assert first["policy/ratio"] == pytest.approx(1.0, abs=1e-3)
    assert first["mismatch/abs_max"] < 1e-3
    (group, *_) = read_groups(picky[0] / "rollouts/step_1/train")
    member = group.trajectories[0]
    sizes = (member.support[member.loss_mask] >= 0).sum(axis=1)
    assert sizes.max() <= 24 and sizes.min() >= 1 and len(set(sizes.tolist())) > 1
    full = np.concatenate([turn.logprobs for turn in member.turns])
    assert (member.logprobs[member.loss_mask] > full + 0.1).any(), "nothing was cut"


@pytest.mark.slow
def test_dynamic_sampling_trains_whole_batches_of_groups_that_differ(picky):
    fates = []
    for directory in picky:
        ledger = [
            json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()
        ]
        own = [r for r in ledger if r["state"] in ("TRAINED", "DROPPED")]
        fates.append({(r["uid"].partition("/")[2], r["state"], r["reason"]) for r in own})
        for step in (1, 2):
            groups = read_groups(directory / f"rollouts/step_{step}/train")
            assert len(groups) == 2 and all(len(g.trajectories) == 2 for g in groups)
            assert all(len({t.reward.value for t in g.trajectories}) == 2 for g in groups)
    straight, resumed = (
        {fate for fate in of if fate[2] in (None, "filtered: equal_rewards")} for of in fates
    )
    assert straight == resumed and any(reason for _, _, reason in straight)
    (row,) = [row for row in rows(picky[0]) if row["step"] == 2]
    num = row["episodes/dropped_filtered.equal_rewards"]
    assert num == sum(reason is not None for _, _, reason in straight)
    assert row["reward/success"] == 0.5 != row["reward/success_all"]
    assert row["filter/batches"] >= 1 and 0 < row["filter/kept"] <= 1


@pytest.mark.slow
def test_an_alarm_is_in_every_row_and_once_in_the_events(picky):
    assert [row["alarm/lag0"] for row in rows(picky[0])] == [1, 1]
    events = map(json.loads, (picky[0] / "events.jsonl").read_text().splitlines())
    alarms = {event["name"]: event for event in events if event["kind"] == "alarm"}
    assert set(alarms) == {"lag0", "truncated"}  # turns of 3 tokens are all cut
    alarm = alarms["lag0"]
    assert alarm["step"] == 1 and "same weights" in alarm["text"]
    log = (picky[0] / "logs/latest/driver.log").read_text()
    assert log.count("ALARM lag0: mismatch/abs_mean_lag0_pure=") == 1


@pytest.mark.parametrize("error", [SelectionExhausted, GuardTripped])
def test_run_that_its_task_or_a_guard_ends_has_its_weights_saved(error):
    saved = []
    parts = SimpleNamespace(
        learner=SimpleNamespace(state=None), rollout=None, ledger=None, stream=None,
        checkpointer=SimpleNamespace(save=lambda *what: saved.append(what[0]), wait=lambda: None),
        recorder=SimpleNamespace(
            event=lambda kind, **fields: None, flush=lambda: None, doing=lambda what: nullcontext(),
            profiled=lambda step: nullcontext(),
        ),
    )  # fmt: skip

    def take(step):
        raise error("solved")

    with pytest.raises(error, match="solved"):
        Driver(parts, Settings(), DriverState(version=7))._or_stop(8, take)
    assert saved == [7] and exit_code(error("x")) == 6
