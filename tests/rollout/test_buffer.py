"""The sample buffer: bound, shares, order, integrity, waiting."""

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.algorithms.contract import ContractError
from rl_jax.config import ConfigError, parse
from rl_jax.ledger import EpisodeFacts, EpisodeRef, Ledger, LedgerError
from rl_jax.rollout.assembly import ClosedEpisode, assemble
from rl_jax.rollout.buffer import Interrupted, SampleBuffer, TakeTimeout, ref_of
from rl_jax.rollout.selection import SelectionExhausted
from rl_jax.rollout.traces import trajectory_sha256
from rl_jax.settings import RolloutSettings, Settings
from rl_jax.types import FinishReason, Group, Outcome, Reward, StepResult, Turn, VersionSpan
from rl_jax.validate import check

SETTINGS = RolloutSettings(batch_groups=2, group_size=2, max_staleness=1, take_timeout_s=5.0)


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", "r")
    yield ledger
    ledger.close()


def make_trajectory(index, sample, version, tag="a", value=1.0, start=None):
    num = 3 + index + sample
    turn = Turn(
        prompt_tokens=np.arange(4, dtype=np.int32),
        tokens=np.full(num, 10 + index, np.int32),
        logprobs=np.full(num, -0.5, np.float32),
        sampled_logprobs=None,
        spans=(VersionSpan(0, num, version),),
        context_mixed=np.zeros(num, bool),
        finish=FinishReason.STOP,
        cached_prompt=0,
        server="s",
        pool="p",
        times_s={"decode": 0.25},
    )
    ref = EpisodeRef(f"r/0/{index}/{sample}", 0, f"r/0/{index}", 0, index, sample, tag)
    closed = ClosedEpisode(
        ref, f"task{index}", turn.prompt_tokens, (turn,), (StepResult((), value, True),), ("k",),
        Outcome.OK, None, None, version if start is None else start,
    )  # fmt: skip
    return assemble(closed, Reward(value, {"env": value}, (value,), "scored", "env"))


def make_group(ledger, index, version=0, tag="a", size=2, starts=None, versions=None):
    """A complete group whose members are COMPLETED in the ledger. starts: version of each member's start; versions: of
    each member's tokens, where they differ."""
    versions = [version] * size if versions is None else versions
    starts = versions if starts is None else starts
    members = tuple(
        make_trajectory(index, s, versions[s], tag, start=starts[s]) for s in range(len(versions))
    )
    for t in members:
        ledger.write(ref_of(t), "ISSUED")
        ledger.write(ref_of(t), "RUNNING")
        ledger.write(
            ref_of(t), "COMPLETED", facts=EpisodeFacts(version, (version,), 3, trajectory_sha256(t))
        )
    return Group(f"r/0/{index}", f"task{index}", tag, 0, index, members)


def test_oldest_groups_go_first_and_come_out_by_index(ledger):
    buffer = SampleBuffer(replace(SETTINGS, max_staleness=3), ledger, ["a"])
    for index, version in ((9, 2), (4, 1), (7, 0), (1, 2)):
        assert buffer.put(make_group(ledger, index, version))
    assert [g.index for g in buffer.take(3)] == [4, 7]
    assert [g.index for g in buffer.snapshot()] == [9, 1, 4, 7]  # waiting by age, then taken


def test_batch_holds_equal_groups_of_each_tag(ledger):
    buffer = SampleBuffer(replace(SETTINGS, batch_groups=4), ledger, ["a", "b"])
    for index in range(5):
        buffer.put(make_group(ledger, index, tag="a"))
    with pytest.raises(TakeTimeout, match="2 of b"):
        buffer.take(1, timeout_s=0.01)
    for index in (5, 6):
        buffer.put(make_group(ledger, index, tag="b"))
    assert [g.index for g in buffer.take(1)] == [0, 1, 5, 6]
    assert buffer.held() == {"a": 5, "b": 2}


def test_stale_group_is_dropped_and_counted(ledger):
    buffer = SampleBuffer(SETTINGS, ledger, ["a"])
    dropped = []
    buffer.on_drop = lambda group, reason: dropped.append((group.index, reason))
    for index, version in ((0, 0), (1, 1), (2, 2)):
        buffer.put(make_group(ledger, index, version))
    assert [g.index for g in buffer.take(3)] == [
        1,
        2,
    ]  # consuming version 2: version 0 is one too old
    assert dropped == [(0, "stale")] and buffer.drops() == {"stale": 2}
    assert ledger.counts()["DROPPED"] == 2


