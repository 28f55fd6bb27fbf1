"""Two clocks that differ, told apart by the pulses between them."""

import random

import pytest

from rl_jax.remote.clock_offset import ClockOffset

AHEAD_S = 1234.5  # of the other side's clock


def pulses(delays, here, there):
    """Both sides send a pulse a second; delays: (to there, to here) of each."""
    for second, (out_s, back_s) in enumerate(delays):
        stamp = over_the_wire(here.stamp(float(second)))
        there.heard(stamp, second + out_s + AHEAD_S)
        stamp = over_the_wire(there.stamp(second + 0.5 + AHEAD_S))
        here.heard(stamp, second + 0.5 + back_s)


def over_the_wire(stamp):
    echo = stamp["echo"]
    return {"t": stamp["t"], "echo": None if echo is None else list(echo)}


def test_offset_is_exact_where_both_ways_take_as_long():
    here, there = ClockOffset(), ClockOffset()
    pulses([(0.003, 0.003)] * 3, here, there)
    offset_s, within_s = here.best
    assert offset_s == pytest.approx(AHEAD_S, abs=1e-9) and within_s == pytest.approx(0.003)
    assert there.best[0] == pytest.approx(-AHEAD_S, abs=1e-9)


def test_offset_is_no_farther_off_than_it_says_whatever_the_ways_take():
    rng = random.Random(3)
    for _ in range(50):
        here, there = ClockOffset(), ClockOffset()
        delays = [(rng.expovariate(100), rng.expovariate(20)) for _ in range(rng.randint(2, 100))]
        pulses(delays, here, there)
        offset_s, within_s = here.best
        assert abs(offset_s - AHEAD_S) <= within_s + 1e-9
        assert within_s <= min(sum(d) for d in delays[-60:]) / 2 + 1e-9, "the quickest one counts"


@pytest.mark.parametrize(
    "stamp",
    [None, 3, {}, {"t": "x"}, {"t": float("nan")}, {"t": True}, {"t": None, "echo": [1, 2]}],
)
def test_what_is_no_stamp_is_ignored(stamp):
    clock = ClockOffset()
    clock.heard(stamp, 1.0)
    assert clock.best is None and clock.stamp(2.0)["echo"] is None


@pytest.mark.parametrize("echo", ["ab", [1.0], [1.0, "x"], [1.0, 2.0, 3.0], [9.0, 1.0]])
def test_echo_that_is_none_gives_no_sample(echo):
    clock = ClockOffset()
    clock.heard({"t": 1.0, "echo": echo}, 2.0)
    assert clock.best is None and clock.stamp(2.0)["echo"] == (1.0, 2.0)
