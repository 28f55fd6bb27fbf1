"""What a token costs, from seconds that are given."""

import pytest

from rl_jax.serve.rates import AppendRate, Rate


def test_an_average_is_weighed_by_the_work_and_forgets():
    rate = Rate(half_life=100)
    assert rate.unit_s is None
    rate.add(10, 1.0)
    assert rate.unit_s == pytest.approx(0.1)
    rate.add(100, 1.0)  # what was before counts half: 5 units of 0.5 s
    assert rate.unit_s == pytest.approx(1.5 / 105)
    for _ in range(20):
        rate.add(100, 2.0)
    assert rate.unit_s == pytest.approx(0.02, rel=1e-4)


def test_chunks_take_what_the_block_behind_them_takes_longer():
    rate = AppendRate()
    rate.chunk(50, start_s=0.0)
    rate.block(1.0, 3.0)  # a block alone is not known yet
    assert rate.token_s is None
    rate.block(3.0, 3.5)
    rate.chunk(10, start_s=4.0)
    rate.chunk(20, start_s=4.1)
    rate.block(4.2, 6.0)  # 2.0 s from the first chunk, 0.5 of them the block's
    assert rate.token_s == pytest.approx(1.5 / 30)
    rate.chunk(30, start_s=7.0)
    rate.forget()
    rate.block(90.0, 90.5)
    assert rate.token_s == pytest.approx(1.5 / 30)
    rate.chunk(30, start_s=100.0)
    rate.block(100.0, 100.1)  # never less than nothing
    assert 0 < rate.token_s < 1.5 / 50
