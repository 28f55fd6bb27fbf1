"""What must hold of any timeline: its picture is one that Perfetto reads, and its seconds add up."""

import json
from collections import Counter

import pytest

from rl_jax.metrics import read_metrics
from rl_jax.tools import trace
from rl_jax.tools.bubbles import PHASES, phase_of
from rl_jax.tools.goodput import goodput_of
from rl_jax.tools.trace_files import read_attempts

# What the driver does of itself or for too short a time to be a cause.
OTHER_PHASES = {"time/step_s", "time/wait_for_batch_s", "environments"}


def check_chrome(found):
    """The trace event format, as far as it is used; arrows in pairs, in time, each within a slice; slices nest."""
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"}
    slices, arrows, named = {}, {}, set()
    for event in found["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        assert isinstance(event["name"], str) and event["name"]
        if event["ph"] == "M":
            if event["name"] in ("process_name", "thread_name"):
                assert isinstance(event["args"]["name"], str)
                named.add((event["pid"], event["tid"]))
        elif event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["args"], dict) and event["cat"]
            slices.setdefault((event["pid"], event["tid"]), []).append(event)
        else:
            assert event["ph"] in ("s", "t", "f") and (event["ph"] == "s") == ("bp" not in event)
            arrows.setdefault((event["cat"], event["id"]), []).append(event)
    assert all(key in named and (key[0], 0) in named for key in slices)
    for thread in slices.values():
        _check_nesting(thread)
    for stops in arrows.values():
        phases = [stop["ph"] for stop in stops]
        assert phases[0] == "s" and phases[-1] == "f" and set(phases[1:-1]) <= {"t"}
        assert [stop["ts"] for stop in stops] == sorted(stop["ts"] for stop in stops)
        for stop in stops:
            thread = slices[stop["pid"], stop["tid"]]
            assert any(s["ts"] <= stop["ts"] <= s["ts"] + s["dur"] for s in thread)
    return slices, arrows


def _check_nesting(thread):
    open_ = []
    for one in sorted(thread, key=lambda s: (s["ts"], -s["dur"])):
        start, end = one["ts"], one["ts"] + one["dur"]
        while open_ and open_[-1] <= start + 2e-3:  # nanoseconds are rounded
            open_.pop()
        assert not open_ or end <= open_[-1] + 2e-3, one
        open_.append(end)


def check_timeline(run, steps=None):
    """Of a real run; its goodput. steps: as tools.trace's --steps."""
    attempts = read_attempts(run)
    assert [(a.num_lost, a.num_bad) for a in attempts] == [(0, 0)] * len(attempts)
    phases = {phase_of(s) for a in attempts for s in a.of("driver")}
    assert phases - OTHER_PHASES <= set(PHASES), "one that no cause is known of"
    goodput = goodput_of(attempts, read_metrics(run), steps)
    for pool in goodput.pools.values():
        assert pool.off < 0.01
    for unit in goodput.units:
        assert unit.off < 0.01, unit.name
        if unit.is_server:
            assert unit.overlap_s < 0.01 * unit.up_s
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for attempt in attempts:  # against clocks that the timeline did not read
        mine = [e["t_mono_s"] for e in events if e["attempt"] == attempt.number]
        assert attempt.start_s == pytest.approx(mine[0], abs=0.1)
        saves = [s.end_s for s in attempt.of("driver") if s.kind == "the save of version"]
        told = [
            e["t_mono_s"] for e in events if e["attempt"] == attempt.number and e["kind"] == "saved"
        ]
        assert saves == pytest.approx(told, abs=0.1)
    return goodput


def exported(run, folder, *words):
    """What tools.trace writes of it."""
    out = folder / "trace.json"
    assert trace.main([str(run), "-o", str(out), *words]) == 0
    return json.loads(out.read_text())


def names(slices):
    return Counter(one["name"] for thread in slices.values() for one in thread)
