"""rollout's parts on a virtual clock: waits of environments pass at once, and each step ends by the ledger's law."""

import pytest

from rl_jax.mesh import MeshPlan
from rl_jax.rollout.scheduler.trajectory import TrajectoryScheduler
from rl_jax.settings import MeshSettings, PoolSettings, RolloutSettings, ServeSettings
from rl_jax.simulate import clock
from rl_jax.simulate.affinity import ENGINE
from rl_jax.simulate.costs import H800, QWEN3_8B, Costs
from rl_jax.simulate.rollout import LOOK_S, SimulatedRollout, sleeping
from rl_jax.simulate.servers import Servers
from rl_jax.simulate.workload import Constant, TaskShape
from rl_jax.types import Outcome, SchedulerPolicy

PLAN = MeshPlan.from_settings(
    MeshSettings(
        pools=(PoolSettings("a", "decode", hardware="H800"), PoolSettings("train", "train"))
    )
)
# Blocks of 32 steps: a turn is one block.
SHAPE = TaskShape(
    "slow", Constant(3), Constant(50), Constant(32), Constant(20), step_s=Constant(10)
)


def steps(tmp_path, num_steps, train_s=0.0, policy=None, **settings):
    async def main():
        servers = Servers(PLAN, QWEN3_8B, ENGINE, ServeSettings(progress_timeout_s=1e6))
        rollout = SimulatedRollout(
            servers.router,
            (SHAPE,),
            RolloutSettings(batch_groups=2, group_size=2, max_new_tokens=100, **settings),
            tmp_path,
            context=4096,
            policy=policy,
        )
        taken = await rollout.steps(num_steps, sleeping(train_s), commit=servers.commit)
        await rollout.close()
        servers.close()
        return taken, rollout.ledger.counts()

    return clock.run(main())


def test_a_step_takes_its_turns_and_the_waits_of_its_environments(tmp_path):
    ((seconds, groups),), counts = steps(tmp_path, 1)
    turn_s = Costs(H800, QWEN3_8B).decode_s(32, 4, 4 * 100)
    assert 3 * (10 + turn_s) < seconds < 3 * (10 + 1.2 * turn_s) + 2 * LOOK_S
    episodes = [episode for group in groups for episode in group.trajectories]
    assert [len(episode.turns) for episode in episodes] == [3] * 4
    assert all(len(turn.tokens) == 32 for episode in episodes for turn in episode.turns)
    assert {episode.outcome for episode in episodes} == {Outcome.OK}
    assert counts["TRAINED"] == 4


# Asynchronous, two batches are under way at once, and the third begins when the first is consumed.
@pytest.mark.parametrize(("staleness", "least_s"), [(0, 3 * 30 + 2 * 20), (1, 2 * 30 + 20)])
def test_training_takes_its_time_and_the_bound_says_what_runs_beside_it(
    tmp_path, staleness, least_s
):
    taken, _ = steps(tmp_path, 3, train_s=20.0, max_staleness=staleness)
    assert least_s < taken[-1][0] < least_s + 12
    versions = {
        int(v) for _, groups in taken for g in groups for t in g.trajectories for v in t.versions
    }
    assert versions <= {-1, 0, 1, 2}


def test_slots_that_the_bound_leaves_empty_are_counted_by_their_share(tmp_path):
    async def main():
        servers = Servers(PLAN, QWEN3_8B, ENGINE, ServeSettings(progress_timeout_s=1e6))
        settings = RolloutSettings(batch_groups=2, group_size=2, max_staleness=0, max_new_tokens=99)
        rollout = SimulatedRollout(servers.router, (SHAPE,), settings, tmp_path, context=4096)
        taken = await rollout.steps(3, sleeping(20.0), commit=servers.commit)
        (slots,) = servers.router.capacity().values()
        idle_s = rollout.dispatcher.slots_idle_s
        await rollout.close()
        servers.close()
        return taken, slots, idle_s

    taken, slots, idle_s = clock.run(main())
    ends_s = [0.0, *(at_s + 20 for at_s, _ in taken)]
    waits_s = [at_s - end_s for (at_s, _), end_s in zip(taken, ends_s)]
    # Four episodes run, then none while it trains; the last batch is all that the run takes, so nothing is held back.
    assert idle_s == pytest.approx(2 * 20 + (slots - 4) / slots * sum(waits_s[:2]), rel=0.01)


def test_policy_is_asked_with_the_time_of_the_clock(tmp_path):
    seen = []

    class Watching(SchedulerPolicy):
        def __init__(self):
            self._inner = TrajectoryScheduler()

        def init(self, cfg):
            return self._inner.init(cfg)

        def decide(self, state, view, event):
            seen.append(view.now_s)
            return self._inner.decide(state, view, event)

    steps(tmp_path, 1, policy=Watching())
    assert seen == sorted(seen) and seen[0] == clock.START_S and 31 < seen[-1] < 40
