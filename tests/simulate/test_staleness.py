"""The staleness bound while it changes: no batch is older than it, whatever else happens; and who chooses it."""

import random
from collections import Counter

import pytest

from rl_jax.algorithms.staleness import oldest_counted
from rl_jax.mesh import MeshPlan
from rl_jax.settings import (
    EngineSettings,
    MeshSettings,
    PoolSettings,
    RolloutSettings,
    ServeSettings,
)
from rl_jax.simulate import clock
from rl_jax.simulate.costs import H800, QWEN3_8B
from rl_jax.simulate.rollout import SimulatedRollout, sleeping
from rl_jax.simulate.servers import Servers
from rl_jax.simulate.staleness import Played, Step, lags
from rl_jax.simulate.workload import Lognormal, TaskShape, Uniform

PLAN = MeshPlan.from_settings(
    MeshSettings(
        pools=(PoolSettings("a", "decode", hardware=H800.name), PoolSettings("train", "train"))
    )
)
ENGINE = EngineSettings(
    slots=32, context=4096, page_size=512, steps_per_block=16, chunk_sizes=(512, 2048), chunk_requests=8
)  # fmt: skip
UNEVEN = TaskShape(
    "uneven", Uniform(1, 4), Lognormal(50, 0.3), Lognormal(40, 1.0), step_s=Lognormal(2, 1.5)
)
MOST = 3


def play(folder, seed, num_steps=12, **settings):
    """Steps under a bound that is drawn anew after each. Returns: what they took, and how often it shrank and swept."""
    rng, swept = random.Random(seed), Counter()

    async def main():
        servers = Servers(PLAN, QWEN3_8B, ENGINE, ServeSettings(progress_timeout_s=1e6))
        rollout = SimulatedRollout(
            servers.router,
            (UNEVEN,),
            RolloutSettings(
                batch_groups=2,
                group_size=2,
                max_staleness=MOST,
                max_new_tokens=500,
                max_attempts=50,
                **settings,
            ),
            folder,
            context=4096,
            seed=seed,
        )
        rollout.dispatcher.published(0)
        bound, taken = MOST, []
        for step in range(1, num_steps + 1):
            train = sleeping(rng.choice([0.0, 5.0, 20.0]))
            _, groups = await rollout.step(step, None, train, servers.commit)
            taken.append((bound, groups))
            before, bound = bound, rng.randint(0, MOST)
            ages = [step - group.oldest_version for group in rollout.dispatcher.view().groups]
            ages.append(step - rollout.buffer.oldest_version(step))
            flying = {group.group for group in rollout.dispatcher.view().groups}
            rollout.set_bound(bound)
            if settings["short_group_stale"] == "replace":  # the old members go, their groups stay
                assert flying <= {group.group for group in rollout.dispatcher.view().groups}
            held = [group.oldest_version for group in rollout.dispatcher.view().groups]
            assert step - min([rollout.buffer.oldest_version(step), *held]) <= bound
            swept["shrunk"] += bound < before
            swept["swept"] += max(ages) > bound
        await rollout.close()
        servers.close()
        return taken

    return clock.run(main()), swept


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rule", ["drop", "survivors", "replace"])
@pytest.mark.parametrize("age_of", ["oldest", "start"])
def test_no_batch_is_older_than_the_bound_of_its_step(tmp_path, seed, rule, age_of):
    taken, swept = play(tmp_path, seed, short_group_stale=rule, age_of=age_of)
    for step, (bound, groups) in enumerate(taken, 1):
        for group in groups:
            assert step - 1 - oldest_counted(group.trajectories, age_of, step - 1) <= bound
        assert max(lags(groups, step - 1)) <= bound
    assert swept["shrunk"] >= 2 and swept["swept"] >= 1


def test_a_bound_above_the_limit_is_refused(tmp_path):
    async def main():
        servers = Servers(PLAN, QWEN3_8B, ENGINE, ServeSettings(progress_timeout_s=1e6))
        rollout = SimulatedRollout(
            servers.router, (UNEVEN,), RolloutSettings(max_staleness=MOST), tmp_path, context=4096
        )
        for bound in (-1, MOST + 1):
            with pytest.raises(ValueError, match=f"bound of {bound}; use 0 to .*={MOST}"):
                rollout.set_bound(bound)
        await rollout.close()
        servers.close()

    clock.run(main())


def test_the_time_to_a_worth_ends_within_a_step():
    steps = tuple(Step(1, end_s, 0.0, Counter(), 0.5) for end_s in (10.0, 30.0, 40.0))
    played = Played(steps, 0, 0)
    assert (played.time_to(0.5), played.time_to(0.75), played.time_to(1.5)) == (10.0, 20.0, 40.0)
    with pytest.raises(ValueError, match="3 steps are worth 1.5, less than 2"):
        played.time_to(2)
