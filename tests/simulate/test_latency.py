"""Batches against trajectories, and redundancy, on a virtual clock: small forms of benchmarks/rollout.py."""

from dataclasses import replace

import numpy as np
import pytest

from rl_jax.simulate.latency import BATCHED, NEEDED, PACED, TRAJECTORIES, play, turns_of
from rl_jax.simulate.rollout import LOOK_S
from rl_jax.simulate.workload import Constant, TaskShape

FEW = replace(TRAJECTORIES, batch_groups=4, group_size=4)


def test_a_batched_turn_takes_as_long_as_its_slowest_environment():
    drawn = []

    def latency(rng):
        drawn.append(float(rng.uniform(1.0, 20.0)))
        return drawn[-1]

    shape = TaskShape("drawn", Constant(5), Constant(8), Constant(4), step_s=latency)
    played = play(shape, replace(FEW, **BATCHED), turn_s=3.0)
    rounds = np.reshape(drawn, (5, 16))  # all of a turn before any of the next
    expected_s = (3.0 + rounds.max(1)).sum()
    assert expected_s <= played.step_s[0] < expected_s + LOOK_S
    del drawn[:]
    assert play(shape, FEW, turn_s=3.0).step_s[0] < expected_s - 5


@pytest.mark.slow(seconds=1)
def test_trajectories_gain_more_over_batches_the_more_latencies_vary():
    ratios = []
    for sigma in (1, 5, 10):
        batch, trajectory = (play(turns_of(sigma), s) for s in (replace(FEW, **BATCHED), FEW))
        ratios.append(batch.step_s[0] / trajectory.step_s[0])
    assert ratios == sorted(ratios) and ratios[0] >= 1.05 and ratios[-1] >= 1.5
    # Groups that start together, and then go on by themselves, are no slower: there is one batch.
    together = play(turns_of(5), replace(FEW, scheduler="batch"))
    assert together.step_s == play(turns_of(5), FEW).step_s


@pytest.mark.slow(seconds=2)
def test_redundant_groups_and_members_shorten_a_step_and_leave_nothing_running():
    needed = replace(NEEDED, batch_groups=8, group_size=4)
    plain, groups, members, both = (
        play(PACED, replace(needed, extra_groups=g, extra_members=m), num_steps=3, turn_s=0.0)
        for g, m in ((0, 0), (2, 0), (0, 2), (2, 2))
    )
    for played in (plain, groups, members, both):
        assert played.sizes == {4: 24} and played.live == 0 and played.ledger["TRAINED"] == 96
    assert sum(both.step_s) < min(sum(groups.step_s), sum(members.step_s))
    assert sum(plain.step_s) > 1.15 * sum(both.step_s)
    ends = both.ledger["CANCELLED"] + both.ledger["DROPPED"]
    assert both.redundant["redundant/episodes"].sum == ends == 3 * (10 * 6 - 8 * 4)
    assert plain.redundant == {}
