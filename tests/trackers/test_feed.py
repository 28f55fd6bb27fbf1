"""The feeds: what trackers get, and what becomes of a run whose trackers raise, hang or cannot be made."""

import threading
import time

import pytest

from rl_jax.testing import trackers as fakes
from rl_jax.testing.trajectories import fake_trajectory
from rl_jax.trackers import feed as feeds
from rl_jax.trackers.feed import MAX_FAILURES, Feed, Feeds
from rl_jax.trackers.tracker import choose, cut, sample_of


class Told(list):
    def __call__(self, text, **fields):
        self.append((text, fields))


def wait_for(true, seconds=10.0):
    end_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(fakes.RecordingTracker, "calls", [])
    return fakes.RecordingTracker.calls


def feed_of(kind, told, size=4):
    return Feed("x", lambda: kind(None), told, size)


def test_a_tracker_gets_everything_in_order_and_is_closed(calls):
    told = Told()
    all_of = Feeds({"x": lambda: fakes.RecordingTracker(None)}, told, str, 2, 64)
    all_of.hparams({"a": 1})
    all_of.metrics(1, {"reward/mean": 0.5})
    all_of.rollouts(1, [fake_trajectory(reward=r, sample=i) for i, r in enumerate((0.0, 1.0, 0.5))])
    all_of.close()
    assert [name for name, _ in calls] == ["made", "hparams", "metrics", "rollouts", "closed"]
    assert [s.reward for s in calls[3][1][1]] == [0.0, 1.0] and told == []
    assert all_of.lost() == {"x": 0}


def test_one_that_raises_loses_items_is_given_up_and_told_once(calls):
    told, feed = Told(), None
    feed = feed_of(fakes.RaisingTracker, told, size=100)
    for _ in range(40):
        feed.put("log_metrics", lambda: (1, {}))
        time.sleep(0.001)
    wait_for(lambda: feed.counts["failed"] == MAX_FAILURES)
    feed.put("log_metrics", lambda: (1, {}))
    feed.close(time.monotonic() + 5)
    assert feed.counts["failed"] == MAX_FAILURES
    assert feed.counts["put"] == 41 == feed.num_lost
    warning, last = told
    assert "ConnectionError: the service is away" in warning[0]
    assert last[1] | {"put": 41, "tracker": "x"} == last[1]


class Exits:
    """What a package may raise that is no Exception."""

    def log_metrics(self, step, values):
        raise SystemExit("bye")

    def close(self):
        raise SystemExit("bye")


def test_one_that_raises_what_is_no_exception_is_given_up_and_told_like_another():
    told = Told()
    feed = Feed("x", Exits, told)
    for _ in range(MAX_FAILURES + 2):
        feed.put("log_metrics", lambda: (1, {}))
    wait_for(lambda: feed.num_lost == MAX_FAILURES + 2)
    feed.close(time.monotonic() + 5)
    assert feed.num_lost == MAX_FAILURES + 2 and "SystemExit: bye" in told[0][0]


def test_what_is_put_while_one_is_given_up_is_counted_at_the_end(monkeypatch):
    told = Told()
    feed = Feed("x", Exits, told)
    put = feed._queue.put_nowait

    def late(item):  # was let in before it was given up, and comes after
        feed._thread.join(10)
        put(item)

    for _ in range(MAX_FAILURES - 1):
        feed.put("log_metrics", lambda: (1, {}))
    go = threading.Event()
    feed.put("log_metrics", lambda: go.wait(10) and (1, {}))
    monkeypatch.setattr(feed._queue, "put_nowait", lambda item: (go.set(), late(item)))
    feed.put("log_metrics", lambda: (1, {}))
    assert feed.num_lost == MAX_FAILURES
    feed.close(time.monotonic() + 5)
    assert feed.num_lost == feed.counts["put"] == MAX_FAILURES + 1


def test_one_that_hangs_costs_what_its_queue_cannot_hold_and_a_bounded_close(calls):
    told = Told()
    feed = feed_of(fakes.HangingTracker, told)
    start_s = time.monotonic()
    for _ in range(1000):
        feed.put("log_metrics", lambda: (1, {}))
    assert (
        time.monotonic() - start_s < 1.0
    )  # nobody waited: 5 were taken, one of them by the tracker
    assert 994 <= feed.counts["dropped"] <= 996
    start_s = time.monotonic()
    feed.close(time.monotonic() + 0.2)
    assert time.monotonic() - start_s < 2.0
    assert feed.num_lost == 1000 and len(told) == 2
    assert "does not keep up" in told[0][0] and "1000 of 1000 items were lost" in told[1][0]


def test_one_that_cannot_be_made_or_hangs_while_it_is_made_stops_nobody(calls):
    def broken():
        raise SystemExit("no licence")  # whatever a package may do

    told = Told()
    feed = Feed("x", broken, told)
    wait_for(lambda: told)
    feed.put("log_metrics", lambda: (1, {}))
    feed.close(time.monotonic() + 1)
    assert feed.num_lost == 1 and "could not be made: SystemExit: no licence" in told[0][0]
    never = threading.Event()
    feed = Feed("y", never.wait, told, 4)
    for _ in range(10):
        feed.put("log_metrics", lambda: (1, {}))
    feed.close(time.monotonic() + 0.1)
    never.set()
    assert feed.num_lost == 10


def test_an_argument_that_cannot_be_made_is_a_failure_of_that_item_alone(calls):
    told = Told()

    def render(tokens):
        raise ValueError("no such token")

    all_of = Feeds({"x": lambda: fakes.RecordingTracker(None)}, told, render, 2, 64)
    all_of.rollouts(1, [fake_trajectory()])
    all_of.metrics(1, {})
    all_of.close()
    assert all_of.lost() == {"x": 1} and ("metrics", (1, {})) in calls


def test_all_trackers_share_one_deadline_to_close(monkeypatch, calls):
    monkeypatch.setattr(feeds, "CLOSE_S", 0.3)
    make = lambda: fakes.HangingTracker(None)
    all_of = Feeds(dict.fromkeys("abc", make), Told(), str, 0, 64)
    all_of.metrics(1, {})
    start_s = time.monotonic()
    all_of.close()
    assert time.monotonic() - start_s < 1.5


# --- samples ---------------------------------------------------------------------------------------------------------


def test_samples_spread_over_the_rewards_and_are_capped():
    trajectories = [fake_trajectory(reward=r, sample=i) for i, r in enumerate((3, 1, None, 2, 0))]
    assert [t.reward.value for t in choose(trajectories, 3)] == [None, 1, 3]
    assert len(choose(trajectories, 50)) == 5 and choose([], 3) == []


@pytest.mark.parametrize("text", ["x" * 1_000_000, "漢" * 1000, "\ud800" * 1000, "", "short"])
def test_a_text_is_valid_and_at_most_as_long_as_asked(text):
    found = cut(text, 100)
    assert len(found.encode("utf-8")) <= 100
    if len(text) > 100:
        assert found.endswith(" bytes more]")


def test_what_is_no_text_is_marked_where_it_stood():
    assert cut("a\ud800b", 100) == "a?b"


def test_a_long_episode_is_rendered_only_as_far_as_its_text_can_reach():
    seen = []
    sample = sample_of(fake_trajectory(length=90), lambda t: seen.append(len(t)) or "a" * 500, 64)
    assert seen == [64] and len(sample.text) <= 64
