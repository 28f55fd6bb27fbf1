"""The task stream: every task once an epoch, equal shares of the tags, and a state that is a count."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.rollout.tasks import TaskStream
from rl_jax.types import Message, Task


def make_tasks(tag: str, num: int, prompt: str = "") -> list[Task]:
    messages = (Message("user", prompt),) if prompt else ()
    return [Task(f"{tag}/{i}", "echo", tag, messages, {}, "env", 1) for i in range(num)]


def make_stream(sizes: dict[str, int], seed: int = 0, shuffle: bool = True) -> TaskStream:
    return TaskStream({tag: make_tasks(tag, num) for tag, num in sizes.items()}, seed, shuffle)


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.dictionaries(st.sampled_from("abc"), st.integers(1, 9), min_size=1),
    seed=st.integers(0, 2**40),
    num=st.integers(1, 60),
)
def test_each_epoch_of_a_tag_issues_each_task_once_and_names_are_unique(sizes, seed, num):
    issued = [stream.next() for stream in [make_stream(sizes, seed)] for _ in range(num)]
    assert len({(task.epoch, task.index) for task in issued}) == num
    assert all(sum(sizes.values()) > task.index >= 0 for task in issued)
    for tag, size in sizes.items():
        mine = [task for task in issued if task.task.tag == tag]
        assert [task.epoch for task in mine] == [i // size for i in range(len(mine))]
        for epoch in range(len(mine) // size):
            ids = {task.task.id for task in mine if task.epoch == epoch}
            assert ids == {f"{tag}/{i}" for i in range(size)}


def test_index_is_the_offset_of_the_source_and_the_place_in_it():
    stream = make_stream({"a": 3, "b": 2}, shuffle=False)
    issued = [stream.next() for _ in range(6)]
    assert [(t.task.id, t.epoch, t.index) for t in issued] == [
        ("a/0", 0, 0),
        ("b/0", 0, 3),
        ("a/1", 0, 1),
        ("b/1", 0, 4),
        ("a/2", 0, 2),
        ("b/0", 1, 3),
    ]
    assert [stream.task(7, i).task.id for i in range(5)] == ["a/0", "a/1", "a/2", "b/0", "b/1"]
    with pytest.raises(ValueError, match=r"index 5 is outside 0\.\.4"):
        stream.task(0, 5)


def test_tags_take_equal_shares_even_after_wishes():
    stream = make_stream({"a": 4, "b": 4})
    assert [stream.next("b").task.tag for _ in range(3)] == ["b"] * 3
    tags = [stream.next().task.tag for _ in range(5)]
    assert tags == ["a", "a", "a", "a", "b"]


def test_one_task_alone_comes_again_every_epoch():
    stream = make_stream({"a": 1})
    assert [(t.epoch, t.index) for t in (stream.next() for _ in range(3))] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]


def test_order_depends_on_seed_tag_and_epoch():
    def order(seed, tag="a", skip=0):
        stream = make_stream({tag: 40}, seed)
        return [stream.next().index for _ in range(40 + skip)][skip:]

    assert order(0) == order(0)
    assert len({tuple(o) for o in (order(0), order(1), order(0, "b"), order(0, skip=40))}) == 4
    # Resumed runs, and runs on another numpy, must see this very order.
    assert order(0)[:8] == EXPECTED_ORDER


EXPECTED_ORDER = [22, 24, 23, 36, 15, 25, 35, 19]


@pytest.mark.parametrize("num", [0, 1, 7, 23])
def test_restored_stream_goes_on_exactly(num):
    whole, first = make_stream({"a": 5, "b": 3}), make_stream({"a": 5, "b": 3})
    expected = [whole.next() for _ in range(num + 20)][num:]
    for _ in range(num):
        first.next()
    state = json.loads(json.dumps(first.state(), sort_keys=True))
    second = make_stream({"a": 5, "b": 3})
    second.restore(state)
    assert [second.next() for _ in range(20)] == expected


@pytest.mark.parametrize(
    "other, message",
    [
        (make_stream({"a": 5}, seed=1), "saved with seed=0, not 1"),
        (make_stream({"a": 5}, shuffle=False), "saved with shuffle=True, not False"),
        (make_stream({"b": 5}), "saved with tags a in that order, not b"),
        (make_stream({"a": 6}), "the 6 tasks of tag 'a' are not the 5"),
        (
            TaskStream({"a": make_tasks("a", 5, "changed")}, 0),
            "the 5 tasks of tag 'a' are not the 5",
        ),
    ],
)
def test_a_state_of_other_tasks_is_refused(other, message):
    with pytest.raises(ValueError, match=message):
        other.restore(make_stream({"a": 5}).state())


def test_sources_without_tasks_are_refused():
    with pytest.raises(ValueError, match="tasks.sources is empty"):
        TaskStream({}, 0)
    with pytest.raises(ValueError, match="no tasks to train on: b"):
        make_stream({"a": 1, "b": 0})
    with pytest.raises(ValueError, match="no task source has tag 'c'; use one of a"):
        make_stream({"a": 1}).next("c")