@pytest.mark.parametrize("age_of", ["oldest", "start"])
def test_an_age_is_counted_from_the_oldest_token_or_from_the_start(ledger, age_of):
    """Members that started at version 0 and sampled all they train at version 2, at the bound of 1."""
    by_start = age_of == "start"
    buffer = SampleBuffer(replace(SETTINGS, age_of=age_of), ledger, ["a"])
    assert buffer.put(make_group(ledger, 0, version=2, starts=[2, 0]))
    assert buffer.oldest_version(now=9) == (0 if by_start else 2)
    assert [g.index for g in buffer.sweep(1)] == []
    assert [g.index for g in buffer.sweep(2)] == ([0] if by_start else [])
    assert buffer.put(make_group(ledger, 1, version=2, starts=[2, 1]))
    assert buffer.put(make_group(ledger, 2, version=2, starts=[2, 0])) != by_start
    if by_start:  # two more than are left
        assert [buffer.put(make_group(ledger, i, version=3)) for i in (3, 4)] == [True, True]
    taken = [g.index for g in buffer.take(4)]  # consuming version 3
    assert taken == ([3, 4] if by_start else [0, 1])
    assert buffer.drops() == ({"stale": 6} if by_start else {})


def test_an_age_of_something_else_is_refused_with_the_words_there_are():
    errors = check(Settings(rollout=replace(SETTINGS, age_of="oldst")))
    assert "rollout.age_of=oldst is not one of oldest, start" in errors
    with pytest.raises(
        ConfigError, match="rollout.ageof is not a key; did you mean rollout.age_of"
    ):
        parse(["--config.rollout.ageof=start"])


def test_the_group_that_started_first_is_taken_first(ledger):
    for age_of, first in (("oldest", 0), ("start", 1)):
        buffer = SampleBuffer(replace(SETTINGS, age_of=age_of, batch_groups=1), ledger, ["a"])
        epoch = 0 if age_of == "oldest" else 4  # other episodes
        buffer.put(make_group(ledger, epoch, version=1, starts=[1, 1]))
        buffer.put(make_group(ledger, epoch + 1, version=1, starts=[0, 1]))
        assert [g.index for g in buffer.take(2)] == [epoch + first]


def test_sweep_at_publish_and_put_after_it(ledger):
    buffer = SampleBuffer(SETTINGS, ledger, ["a"])
    buffer.put(make_group(ledger, 0, 0))
    assert buffer.sweep(1) == []
    assert [g.index for g in buffer.sweep(2)] == [0]
    assert not buffer.put(make_group(ledger, 1, 0))  # finished too late
    assert buffer.put(make_group(ledger, 2, 1))
    assert buffer.drops() == {"stale": 4}


def test_survivors_stay_with_a_record_of_each_that_grew_too_old(ledger):
    buffer = SampleBuffer(replace(SETTINGS, short_group_stale="survivors"), ledger, ["a"])
    for index, versions in ((0, [0, 1, 1]), (1, [1, 1, 1]), (2, [0, 0, 0])):
        assert buffer.put(make_group(ledger, index, versions=versions))
    with pytest.raises(
        TakeTimeout
    ):  # before the sweep of version 2, for which it may not take what is too old
        buffer.take(3, timeout_s=0.01)
    assert [g.index for g in buffer.sweep(2)] == [2]  # of which nothing is left
    assert buffer.drops() == {"stale": 4} and buffer.num_open_episodes() == 5
    groups = buffer.take(3)
    assert [[t.sample for t in g.trajectories] for g in groups] == [[1, 2], [0, 1, 2]]
    buffer.consumed(3, groups)
    assert {s: n for s, n in ledger.counts().items() if n} == {"TRAINED": 5, "DROPPED": 4}
    ledger.check(in_flight=0)


def test_survivors_are_selected_anew_and_counted_once(ledger):
    buffer = SampleBuffer(replace(SETTINGS, short_group_stale="survivors"), ledger, ["a"])
    buffer.select = lambda groups: (
        [g for g in groups if len(g.trajectories) > 1],
        [(g.uid, "few") for g in groups if len(g.trajectories) < 2],
    )
    for index, versions in ((0, [0, 1, 1]), (1, [0, 0, 1]), (3, [1, 1, 1])):
        buffer.put(make_group(ledger, index, versions=versions))
    buffer.select, alone = odd_ones_out, buffer.select
    buffer.put(
        make_group(ledger, 4, versions=[1, 0, 1])
    )  # the first is dropped: its statistics are of all
    buffer.select = alone
    assert [g.index for g in buffer.sweep(2)] == [1, 4]
    assert buffer.drops() == {"stale": 3 + 2, "filtered: few": 1, "filtered: worst": 1}
    buffer.take(3)
    metrics = buffer.selection_metrics()
    assert metrics["reward/mean_all"].count == 12  # as they came, and not again
    assert (metrics["filter/kept"].sum, metrics["filter/kept"].count) == (4, 5)


