"""Spans of one process: bounded, counted where they are lost, and never in the way of what they tell of."""

import json
import threading
import time

import pytest

from rl_jax import timeline as module
from rl_jax.timeline import OFF, Timeline, Traces
from rl_jax.tools.trace_files import read_attempts

POOLS = {"mode": "train", "pools": {}, "servers": {}, "train": {}, "model": {}}


def recorded(**more):
    """A timeline, and what it gave on."""
    given = []
    timeline = Timeline(**more)
    timeline.start(lambda spans, lost: given.append((list(spans), lost)))
    return timeline, given


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spans_come_in_order_with_what_was_said_of_them():
    timeline, given = recorded()
    track = timeline.track("decode/decode.0")
    track.add("block", 1.0, 3.5, running=2)
    with track.span("chunk", tokens=3):
        pass
    with pytest.raises(KeyError), track.span("swap"):
        raise KeyError
    timeline.close()
    spans = [span for some, _ in given for span in some]
    assert spans[0] == ("decode/decode.0", "block", 1.0, 2.5, {"running": 2})
    assert [span[1] for span in spans] == ["block", "chunk", "swap"], "one that raised is over too"


def test_track_that_nobody_asked_for_keeps_nothing():
    OFF.add("block", 0.0, 1.0)
    OFF.mark("x")
    assert not OFF.is_on and not module.NONE._spans
    timeline, given = recorded()
    timeline.close()
    timeline.track("a/b").add("late", 0.0, 1.0)
    assert not timeline._spans and [spans for spans, _ in given if spans] == []


def test_sink_that_blocks_holds_nobody_up_and_costs_counted_spans(monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    monkeypatch.setattr(module, "FLUSH_S", 0.001)
    blocked, entered = threading.Event(), threading.Event()

    def give(spans, lost):
        if spans:
            entered.set()
            blocked.wait(30.0)

    timeline = Timeline(most_waiting=10)
    timeline.start(give)
    track = timeline.track("a/b")
    track.add("first", 0.0, 1.0)
    assert entered.wait(10.0)
    start = time.monotonic()
    for _ in range(1000):
        track.add("x", 0.0, 1.0)
    timeline.close()
    assert time.monotonic() - start < 5.0
    assert timeline.num_lost == 990 and len(timeline._spans) == 10
    blocked.set()


def test_sink_that_raises_loses_what_it_was_given_and_counts_it(caplog):
    timeline = Timeline()

    def give(spans, lost):
        if spans:
            raise OSError("no space left")

    timeline.start(give)
    for _ in range(3):
        timeline.track("a/b").add("x", 0.0, 1.0)
    timeline.close()
    assert timeline.num_lost == 3
    assert "no space left" in caplog.text


def test_file_of_a_process_stays_below_its_bound_and_counts_what_made_room(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FLUSH_S", 60.0)
    traces = Traces(tmp_path / "traces" / "attempt_0", 0, most_bytes=20_000)
    traces.track("run/facts").mark("pools", **POOLS)
    traces.timeline._flush()
    track = traces.track("decode/decode.0")
    for i in range(40):
        for j in range(20):
            track.add("block", i + j / 20, i + (j + 1) / 20, running=1)
        traces.timeline._flush()
    traces.close()
    new, old = (tmp_path / "traces" / "attempt_0" / f"driver{x}.jsonl" for x in ("", ".old"))
    assert new.stat().st_size + old.stat().st_size <= 20_000
    head = lines(new)[0]
    assert head["process"] == "driver" and head["dropped"] > 0
    (attempt,) = read_attempts(tmp_path)
    blocks = [span for span in attempt.spans if span.kind == "block"]
    assert attempt.num_dropped + len(attempt.spans) == 801, "each is there, or counted"
    assert attempt.facts["mode"] == "train", "what a reader needs stays"
    assert blocks[-1].end_s == 40.0 and attempt.start_s == blocks[0].start_s > 1.0


def test_spans_of_other_processes_are_files_of_their_own_on_the_drivers_clock(tmp_path):
    traces = Traces(tmp_path / "traces" / "attempt_2", 2, most_bytes=1 << 20)
    traces.track("run/facts").mark("pools", **POOLS)
    span = ["decode/decode.0", "block", 5.0, 1.0, {"running": 1}]
    line = {"head": {"clock": "another", "pid": 7}, "s": [span], "lost": 4}
    traces.other("decode.0.1.ab", line | {"offset_s": 100.0, "within_s": 0.25})
    bad = ["decode/decode.0", "block", float("nan"), 1.0, {}]
    traces.other("decode.0.1.ab", line | {"s": [bad], "offset_s": 0.0, "within_s": 0.0})
    traces.close()
    traces.other("decode.0.1.ab", line)  # the run is over
    assert traces.num_lost == 2
    (attempt,) = read_attempts(tmp_path)
    (block,) = [s for s in attempt.spans if s.kind == "block"]
    assert (block.start_s, block.end_s, block.process) == (105.0, 106.0, "decode.0.1.ab")
    assert attempt.number == 2 and attempt.within_s == 0.25 and attempt.num_lost == 5


def test_run_without_a_timeline_writes_nothing(tmp_path):
    traces = Traces(tmp_path / "traces" / "attempt_0", 0, most_bytes=0)
    traces.track("a/b").add("x", 0.0, 1.0)
    traces.close()
    assert list(tmp_path.iterdir()) == []


def test_torn_line_is_counted_and_the_rest_is_read(tmp_path):
    traces = Traces(tmp_path / "traces" / "attempt_0", 0, most_bytes=1 << 20)
    traces.track("run/facts").mark("pools", **POOLS)
    traces.close()
    with open(tmp_path / "traces" / "attempt_0" / "driver.jsonl", "a") as file:
        file.write('{"s":[["decode/decode.0","bl')
    (attempt,) = read_attempts(tmp_path)
    assert attempt.num_bad == 1 and len(attempt.spans) == 1


def test_flush_gives_on_what_is_there_and_nothing_waits_for_the_next_look(monkeypatch):
    monkeypatch.setattr(module, "FLUSH_S", 600.0)
    given, one = [], Timeline()
    one.flush()  # not started: nothing to do
    one.start(lambda spans, lost: given.extend(spans))
    for num in range(3):
        one.track("train/learner").add("update", 0.0, 1.0, version=num)
        one.flush()
        assert [more["version"] for *_, more in given] == list(range(num + 1))
    one.close()
