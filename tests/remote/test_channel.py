"""Calls between two ends of a socket: answered in any order, each settled once, whatever becomes of the other end."""

import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rl_jax.remote import channel as channels
from rl_jax.remote import framing
from rl_jax.remote.channel import (
    Answer,
    CallTimeout,
    Channel,
    Lane,
    PeerGone,
    PeerSilent,
    QueueFull,
    RemoteError,
)
from rl_jax.remote.framing import FramingError, Unsendable
from rl_jax.settings import ClusterSettings

PATIENCE_S = 20.0
CALM = ClusterSettings(heartbeat_s=0.05, lease_s=PATIENCE_S)


class Odd(Exception):
    pass


@pytest.fixture
def ends():
    """`pair(handlers)`: a channel to ask through, and one that handles; `alone()`: one whose other end is a socket."""
    made: list[Channel] = []
    sockets: list[socket.socket] = []

    def end(sock, **more):
        more = {"settings": CALM, "attempt": "1", **more}
        made.append(Channel(sock, "peer", more.pop("attempt"), more.pop("settings"), **more))
        made[-1].start()
        return made[-1]

    def pair(handlers, mine=None, **theirs):
        a, b = socket.socketpair()
        there = end(b, handlers=handlers, **theirs)
        return end(a, **(mine or {})), there

    def alone(**more):
        a, b = socket.socketpair()
        sockets.append(b)
        closed: list[Exception] = []
        one = end(a, on_close=closed.append, **more)
        return SimpleNamespace(channel=one, socket=b, closed=closed)

    yield SimpleNamespace(pair=pair, alone=alone)
    for one in made:
        one.close()
    for one in made:
        one.join(PATIENCE_S)
    for sock in sockets:
        sock.close()


def collect(channel, num, deadline_s=PATIENCE_S):
    """Ask `num` times; (results by call, an event that is set when all have one)."""
    results, done = {i: [] for i in range(num)}, threading.Event()

    def settled(i, result):
        results[i].append(result)
        if all(results.values()):
            done.set()

    for i in range(num):
        channel.ask("work", i, deadline_s=deadline_s, done=lambda r, i=i: settled(i, r))
    return results, done


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_answers_come_in_any_order_to_the_call_that_asked(ends):
    held = []
    ours, _ = ends.pair({"work": held.append})
    results, done = collect(ours, 20)
    until(lambda: len(held) == 20)
    for request in reversed(held):
        request.answer({"n": request.body}, [np.full(3, request.body)])
    assert done.wait(PATIENCE_S)
    for i, (answer,) in results.items():
        assert answer.body == {"n": i} and answer.arrays[0].tolist() == [i] * 3


def test_parts_come_in_their_order_and_before_the_answer(ends):
    held, parts, done = [], [], threading.Event()
    ours, _ = ends.pair({"work": held.append})
    number = ours.ask(
        "work", None, deadline_s=PATIENCE_S, done=lambda answer: parts.append(answer) or done.set(),
        on_part=parts.append,
    )  # fmt: skip
    until(lambda: held)
    for i in range(50):
        held[0].part({"n": i}, [np.full(2, i)])
    held[0].answer({"n": 50})
    held[0].part({"n": 51})  # nobody waits for it any more
    assert done.wait(PATIENCE_S)
    until(lambda: ours.stats()["late"] == 1)
    assert [part.body["n"] for part in parts] == list(range(51)) and number == 1
    assert parts[7].arrays[0].tolist() == [7, 7]


def test_both_ends_may_ask_and_errors_keep_their_type(ends):
    def fail(request):
        raise {"value": ValueError("no"), "key": KeyError("gone"), "odd": Odd("strange")}[
            request.body
        ]

    ours, theirs = ends.pair({"fail": fail}, {"handlers": {"back": lambda r: r.answer(r.body + 1)}})
    with pytest.raises(ValueError, match="^no$"):
        ours.call("fail", "value", deadline_s=PATIENCE_S)
    with pytest.raises(KeyError, match="gone"):
        ours.call("fail", "key", deadline_s=PATIENCE_S)
    with pytest.raises(RemoteError, match="Odd: strange"):
        ours.call("fail", "odd", deadline_s=PATIENCE_S)
    with pytest.raises(ValueError, match="no verb 'nothing'"):
        ours.call("nothing", deadline_s=PATIENCE_S)
    assert theirs.call("back", 1, deadline_s=PATIENCE_S).body == 2