def test_groups_to_be_replaced_are_handed_back_with_open_records(ledger):
    buffer = SampleBuffer(replace(SETTINGS, short_group_stale="replace"), ledger, ["a"])
    buffer.select = odd_ones_out  # drops a member of group 4, so that its statistics are of all
    for index, versions in ((0, [0, 1]), (4, [0, 1]), (6, [1, 1])):
        assert buffer.put(make_group(ledger, index, versions=versions))
    assert buffer.reclaim(1) == []
    assert [g.index for g in buffer.reclaim(2)] == [0]
    assert (buffer.num_waiting, buffer.num_open_episodes()) == (2, 3)
    assert [g.index for g in buffer.sweep(2)] == [4]
    assert buffer.drops() == {"filtered: worst": 1, "stale": 1}
    ledger.check(in_flight=2 + 2)  # those that were handed back, and group 6


def test_groups_beyond_the_limit_are_dropped_and_counted(ledger):
    buffer = SampleBuffer(SETTINGS, ledger, ["a"])
    assert [buffer.put(make_group(ledger, i)) for i in range(5)] == [True] * 4 + [False]
    assert buffer.drops() == {"buffer_full": 2}
    buffer.take(1)
    assert not buffer.put(make_group(ledger, 5))  # taken groups count until their step is published


def test_groups_count_as_held_until_their_version_is_published(ledger):
    buffer = SampleBuffer(SETTINGS, ledger, ["a"])
    for index in range(2):
        buffer.put(make_group(ledger, index))
    groups = buffer.take(1)
    assert (buffer.num_taken, buffer.num_waiting, buffer.num_open_episodes()) == (2, 0, 4)
    buffer.consumed(1, groups)
    assert (buffer.num_taken, buffer.num_open_episodes()) == (2, 0)
    assert ledger.counts()["TRAINED"] == 4
    buffer.release(1)
    assert (buffer.num_taken, buffer.held()) == (0, {})
    ledger.check(in_flight=0)


def test_publish_without_consumed_is_refused(ledger):
    buffer = SampleBuffer(SETTINGS, ledger, ["a"])
    for index in range(2):
        buffer.put(make_group(ledger, index))
    groups = buffer.take(1)
    with pytest.raises(LedgerError, match="consumed\\(\\) was never called for step 1"):
        buffer.release(1)
    with pytest.raises(LedgerError, match="names other groups"):
        buffer.consumed(1, groups[:1])


def test_changed_array_is_found_at_exit(ledger):
    buffer = SampleBuffer(SETTINGS, ledger, ["a"])
    for index in range(2):
        buffer.put(make_group(ledger, index))
    tokens = buffer.snapshot()[1].trajectories[0].tokens
    tokens.setflags(write=True)
    tokens[2] += 1
    with pytest.raises(LedgerError, match=r"r/0/1/0#0: its arrays changed"):
        buffer.take(1)


def test_records_are_on_disk_before_a_batch_is_handed_on(ledger):
    buffer = SampleBuffer(SETTINGS, ledger, ["a"])
    for index in range(2):
        buffer.put(make_group(ledger, index))
    assert ledger.path.read_text().count("COMPLETED") < 4
    buffer.take(1)
    assert ledger.path.read_text().count("COMPLETED") == 4


def odd_ones_out(groups):
    """Drops groups of odd index, and the first member of index 4."""
    dropped = [(g.uid, "odd") for g in groups if g.index % 2]
    kept = []
    for group in groups:
        first = group.trajectories[0]
        if group.index == 4:
            dropped.append((first.uid, "worst"))
            first = replace(first, loss_mask=np.zeros_like(first.loss_mask))
        if group.index % 2 == 0:
            kept.append(replace(group, trajectories=(first, *group.trajectories[1:])))
    return kept, dropped


def test_what_is_not_selected_is_dropped_as_it_comes_and_takes_no_room(ledger):
    buffer = SampleBuffer(SETTINGS, ledger, ["a"])
    buffer.select = odd_ones_out
    assert [buffer.put(make_group(ledger, i)) for i in range(7)] == [i % 2 == 0 for i in range(7)]
    assert (buffer.num_waiting, buffer.num_open_episodes()) == (4, 7)
    assert buffer.drops() == {"filtered: odd": 6, "filtered: worst": 1}
    assert [g.index for g in buffer.take(1)] == [0, 2]
    metrics = buffer.selection_metrics()
    assert (metrics["filter/kept"].sum, metrics["filter/kept"].count) == (4, 7)
    assert metrics["filter/batches"].mean == 3.5
    assert metrics["reward/mean_all"].count == 14  # both members of all seven


