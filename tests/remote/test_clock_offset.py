"""Two clocks that differ, told apart by the pulses between them."""

import json
import random
import socket
import time
from types import SimpleNamespace

import pytest

from rl_jax.remote.channel import Channel
from rl_jax.remote.clock_offset import ClockOffset
from rl_jax.remote.process import RemoteProcess
from rl_jax.settings import ClusterSettings
from rl_jax.timeline import Traces, clock_id

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


def test_channel_knows_the_distance_of_its_two_clocks_by_its_pulses():
    """Both ends read one clock here."""
    settings = ClusterSettings(heartbeat_s=0.01, lease_s=10.0)
    ends = [Channel(sock, "peer", "1.a", settings) for sock in socket.socketpair()]
    for end in ends:
        end.start()
    deadline_s = time.monotonic() + 20.0
    while any(end.clock.best is None for end in ends) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    found = [end.clock.best for end in ends]
    for end in ends:
        end.close()
        end.join(5.0)
    for offset_s, within_s in found:
        assert abs(offset_s) <= within_s + 1e-9


def test_spans_of_another_host_are_placed_by_the_offset_and_say_how_far_off_they_may_be(tmp_path):
    process = object.__new__(RemoteProcess)
    process.name, process.attempt = "decode.0", "1.a"
    process._traces = Traces(tmp_path, 0, 1 << 20)
    process.channel = SimpleNamespace(clock=ClockOffset())
    body = {"head": {"clock": "elsewhere", "pid": 1}, "s": [["a/b", "x", 50.0, 1.0, {}]], "lost": 0}
    process._spans(SimpleNamespace(body=body))
    assert process._traces.num_lost == 1, "nothing is known of its clock: they cannot be placed"
    pulses([(0.002, 0.004)] * 2, process.channel.clock, ClockOffset())
    process._spans(SimpleNamespace(body=body))
    process._spans(SimpleNamespace(body={**body, "head": {"clock": clock_id(), "pid": 1}}))
    process._traces.close()
    lines = [
        json.loads(line) for line in (tmp_path / "decode.0.1.a.jsonl").read_text().splitlines()
    ]
    assert lines[1]["offset_s"] == pytest.approx(-AHEAD_S, abs=0.003)
    assert lines[1]["within_s"] == pytest.approx(0.003)
    assert lines[2]["offset_s"] == 0.0 and lines[2]["within_s"] == 0.0, "of this host"