def test_late_answer_is_dropped_and_counted(ends):
    held = []
    ours, _ = ends.pair({"work": held.append})
    with pytest.raises(CallTimeout, match="did not answer work in time"):
        ours.call("work", deadline_s=0.05)
    results, done = collect(ours, 1, deadline_s=0.05)
    assert done.wait(PATIENCE_S) and isinstance(results[0][0], CallTimeout)
    for request in held:
        request.answer("late")
    until(lambda: ours.stats()["late"] == 2)
    assert len(results[0]) == 1


def test_deadline_is_told_as_what_is_left_when_it_is_sent(ends):
    left = []
    ours, _ = ends.pair({"work": lambda r: (left.append(r.left_s), r.answer())})
    ours.call("work", deadline_s=5.0)
    assert 4.0 < left[0] <= 5.0


def test_message_of_another_attempt_is_dropped_and_counted(ends):
    ours, theirs = ends.pair({"work": lambda r: r.answer()}, attempt="2")
    with pytest.raises(CallTimeout):
        ours.call("work", deadline_s=0.1)
    assert theirs.stats()["foreign"] > 0


def test_messages_keep_their_order_behind_a_large_one(ends):
    seen = []
    ours, _ = ends.pair({v: lambda r: seen.append(r.verb) for v in ("big", "a", "b")})
    ours.ask("big", None, [np.zeros(3 << 20, np.uint8)], deadline_s=PATIENCE_S, done=lambda r: None)
    ours.tell("a")
    ours.tell("b")
    until(lambda: len(seen) == 3)
    assert seen == ["big", "a", "b"]


def test_ordered_messages_overtake_bulk(ends):
    seen = []
    ours, _ = ends.pair({v: lambda r: seen.append(r.verb) for v in ("bulk", "first")})
    bulk = [np.zeros(64 << 20, np.uint8)]
    ours.ask("bulk", None, bulk, deadline_s=PATIENCE_S, done=lambda r: None, lane=Lane.BULK)
    ours.tell("first")
    until(lambda: len(seen) == 2)
    assert seen == ["first", "bulk"]


def test_peer_that_dies_fails_all_waiting_calls_at_once(ends):
    """A process that holds the other end is killed with kill -9."""
    one = ends.alone()
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(60)"],
        pass_fds=[one.socket.fileno()],
    )
    one.socket.close()
    results, done = collect(one.channel, 3)
    holder.kill()
    start = time.monotonic()
    assert done.wait(PATIENCE_S) and time.monotonic() - start < 5
    holder.wait(PATIENCE_S)
    assert [type(r) for (r,) in results.values()] == [PeerGone] * 3
    assert [type(error) for error in one.closed] == [PeerGone]
    with pytest.raises(PeerGone):
        one.channel.call("work", deadline_s=PATIENCE_S)
    one.channel.tell("work")  # nobody is there, and nobody is disturbed


@pytest.mark.slow
def test_silent_peer_is_dead_after_its_lease_and_a_busy_one_is_not(ends):
    quick = ClusterSettings(heartbeat_s=0.02, lease_s=0.2)
    one = ends.alone(settings=quick)
    results, done = collect(one.channel, 2)
    assert done.wait(PATIENCE_S)
    assert {type(r) for (r,) in results.values()} == {PeerSilent}
    assert "cluster.lease_s=0.2" in str(one.closed[0])

    held = []
    ours, _ = ends.pair(
        {"work": held.append}, {"settings": quick}
    )  # it answers nothing, but its pulse beats
    results, done = collect(ours, 1)
    time.sleep(0.5)
    assert ours.closed is None and not results[0]


def test_peer_gets_more_time_until_it_is_first_heard(ends):
    quick = ClusterSettings(heartbeat_s=0.02, lease_s=0.04)
    patient = ends.alone(settings=quick, grace_s=PATIENCE_S)
    hasty = ends.alone(settings=quick)
    until(lambda: hasty.closed)
    assert not patient.closed