def test_a_dropped_member_stays_in_its_group_and_is_neither_trained_nor_dropped_again(ledger):
    buffer = SampleBuffer(SETTINGS, ledger, ["a"])
    buffer.select = odd_ones_out
    for index in (0, 4):
        buffer.put(make_group(ledger, index))
    groups = buffer.take(1)
    assert [t.num_trained > 0 for t in groups[1].trajectories] == [False, True]
    assert groups[1].trajectories[0].reward.value == 1.0
    buffer.consumed(1, groups)
    assert {s: n for s, n in ledger.counts().items() if n} == {"TRAINED": 3, "DROPPED": 1}
    buffer.release(1)
    buffer.put(make_group(ledger, 24, 1))
    buffer.put(replace(make_group(ledger, 44, 1), index=4))
    buffer.clear("run_end")
    assert buffer.drops() == {"filtered: worst": 2, "run_end": 3}
    ledger.check(in_flight=0)


def test_filtering_in_vain_ends_with_the_reasons_of_the_tag_that_is_missing(ledger):
    settings = replace(SETTINGS, max_filtered_batches=3)
    buffer = SampleBuffer(settings, ledger, ["a", "b"])
    buffer.select = lambda groups: (
        [g for g in groups if g.tag == "b"],
        [(g.uid, "equal_rewards") for g in groups if g.tag == "a"],
    )
    buffer.put(make_group(ledger, 0, tag="b"))
    for index in (1, 2):
        buffer.put(make_group(ledger, index))
    with pytest.raises(TakeTimeout):  # two of three: the bound is not reached
        buffer.take(1, timeout_s=0.01)
    buffer.put(make_group(ledger, 3))
    line = r"misses 1 of 1 groups of a: 3 .* \(equal_rewards 3\), .* rollout.max_filtered_batches=3"
    with pytest.raises(SelectionExhausted, match=line):
        buffer.take(1)


def test_selection_that_forgets_a_group_or_a_member_is_an_error(ledger):
    buffer = SampleBuffer(SETTINGS, ledger, ["a"])
    for i, (answer, line) in enumerate(
        (
            (lambda group: ([], []), "exactly once"),
            (lambda group: ([group], [(group.uid, "x")]), "exactly once"),
            (
                lambda group: ([replace(group, trajectories=group.trajectories[:1])], []),
                "with all its members",
            ),
            (lambda group: ([group], [(group.trajectories[0].uid, "x")]), "left it tokens"),
            (lambda group: None, r"select\(\) gave None; it must give \(the groups to train on"),
            (lambda group: [group], r"select\(\) gave a list of 1 \(a Group\)"),
        )
    ):
        buffer.select = lambda groups, answer=answer: answer(groups[0])
        with pytest.raises(ContractError, match=line):
            buffer.put(make_group(ledger, i))
        ledger.check(0)  # what it was asked about is dropped, and counted
    assert ledger.counts()["DROPPED"] == 6 * len(make_group(ledger, 9).trajectories)


def test_take_waits_for_put_and_ends_on_failure_or_stop(ledger):
    buffer = SampleBuffer(SETTINGS, ledger, ["a"], status=lambda: "nothing runs")
    groups = [make_group(ledger, i) for i in range(2)]
    timers = [threading.Timer(0.02 * (i + 1), buffer.put, [g]) for i, g in enumerate(groups)]
    for timer in timers:
        timer.start()
    assert buffer.take(1) == groups
    with pytest.raises(Interrupted, match="step 2 waits for groups: 2 of a; nothing runs"):
        buffer.take(2, should_stop=lambda: True)
    threading.Timer(0.02, buffer.fail, [RuntimeError("the env is gone")]).start()
    with pytest.raises(RuntimeError, match="the env is gone"):
        buffer.take(2)


def test_take_waits_as_long_as_there_is_progress(ledger):
    now = [0.0]
    waits = Counter()
    buffer = SampleBuffer(SETTINGS, ledger, ["a"], clock=lambda: now[0])

    def should_stop():  # asked at every look: time passes, and for a while there is progress
        waits["looks"] += 1
        now[0] += 3.0
        if waits["looks"] < 10:
            buffer.beat()
        return False

    buffer.poll_s = 0.0
    with pytest.raises(TakeTimeout, match="no episode progress for 5 s"):
        buffer.take(1, should_stop=should_stop)
    assert waits["looks"] >= 11


def test_clear_drops_what_waits_and_what_was_not_trained(ledger):
    buffer = SampleBuffer(replace(SETTINGS, max_staleness=4), ledger, ["a"])
    for index in range(5):
        buffer.put(make_group(ledger, index))
    buffer.consumed(1, buffer.take(1))
    buffer.take(2)
    buffer.clear("run_end")
    assert {s: n for s, n in ledger.counts().items() if n} == {"TRAINED": 4, "DROPPED": 6}
    ledger.check(in_flight=0)
