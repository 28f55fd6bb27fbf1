"""Packing and advantages on the host: what is laid where, what is trained, what it weighs."""

from dataclasses import replace

import numpy as np
import pytest

from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.sft import Sft
from rl_jax.learner.batch import pack, token_advantages, with_advantages
from rl_jax.learner.microbatches import microbatches, to_rows
from rl_jax.settings import AlgorithmSettings, LearnerSettings
from rl_jax.testing.trajectories import PROMPT, fake_group
from rl_jax.types import Outcome

ALGORITHM = AlgorithmSettings()


def settings(row_tokens=16, microbatch_rows=2):
    return LearnerSettings(row_tokens=row_tokens, microbatch_rows=microbatch_rows)


def some_groups():
    return [
        fake_group(0, [0.0, 1.0, 1.0], [8, 16, 5]),
        fake_group(1, [1.0, 0.0], [11, PROMPT]),  # the second samples nothing
        fake_group(2, [0.5, 2.0, None], [7, 9, 9]),
    ]


def members_of(groups):
    return [t for group in groups for t in group.trajectories]


def batch_of(groups, algorithm_settings=ALGORITHM, **kw):
    batch = pack(groups, settings(**kw))
    return with_advantages(batch, groups, {}, Grpo(algorithm_settings), None, algorithm_settings)[0]


def test_each_trajectory_lies_whole_in_one_row_with_its_own_segment():
    groups = some_groups()
    members, batch = members_of(groups), pack(groups, settings())
    assert sorted(batch.trajectory_ids) == [0, 1, 2, 3, 5, 6, 7]
    for s, i in enumerate(batch.trajectory_ids):
        member, row = members[i], batch.rows[s]
        span = slice(batch.starts[s], batch.starts[s] + batch.seq_len[s])
        np.testing.assert_array_equal(batch.tokens[row, span], member.tokens)
        np.testing.assert_array_equal(batch.targets_mask[row, span], member.loss_mask)
        np.testing.assert_array_equal(batch.behaviour_logprobs[row, span], member.logprobs)
        np.testing.assert_array_equal(batch.versions[row, span], member.versions)
        np.testing.assert_array_equal(batch.turn_ids[row, span], member.turn_ids)
        np.testing.assert_array_equal(batch.positions[row, span], np.arange(len(member.tokens)))
        assert len(set(batch.segment_ids[row, span].tolist())) == 1
    used = np.zeros(batch.num_rows, int)
    np.add.at(used, batch.rows, batch.seq_len)
    np.testing.assert_array_equal((batch.segment_ids > 0).sum(axis=1), used)
    for row in batch.segment_ids:
        present = np.unique(row[row > 0])
        np.testing.assert_array_equal(present, np.arange(1, len(present) + 1))
    padding = batch.segment_ids == 0
    assert not batch.targets_mask[padding].any() and (batch.versions[padding] == -1).all()


