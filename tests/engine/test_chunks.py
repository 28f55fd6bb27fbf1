import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.engine.chunks import Chooser, Piece, end_positions, pack
from rl_jax.engine.engine import buckets, tile_of
from rl_jax.engine.programs import tile_index


def numbers(sizes, *limits, start=0):
    return [n for _, n in Chooser(*limits).choose([(start, n) for n in sizes])]


def test_a_chunk_is_filled_in_order_and_splits_the_last():
    assert numbers([3, 4, 9], 10, 4) == [3, 4, 3]
    assert numbers([3, 4, 9], 7, 4) == [3, 4]
    assert numbers([3, 4, 9], 100, 2) == [3, 4]
    assert numbers([50], 10, 4, start=5) == [10]
    assert numbers([], 10, 4) == []


def test_fresh_requests_are_kept_apart_and_whole_where_that_is_faster():
    take = lambda waiting: Chooser(10, 4, fresh_apart=True).choose(waiting)
    assert take([(0, 3), (7, 2), (0, 4), (0, 9)]) == [(0, 3), (2, 4)]  # the first decides
    assert take([(7, 2), (0, 3), (1, 9)]) == [(0, 2), (2, 8)]  # others fill the chunk
    assert take([(7, 2), (0, 3), (1, 6)]) == [(1, 3)]  # they do not
    assert take([(7, 2), (1, 6)]) == [(0, 2), (1, 6)]
    assert take([(0, 25), (0, 1)]) == [(0, 10)]  # no chunk holds it whole
    assert take([(0, 4), (0, 25)]) == [(0, 4), (1, 6)]
    assert take([(0, 4), (0, 10), (0, 6)]) == [(0, 4), (2, 6)]  # what fits passes what does not


def test_rests_of_long_contexts_share_a_chunk():
    """As after a swap that rebuilds all KV: each context is a little longer than a chunk."""
    chooser, waiting, chunks = Chooser(512, 16, fresh_apart=True), [(0, 553)] * 32, 0
    while waiting:
        chunks += 1
        for index, num_tokens in chooser.choose(waiting):
            start, missing = waiting[index]
            waiting[index] = (start + num_tokens, missing - num_tokens)
        waiting = [(start, missing) for start, missing in waiting if missing]
    assert chunks == 35, "32 of whole chunks, and 1,312 tokens of rests"


def test_a_rest_is_put_off_so_many_times_only():
    chooser = Chooser(512, 4, fresh_apart=True)
    line = [(512, 3), *[(0, 512)] * 99]  # fresh ones come for ever
    assert [chooser.choose(line)[0][0] for _ in range(10)] == [1, 1, 1, 1, 0, 1, 1, 1, 1, 0]
    assert Chooser(512, 4).choose(line) == [(0, 3), (1, 509)]  # where a chunk may mix them


def test_pack_takes_the_smallest_size_and_marks_padding():
    chunk = pack([Piece(np.array([7, 8]), 5), Piece(np.array([9]), 0)], (2, 4, 8))
    assert chunk.tokens.tolist() == [7, 8, 9, 0]
    assert chunk.segment.tolist() == [0, 0, 1, -1]
    assert chunk.position[:3].tolist() == [5, 6, 0]
    assert chunk.lengths.tolist() == [2, 1]
    assert end_positions(chunk) == [7, 1]


def test_pack_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="9 tokens exceed the largest chunk of 8"):
        pack([Piece(np.zeros(9, np.int32), 0)], (4, 8))


@pytest.mark.parametrize("lengths", [[1], [16], [5, 1, 16, 10], [17, 15], [0, 3, 0, 29]])
def test_tiles_hold_every_token_once_and_never_mix_segments(lengths):
    tile, C = 4, 32
    segment = np.full(C, -1, np.int32)
    segment[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    of_tile, of_token = tile_index(jnp.array(segment), jnp.array(lengths, jnp.int32), tile)
    of_tile, of_token = np.asarray(of_tile), np.asarray(of_token)
    real = of_tile[of_tile < C]
    assert sorted(real.tolist()) == list(range(sum(lengths)))
    for row in of_tile:
        assert len({segment[i] for i in row if i < C}) <= 1
    for token in range(sum(lengths)):
        assert of_tile.reshape(-1)[of_token[token]] == token
    assert (of_token[sum(lengths) :] == of_tile.size).all()


def test_buckets_and_tiles_stay_few():
    assert buckets(256, 256) == (256,)
    assert buckets(256, 4096) == (256, 1024, 4096)
    assert buckets(256, 100) == (100,)
    assert [tile_of(size) for size in (16, 512, 2048, 8192)] == [16, 16, 64, 128]
