"""The order of rows: every one once a pass, shuffled by the seed, exact after a restart, shared by loaders."""

import json

import pytest

from rl_jax.data.rows import DataError
from rl_jax.data.stream import ExampleStream, num_steps
from rl_jax.settings import DataSettings
from rl_jax.testing.trajectories import fake_group

ROWS = [fake_group(i, [None], [8]) for i in range(10)]


def stream(seed=0, shard=(0, 1), digest="d", num_rows=len(ROWS), **settings):
    settings = DataSettings(**{"batch_rows": 4, **settings})
    return ExampleStream(ROWS[:num_rows], digest, settings, seed, shard)


def take(source, num):
    return [[group.index for group in source.next()] for _ in range(num)]


def flat(batches):
    return [i for batch in batches for i in batch]


def test_each_pass_has_every_row_once_in_an_order_of_its_own_and_batches_cross_passes():
    source = stream()
    order = flat(take(source, 4)) + [group.index for group in source.next()]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10)) and order[:10] != order[10:]
    assert source.epoch == 2.0
    assert flat(take(stream(seed=1), 5)) != order
    assert flat(take(stream(shuffle=False), 5)) == [*range(10), *range(10)]
    source = stream()
    uids = [t.uid for _ in range(5) for g in source.next() for t in g.trajectories]
    assert len(set(uids)) == 20 and uids[0].startswith("0/r/") and uids[-1].startswith("1/r/")


def test_restored_stream_gives_the_batches_that_would_have_come():
    first, second = stream(), stream()
    take(first, 3)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.epoch == first.epoch
    assert take(first, 4) == take(second, 4)
    assert first.state() == second.state()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("batch_rows", [1, 2, 3, 10, 64])
@pytest.mark.parametrize("epochs", [0, 10**18])
def test_batches_of_any_size_have_no_end_and_go_on_after_a_restart(num_rows, batch_rows, epochs):
    kind = {"num_rows": num_rows, "batch_rows": batch_rows, "epochs": epochs}
    first, second = stream(**kind), stream(**kind)
    num = 2 * num_rows // batch_rows + 2
    passes = flat(take(first, num))
    assert len(passes) == num * batch_rows
    for start in range(0, len(passes) - num_rows, num_rows):
        assert sorted(passes[start : start + num_rows]) == list(range(num_rows))
    second.restore(json.loads(json.dumps(first.state())))
    assert take(first, 3) == take(second, 3)


@pytest.mark.parametrize("change", [{"seed": 1}, {"digest": "e"}, {"shuffle": False}])
def test_position_in_other_rows_is_refused(change):
    with pytest.raises(
        DataError, match=f"was saved with {next(iter(change))} .* the rows are others"
    ):
        stream(**change).restore(stream().state())


def test_passes_end_with_a_short_batch():
    source, settings = stream(epochs=1), DataSettings(batch_rows=4, epochs=1)
    assert [len(batch) for batch in take(source, num_steps(10, settings))] == [4, 4, 2]
    assert source.epoch == 1.0
    with pytest.raises(DataError, match="data.epochs=1 passes are over"):
        source.next()


def test_loaders_share_every_pass():
    parts = [stream(shard=(i, 2), epochs=2) for i in range(2)]
    order = [flat(take(part, 3)) for part in parts]
    for i in range(2):
        given = order[0][5 * i : 5 * i + 5] + order[1][5 * i : 5 * i + 5]
        assert sorted(given) == list(range(10))
    with pytest.raises(DataError, match="10 rows are too few for 11 loaders"):
        stream(shard=(10, 11))