def test_contexts_of_a_trajectory_are_apart_and_its_segment_is_one():
    (group,) = [fake_group(0, [0.0, 1.0], [12, 9])]
    first = replace(group.trajectories[0], sample_starts=(0, 5, 9))
    batch = pack([replace(group, trajectories=(first, group.trajectories[1]))], settings(24))
    samples, positions, segments = (
        batch.gather(a, 2) for a in (batch.sample_ids, batch.positions, batch.segment_ids)
    )
    assert samples[0].tolist() == [1] * 5 + [2] * 4 + [3] * 3
    assert samples[1].tolist() == [4] * 9
    assert positions[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert segments[0].tolist() == [1] * 12 and segments[1].tolist() == [2] * 9
    assert batch.sample_lengths == [5, 4, 3, 9]
    with pytest.raises(ValueError, match="r/0/0/0 trains the first token of a context"):
        pack([replace(group, trajectories=(replace(first, sample_starts=(0, 3)),))], settings(24))


def test_rows_are_filled_longest_first():
    lengths = [8, 16, 5, 11, 7, 9]
    batch = pack([fake_group(0, [0.0] * 6, lengths)], settings())
    assert batch.num_rows == 4  # 16 | 11 5 | 9 7 | 8, of 56 tokens in rows of 16
    fills = sorted(
        sorted(batch.seq_len[batch.rows == row].tolist()) for row in range(batch.num_rows)
    )
    assert fills == [[5, 11], [7, 9], [8], [16]]


def test_advantages_return_to_their_tokens_and_are_nan_where_nothing_trains():
    groups = some_groups()
    batch, members = batch_of(groups), members_of(groups)
    found = token_advantages(batch, groups)
    assert [len(a) for a in found] == [8, 16, 5, 11, 0, 7, 9, 9]  # the fifth took no row
    trained = [a for i, a in enumerate(found) if i not in (4, 7)]  # the last has no reward
    masks = [m.loss_mask for i, m in enumerate(members) if i not in (4, 7)]
    for own, mask in zip(trained, masks):
        np.testing.assert_array_equal(np.isfinite(own), mask)
        assert len(set(own[mask].tolist())) == 1
    assert trained[0][masks[0]][0] < 0 < trained[1][masks[1]][0] and np.isnan(found[7]).all()


def test_packing_is_deterministic():
    first, second = (pack(some_groups(), settings()) for _ in range(2))
    for name, value in vars(first).items():
        np.testing.assert_array_equal(value, vars(second)[name], err_msg=name)


def test_what_a_trajectory_gets_does_not_depend_on_the_order_of_arrival():
    """L17: rewards travel with their trajectory, whatever completed first."""
    groups = some_groups()
    shuffled = [replace(g, trajectories=g.trajectories[::-1]) for g in (groups[2], *groups[:2])]

    def by_uid(groups):
        batch, members = batch_of(groups), members_of(groups)
        num = len(members)
        arrays = [
            batch.gather(a, num)
            for a in (batch.advantages, batch.loss_weights, batch.tokens, batch.targets_mask)
        ]
        return {m.uid: [a[i] for a in arrays] for i, m in enumerate(members)}

    want, got = by_uid(groups), by_uid(shuffled)
    assert want.keys() == got.keys()
    for uid, arrays in want.items():
        for a, b in zip(arrays, got[uid], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=uid)


def test_every_sampled_token_of_a_trained_trajectory_trains_once():
    """L14."""
    groups = some_groups()
    batch = batch_of(groups)
    trained = [m for m in members_of(groups) if m.reward.status == "scored"]
    assert batch.targets_mask.sum() == sum(m.num_trained for m in trained)
    assert batch.loss_weights.sum() == pytest.approx(1.0)  # token-mean over all of them


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_tokens_that_branches_share_train_in_the_one_that_has_them_in_its_mask(owner):
    """L14: three branches of one episode share 100 sampled tokens; whichever trains them, each token trains once.

    Nothing here forks by itself: a record of a tree gives the shared tokens to one branch and leaves them, sampled and
    with their versions, as context in the others. They must then weigh nothing there, in loss, counts and lengths.
    """
    shared = fake_group(0, [1.0], [PROMPT + 200]).trajectories[0]
    root = PROMPT + 200
    assert shared.num_trained == 100
    rng = np.random.default_rng(0)
    members = []
    for i, num in enumerate((4, 9, 16)):
        own = fake_group(0, [0.0, 1.0, 3.0], [root + num] * 3).trajectories[i]
        tokens, mask = own.tokens.copy(), np.ones(len(own.tokens), bool)
        tokens[:root] = shared.tokens
        mask[:root] = shared.loss_mask & (i == owner)
        sampled = np.concatenate([shared.loss_mask, np.ones(num, bool)])
        logprobs = np.where(sampled, rng.normal(-5, 0.1, len(tokens)), 0).astype(np.float32)
        versions = np.where(sampled, 0, -1).astype(np.int32)
        members.append(
            replace(own, tokens=tokens, loss_mask=mask, logprobs=logprobs, versions=versions)
        )
    group = replace(fake_group(0, [0.0], [8]), trajectories=tuple(members))
    batch = batch_of([group], row_tokens=256)
    unique = 100 + 4 + 9 + 16
    assert batch.targets_mask.sum() == unique
    assert batch.loss_weights[batch.targets_mask] == pytest.approx(1 / unique)
    for i, mask in enumerate(batch.gather(batch.targets_mask, 3)):
        assert mask[:root].sum() == (100 if i == owner else 0) and mask[root:].all()
    device = microbatches(batch, 0, capacity=2, microbatch_rows=2, chunk=16)
    assert device["target_mask"].sum() == unique
    per_sequence = batch_of(
        [group], replace(ALGORITHM, aggregation="seq-mean-token-sum"), row_tokens=256
    )
    assert per_sequence.loss_weights[batch.targets_mask] == pytest.approx(1 / 3)


def test_failed_cancelled_and_empty_trajectories_take_no_row():
    group = fake_group(0, [1.0, 0.0, 1.0, 0.0], [8, 8, 8, PROMPT])
    members = list(group.trajectories)
    members[1] = replace(members[1], outcome=Outcome.FAILED)
    members[2] = replace(members[2], outcome=Outcome.CANCELLED)
    batch = pack([replace(group, trajectories=tuple(members))], settings())
    assert batch.trajectory_ids.tolist() == [0]


def test_unscored_trajectories_leave_the_loss_and_its_denominator():
    scored = fake_group(0, [1.0, 0.0], [8, 8])
    with_unscored = fake_group(0, [1.0, 0.0, None], [8, 8, 8])
    want, got = batch_of([scored]), batch_of([with_unscored])
    assert got.targets_mask.sum() == want.targets_mask.sum()
    assert sorted(got.loss_weights[got.targets_mask]) == sorted(
        want.loss_weights[want.targets_mask]
    )
    sft, _ = with_advantages(
        pack([with_unscored], settings()), [with_unscored], {}, Sft(ALGORITHM), None, ALGORITHM
    )
    assert sft.targets_mask.sum() == sum(m.num_trained for m in with_unscored.trajectories)


def test_the_overlong_filter_empties_the_mask_before_tokens_are_counted():
    group = fake_group(0, [1.0, 0.0, 0.5], [8, 12, 9])
    cut = replace(group.trajectories[1], outcome=Outcome.TRUNCATED)
    group = replace(group, trajectories=(group.trajectories[0], cut, group.trajectories[2]))
    plain = batch_of([group])
    filtered = batch_of([group], replace(ALGORITHM, overlong_filter=True))
    num_cut = cut.num_trained
    assert filtered.targets_mask.sum() == plain.targets_mask.sum() - num_cut
    assert filtered.loss_weights.sum() == pytest.approx(1.0)
    kept = (
        filtered.targets_mask
    )  # the reward of the cut one still stands in the group's mean and std
    np.testing.assert_array_equal(filtered.advantages[kept], plain.advantages[kept])


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [
        ("token-mean", lambda n, own, group: 1 / sum(n)),
        ("seq-mean-token-mean", lambda n, own, group: 1 / (len(n) * own)),
        ("seq-mean-token-sum-norm", lambda n, own, group: 1 / (len(n) * 20)),
        ("group-mean-token-mean", lambda n, own, group: 1 / (2 * group)),
    ],
)
def test_loss_weights_are_global_whatever_the_rows(aggregation, weight):
    chosen = replace(ALGORITHM, aggregation=aggregation, max_response_tokens=20)
    groups = [fake_group(0, [0.0, 1.0], [8, 12]), fake_group(1, [1.0, 0.0], [9, 5])]
    members = members_of(groups)
    counts = [m.num_trained for m in members]
    for row_tokens in (12, 16, 64):
        batch = batch_of(groups, chosen, row_tokens=row_tokens)
        for i, weights in enumerate(batch.gather(batch.loss_weights, 4)):
            of_group = counts[0] + counts[1] if i < 2 else counts[2] + counts[3]
            want = np.where(members[i].loss_mask, weight(counts, counts[i], of_group), 0)
            np.testing.assert_allclose(weights, want, rtol=1e-6)


