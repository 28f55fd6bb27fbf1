"""L30: shards that wait for each other get the same work, in the same number of microbatches."""

from dataclasses import replace

import numpy as np
import pytest

from rl_jax.learner.batch import pack
from rl_jax.learner.packing import Balance, balance_of, balanced_rows, first_fit, pair_cost
from rl_jax.models.decoder import build_model
from rl_jax.settings import LearnerSettings, ModelSettings
from rl_jax.testing.trajectories import fake_group


def cells_of(rows, shards, per_microbatch):
    """[microbatch, shard] -> rows of the cell."""
    size = per_microbatch // shards
    cells = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [cells[i : i + shards] for i in range(0, len(cells), shards)]


def lognormal(seed, num, median, most):
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 0.8, num)
    return np.clip(drawn, 8, most).astype(int).tolist()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("num", "median", "row_tokens", "per_microbatch", "shards"),
    [(256, 300, 2048, 16, 8), (64, 60, 256, 8, 4), (512, 700, 4096, 32, 8), (128, 300, 1024, 8, 4)],
)
def test_lognormal_lengths_cost_every_shard_the_same(
    seed, num, median, row_tokens, per_microbatch, shards
):
    lengths, by = lognormal(seed, num, median, row_tokens), Balance(shards, 1e-3)
    rows = balanced_rows(range(num), lengths, row_tokens, per_microbatch, by)
    assert sorted(i for row in rows for i in row) == list(range(num))
    assert all(sum(lengths[i] for i in row) <= row_tokens for row in rows)
    fewest = len(first_fit(range(num), lengths, row_tokens))
    assert len(rows) == -(-fewest // per_microbatch) * per_microbatch  # no microbatch more
    cells = cells_of(rows, shards, per_microbatch)
    cost = np.array(
        [[sum(by.cost(lengths[i]) for r in c for i in r) for c in micro] for micro in cells]
    )
    assert (cost > 0).all()  # every shard works in every microbatch
    assert cost.sum(axis=0).max() / cost.sum(axis=0).mean() <= 1.05  # over the step
    assert cost.max(axis=1).sum() / cost.mean(axis=1).sum() <= 1.05  # and where they wait


def test_tight_batch_takes_no_more_microbatches_and_loses_nothing():
    lengths, by = [100] * 7 + [50, 50], Balance(4, 0.01)  # fills its 8 rows to the last token
    rows = balanced_rows(range(9), lengths, 100, 4, by)
    assert len(rows) == 8 and sorted(i for row in rows for i in row) == list(range(9))
    assert all(sum(lengths[i] for i in row) == 100 for row in rows)
    few = balanced_rows(range(2), lengths, 100, 8, by)
    assert len(few) == 8 and sum(map(bool, few)) == 2
    assert balanced_rows([], [], 100, 8, by) == []


def test_cost_of_a_pair_follows_the_models_shapes():
    """At L tokens attention costs 2 L H Dh layers of 2 * matrices: half of that a pair."""
    settings = ModelSettings(num_layers=2, embed_size=96, num_heads=4, head_dim=24, mlp_size=256)
    layer = 96 * 24 * (4 + 2 + 2 + 4) + 3 * 96 * 256
    assert pair_cost(build_model(settings, 264)) == pytest.approx(2 * 96 / (2 * layer))
    untied = replace(settings, tie_embeddings=False)
    assert pair_cost(build_model(untied, 264)) == pair_cost(build_model(settings, 264))


def test_cost_of_a_layer_with_a_window_grows_no_faster_than_the_length():
    settings = replace(ModelSettings(num_layers=4), window=8, full_every=2)
    by, full = balance_of(build_model(settings, 264), 2), Balance(2, 1.0)
    assert (by.windowed, by.window) == (0.5, 8)
    by = replace(by, quadratic=1.0)
    assert by.cost(8) == full.cost(8) == 72  # the window holds it all
    assert by.cost(20) == 20 + (20 * 20 + 8 * (40 - 8)) / 2
    assert replace(by, windowed=1.0).cost(1000) < 17 * 1000


def test_pack_spreads_rows_over_the_shards_and_keeps_every_trajectory_whole():
    groups = [fake_group(g, [0.0] * 4, [9, 12, 20, 7 + g]) for g in range(4)]
    settings = LearnerSettings(row_tokens=40, microbatch_rows=4)
    batch = pack(groups, settings, Balance(4, 1e-3))
    assert batch.num_rows == 8 and len(batch.trajectory_ids) == 16
    members = [t for group in groups for t in group.trajectories]
    for i, tokens in enumerate(batch.gather(batch.tokens, 16)):
        np.testing.assert_array_equal(tokens, members[i].tokens)
    assert (batch.segment_ids.max(axis=1) > 0).all()
    alone = pack(groups, settings, Balance(1, 1e-3))
    np.testing.assert_array_equal(alone.tokens, pack(groups, settings).tokens)
