"""rollout.partial_rollouts: what becomes of an episode in flight when weights are published."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from rl_jax.testing.fake_sampler import FakeSampler
from tests.rollout.doubles import SETTINGS, echo_script, running


@pytest.mark.parametrize("is_partial", [True, False])
def test_episode_in_flight_at_a_publication_goes_on_or_begins_anew(tmp_path, is_partial):
    """Group 0 is trained; group 1, whose first turns are over, is in its second ones when version 1 comes."""
    settings = replace(
        SETTINGS, batch_groups=1, max_staleness=1, partial_rollouts=is_partial, max_attempts=1
    )
    gate, held = threading.Event(), set()

    async def sleep(is_held):
        while is_held and not gate.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)

    def latency(request):
        if "/0/1/" in request.uid and request.turn == 1:
            held.add(request.uid)
        return request.uid in held and request.turn == 1

    sampler = FakeSampler(script=echo_script, sleep=sleep, latency=latency)
    with running(tmp_path, settings=settings, sampler=sampler) as world:
        world.publish(0)
        world.rollout.want(1, 1, last_step=2)  # no third group
        groups = world.buffer.take(1)
        while len(held) < 2:
            time.sleep(0.001)
        world.rollout.consumed(1, groups)
        world.publish(1)
        world.rollout.check()  # the loop has seen it
        gate.set()
        world.rollout.want(2, 1, last_step=2)
        groups = world.buffer.take(2)
        ends = {(r["uid"], r["attempt"]): r["reason"] for r in world.records()}
    members = [t for g in groups for t in g.trajectories]
    versions = [sorted(set(t.versions[t.loss_mask].tolist())) for t in members]
    assert [t.attempt for t in members] == ([0, 0] if is_partial else [1, 1])
    assert versions == ([[0, 1]] * 2 if is_partial else [[1]] * 2)
    assert (ends["r/0/1/0", 0] == "new_weights") is not is_partial