def test_what_cannot_be_packed_is_named():
    group = fake_group(7, [0.0], [20])
    with pytest.raises(ValueError, match=r"r/0/7/0 has 20 tokens.*row_tokens=16.*at least 20"):
        pack([group], settings(row_tokens=16))
    member = group.trajectories[0]

    def group_with(**changes):
        return replace(group, trajectories=(replace(member, **changes),))

    first = np.ones(20, bool)
    with pytest.raises(ValueError, match=r"r/0/7/0 trains the first token of a context"):
        pack([group_with(loss_mask=first)], settings(row_tokens=32))
    bad = np.where(member.loss_mask, np.nan, 0).astype(np.float32)
    with pytest.raises(ValueError, match=r"r/0/7/0: behaviour log-prob nan at token 3"):
        pack([group_with(logprobs=bad)], settings(row_tokens=32))
    with pytest.raises(ValueError, match=r"r/0/7/0 is twice in the batch"):
        pack([group, group], settings(row_tokens=32))


def test_junk_off_the_mask_does_not_reach_the_batch():
    """L16."""
    groups = [fake_group(0, [0.0, 1.0], [8, 12])]

    def poisoned(member):
        junk = np.where(member.loss_mask, member.logprobs, np.inf).astype(np.float32)
        return replace(member, logprobs=junk)

    members = tuple(poisoned(m) for m in groups[0].trajectories)
    want, got = batch_of(groups), batch_of([replace(groups[0], trajectories=members)])
    np.testing.assert_array_equal(got.behaviour_logprobs, want.behaviour_logprobs)


