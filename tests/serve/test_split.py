"""The choice of how many servers prefill, from a table: by hand."""

import pytest

from rl_jax.serve.split import Split, Table, Traffic, choose_split, rate, seconds

# A prompt token takes 1 ms. A step takes 10 ms for up to 10 requests, then 1 ms each.
TABLE = Table(((100, 0.1), (1000, 1.0)), ((1, 0.01), (10, 0.01), (100, 0.1)), slots=20)


def test_the_slowest_station_decides():
    # 1 prefill server: 2 turns/s. 3 decode servers: 10 requests each, 30 / (20 * 0.01) = 150. 30 requests: 42.9.
    assert rate(TABLE, Traffic(500, 20, 30), 1, 3) == Split(1, 3, 2.0, "prefill")
    assert rate(TABLE, Traffic(500, 20, 1), 1, 3) == Split(1, 3, pytest.approx(1 / 0.7), "requests")
    # 20 slots of 40 requests, steps of 20 ms: 20 / (1000 * 0.02).
    assert rate(TABLE, Traffic(100, 1000, 40), 3, 1) == Split(3, 1, pytest.approx(1.0), "decode")


def test_prompts_want_prefill_servers_and_answers_decode_servers():
    assert choose_split(TABLE, Traffic(1000, 10, 100), 4).num_prefill == 3
    assert choose_split(TABLE, Traffic(100, 1000, 100), 4).num_prefill == 1
    assert choose_split(TABLE, Traffic(1000, 500, 80), 4).num_prefill == 2
    # With few requests no split is faster than another: decode servers hold the histories.
    assert choose_split(TABLE, Traffic(100, 10, 1), 4).num_prefill == 1


def test_a_table_is_linear_between_its_points_and_proportional_beyond():
    points = ((100, 0.1), (1000, 1.9))
    assert [seconds(points, size) for size in (10, 100, 550, 1000, 2000)] == pytest.approx(
        [0.1, 0.1, 1.0, 1.9, 3.8]
    )


def test_what_cannot_be_is_told():
    with pytest.raises(ValueError, match="the decode table is .*ascending by size"):
        Table(((100, 0.1),), ((2, 0.1), (1, 0.1)), 4)
    with pytest.raises(ValueError, match="the prefill table is"):
        Table((), ((1, 0.1),), 4)
    with pytest.raises(ValueError, match="slots=0"):
        Table(((1, 0.1),), ((1, 0.1),), 0)
    with pytest.raises(ValueError, match="num_servers=1: one prefills"):
        choose_split(TABLE, Traffic(1, 1, 1), 1)