def test_half_closed_stream_ends_the_channel(ends):
    one = ends.alone()
    results, done = collect(one.channel, 1)
    one.socket.shutdown(socket.SHUT_WR)
    assert done.wait(PATIENCE_S)
    assert isinstance(results[0][0], PeerGone) and len(one.closed) == 1


def test_garbage_ends_the_channel_and_a_malformed_message_does_not(ends):
    one = ends.alone()
    results, done = collect(one.channel, 2)
    answer = {"k": "answer", "at": "1"}
    frames = [
        *framing.frames(1, {"k": "nonsense", "at": "1"}, b"1", ()),
        *framing.frames(2, {**answer, "id": "one"}, b"1", ()),
        *framing.frames(3, {**answer, "id": 1}, b"{", ()),
        *framing.frames(4, {"k": "call", "v": "x", "id": 1, "left_s": "much", "at": "1"}, b"1", ()),
        *framing.frames(5, {**answer, "id": 2}, b'"fine"', ()),
    ]
    one.socket.sendall(b"".join(bytes(head) + bytes(payload) for head, payload in frames))
    assert done.wait(PATIENCE_S)
    assert isinstance(results[0][0], RemoteError) and "refused" in str(results[0][0])
    assert results[1] == [Answer("fine", ())]
    assert one.channel.stats()["refused"] == 4 and one.channel.closed is None
    results, done = collect(one.channel, 1)
    one.socket.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert done.wait(PATIENCE_S)
    assert isinstance(results[0][0], FramingError) and len(one.closed) == 1


@pytest.mark.slow
def test_peer_that_does_not_read_blocks_no_caller_for_ever(ends, monkeypatch):
    monkeypatch.setattr(channels, "MAX_QUEUED", 4 << 20)
    one = ends.alone()
    data = [np.zeros(3 << 20, np.uint8)]
    start = time.monotonic()
    kinds = []
    for _ in range(3):
        with pytest.raises((CallTimeout, QueueFull)) as caught:
            one.channel.call("stage", None, data, deadline_s=0.2, lane=Lane.BULK)
        kinds.append(caught.type)
    assert kinds == [CallTimeout] * 3 and time.monotonic() - start < 5
    results = []
    for _ in range(4):  # the ordered lane does not wait: it refuses
        one.channel.ask("submit", None, data, deadline_s=PATIENCE_S, done=results.append)
    assert results and all(isinstance(error, QueueFull) for error in results)
    assert one.channel.closed is None
    assert one.channel.stats()["expired"] == 0  # the writer still stands in its first frame
    one.channel.close()
    assert isinstance(one.closed[0], PeerGone)


def test_message_that_passes_its_deadline_on_the_way_is_cut_short(ends):
    one = ends.alone()
    data = [np.zeros(64 << 20, np.uint8)]
    with pytest.raises(CallTimeout):
        one.channel.call("stage", None, data, deadline_s=0.2, lane=Lane.BULK)
    reader = framing.Reader(one.socket)
    one.channel.tell("after")
    while (message := reader.read()).envelope["k"] == "pulse":
        pass
    assert message.envelope["v"] == "after"
    until(lambda: one.channel.stats()["expired"] == 1)


def test_what_cannot_be_sent_fails_its_caller_alone(ends):
    ours, theirs = ends.pair(
        {"work": lambda r: r.answer(float("nan")), "ok": lambda r: r.answer(1)}
    )
    with pytest.raises(Unsendable):
        ours.call("work", float("nan"), deadline_s=PATIENCE_S)
    with pytest.raises(RuntimeError, match="the answer cannot be JSON"):
        ours.call("work", deadline_s=PATIENCE_S)
    assert ours.call("ok", deadline_s=PATIENCE_S).body == 1


def test_pulses_carry_what_the_other_side_says_of_itself(ends):
    heard = []
    ends.pair({}, {"on_pulse": heard.append}, pulse=lambda: {"num_done": 3})
    until(lambda: {"num_done": 3} in heard)