def test_advantages_that_do_not_pair_are_refused():
    groups = [fake_group(0, [0.0, 1.0], [8, 12])]
    batch = pack(groups, settings())

    class Wrong(Grpo):
        def advantages(self, groups, extras, state):
            return self.values, state

    algorithm = Wrong(ALGORITHM)
    for values, error in (
        ([np.zeros(8)], "advantages.. gave 1 arrays for 2 trajectories"),
        (
            [np.zeros(8), np.zeros(9)],
            r"gave shape \(9,\) for trajectory r/0/0/1 .number 1. of 12 tokens",
        ),
        (
            [np.full(8, np.nan), np.zeros(12)],
            "gave nan for trajectory r/0/0/0 .number 0., whose reward is",
        ),
    ):
        algorithm.values = values
        with pytest.raises(ValueError, match=error):
            with_advantages(batch, groups, {}, algorithm, None, ALGORITHM)


def test_extras_reach_the_algorithm_per_trajectory():
    groups = some_groups()
    batch, members = pack(groups, settings()), members_of(groups)
    seen = {}

    class Looks(Grpo):
        def advantages(self, groups, extras, state):
            seen.update(extras)
            return super().advantages(groups, extras, {"steps": 1})

    extra = batch.place(
        [np.full(len(m.tokens), i + 1.0) for i, m in enumerate(members)], np.float32
    )
    batch, state = with_advantages(
        batch, groups, {"old_logprobs": extra}, Looks(ALGORITHM), None, ALGORITHM
    )
    assert state == {"steps": 1} and batch.extras.keys() == {"old_logprobs"}
    for i in batch.trajectory_ids:
        np.testing.assert_array_equal(
            seen["old_logprobs"][i], np.full(len(members[i].tokens), i + 1.0)
        )


def test_nothing_to_train_is_a_batch_without_rows():
    """L20."""
    for groups in ([], [fake_group(0, [1.0, 0.0], [PROMPT, PROMPT])]):
        batch = batch_of(groups)
        assert batch.num_rows == 0 and batch.row_tokens == 16
        cut = microbatches(batch, 0, capacity=2, microbatch_rows=2, chunk=4)
        assert cut["num_microbatches"] == 0 and not cut["target_mask"].any()


# --- microbatches ----------------------------------------------------------------------------------------------------


def test_microbatches_hold_the_trained_tokens_and_nothing_else():
    batch = batch_of(some_groups())
    cut = microbatches(batch, 3, capacity=4, microbatch_rows=2, chunk=5)
    assert cut["tokens"].shape == (4, 2, 16) and cut["target_mask"].shape == (4, 2, 20)
    assert cut["num_microbatches"] == -(-batch.num_rows // 2)
    flat = {name: a.reshape(8, -1) for name, a in cut.items() if a.ndim == 3}
    for row in range(batch.num_rows):
        columns = np.flatnonzero(batch.targets_mask[row])
        num = len(columns)
        np.testing.assert_array_equal(flat["target_index"][row, :num], columns)
        np.testing.assert_array_equal(flat["target_tokens"][row, :num], batch.tokens[row, columns])
        np.testing.assert_array_equal(flat["advantages"][row, :num], batch.advantages[row, columns])
        np.testing.assert_array_equal(flat["lag"][row, :num], 3 - batch.versions[row, columns])
        assert flat["target_mask"][row, :num].all() and not flat["target_mask"][row, num:].any()
    counts = np.zeros(8, int)
    counts[: batch.num_rows] = batch.targets_mask.sum(axis=1)
    np.testing.assert_array_equal(cut["num_chunks"], -(-counts.reshape(4, 2).max(axis=1) // 5))
    assert not flat["tokens"][batch.num_rows :].any()


def test_target_values_return_to_their_columns():
    batch = batch_of(some_groups())
    cut = microbatches(batch, 0, capacity=4, microbatch_rows=2, chunk=5)
    back = to_rows(batch, cut["target_tokens"])
    np.testing.assert_array_equal(back, np.where(batch.targets_mask, batch.tokens, 0))


def test_a_batch_beyond_the_capacity_is_refused():
    batch = batch_of(some_groups())
    with pytest.raises(ValueError, match=r"5 rows of 16 tokens.*max_rows=2"):
        microbatches(batch, 0, capacity=1, microbatch_rows=2, chunk=4)


def test_a_token_newer_than_its_consumer_is_refused():
    """L2: a version read from the wrong place shows here at once."""
    batch = batch_of([fake_group(0, [0.0, 1.0], [8, 9], version=5)])
    with pytest.raises(ValueError, match="a token of version 5 .* version 4 consumes"):
        microbatches(batch, 4, capacity=2, microbatch_rows=2, chunk=4)
