"""Four servers between prefill and decode: who chooses how many, played by the real router and servers."""

from dataclasses import replace

import pytest

from rl_jax.simulate.pd_ratio import (
    DECODE_HEAVY,
    NUM_SERVERS,
    PREFILL_HEAVY,
    SETTINGS,
    planned,
    play,
)

SMALL = replace(SETTINGS, batch_groups=6)


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("shape", [PREFILL_HEAVY, DECODE_HEAVY], ids=lambda shape: shape.tag)
def test_the_planned_ratio_is_the_best_one(shape):
    fixed = {num: play(num, shape, 2, 0, settings=SMALL).seconds for num in range(1, NUM_SERVERS)}
    best, worst = min(fixed.values()), max(fixed.values())
    assert worst > 1.3 * best
    assert fixed[planned(shape, SMALL).num_prefill] <= 1.05 * best


@pytest.mark.slow(seconds=5)
def test_auto_leaves_the_worst_ratio():
    fixed, auto = (play(1, PREFILL_HEAVY, 4, 0, word) for word in ("fixed", "auto"))
    assert fixed.moves == 0 and 1 <= auto.moves <= 3
    assert auto.seconds < 0.9 * fixed.seconds
