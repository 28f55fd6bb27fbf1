"""Routing by tag over pools of two hardware classes, played by the real router, slots, dispatcher and servers."""

import pytest

from rl_jax.settings import RolloutSettings
from rl_jax.simulate.affinity import CONTEXT, FROZEN_LAKE, FROZEN_LAKE_CACHED, MATH, Pools, play

# Equal cost within 5 %; the one that it favours is the one of H20 only.
H800_ONLY, H20_ONLY = Pools("H800 only", 3, 0), Pools("H20 only", 0, 9)
BY_TAG, MIXED = Pools("by tag", 2, 3, by_tag=True), Pools("mixed", 2, 3)
SETTINGS = RolloutSettings(
    batch_groups=4, group_size=3, max_staleness=1, max_new_tokens=CONTEXT, envs_per_worker=4096
)


@pytest.mark.slow(seconds=3)
def test_routing_by_tag_beats_every_pool_of_the_same_cost():
    pools = (BY_TAG, H800_ONLY, H20_ONLY, MIXED)
    assert max(p.price for p in pools) < 1.06 * min(p.price for p in pools)
    assert BY_TAG.price < H20_ONLY.price
    by_tag, h800, h20, mixed = [play(p, (FROZEN_LAKE, MATH), SETTINGS, 1, seed=0) for p in pools]
    # There was room, so every episode was where its tag wants it.
    assert by_tag.episodes == {("frozen_lake", "h800"): 6, ("math", "h20"): 6}
    assert len(mixed.episodes) == 4
    assert len({played.num_turns for played in (by_tag, h800, h20, mixed)}) == 1
    for other in (h800, h20, mixed):
        assert other.seconds >= 1.12 * by_tag.seconds


@pytest.mark.slow(seconds=5)
def test_tags_find_their_hardware_from_no_tags_at_all_and_stay_there():
    pools = Pools("auto", 2, 3, is_auto=True)
    assert not any(pool.tags for pool in pools.plan().pools)
    played = play(pools, (FROZEN_LAKE, MATH), SETTINGS, 4, seed=0)
    assert dict(played.assigned) == {"frozen_lake": "H800", "math": "H20"} and played.moves <= 2
    seconds, where = played.later
    assert where == {("frozen_lake", "h800"): 12, ("math", "h20"): 12}
    assert seconds < 0.5 * played.seconds


@pytest.mark.slow(seconds=1)
def test_a_seed_is_played_the_same_again_and_another_is_not():
    short = RolloutSettings(batch_groups=1, group_size=2, max_new_tokens=CONTEXT)
    once, again, other = [play(BY_TAG, (FROZEN_LAKE_CACHED,), short, 1, seed) for seed in (0, 0, 1)]
    assert once == again != other
