"""Processes that do the same orders together: one answer of each, or one error; and however one goes, none waits."""

import os
import signal
import time

import numpy as np
import psutil
import pytest

from rl_jax.remote.framing import Unsendable
from rl_jax.remote.group import Group, GroupLost, Raised
from rl_jax.remote.spec import Spec
from rl_jax.remote.starter import LocalStarter
from rl_jax.settings import ClusterSettings

pytestmark = pytest.mark.slow

SETTINGS = ClusterSettings(heartbeat_s=0.2, lease_s=2.0)


def spec(name, program="tests.remote.echo_process"):
    return Spec(name=name, program=program)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    group = Group([spec("learner.0"), spec("learner.1")], SETTINGS, LocalStarter(SETTINGS, logs))
    yield group
    group.end()


@pytest.fixture
def alive(group):
    if group.lost is not None:
        group.start()
    return group


def test_each_answers_what_it_was_told_in_their_order(alive):
    array = np.arange(3, dtype=np.int16)
    one, two = alive.order("echo", [{"a": 1}, {"a": 2}], (array,), deadline_s=20.0)
    assert (one.body, two.body) == ({"a": 1}, {"a": 2})
    assert np.array_equal(two.arrays[0], array)
    (only,) = alive.order("echo", {"a": 3}, deadline_s=20.0, only_first=True)
    assert only.body == {"a": 3}


def test_what_all_of_them_raise_is_raised_and_they_go_on(alive):
    with pytest.raises(Raised, match="as told") as caught:
        alive.order("fail", {"fails": True}, deadline_s=20.0)
    assert caught.value.kind == "LookupError" and alive.lost is None
    assert len(alive.order("echo", {}, deadline_s=20.0)) == 2


def test_what_cannot_be_sent_reaches_nobody(alive):
    with pytest.raises(Unsendable):
        alive.order("echo", {"a": float("nan")}, deadline_s=20.0)
    assert alive.lost is None and len(alive.order("echo", {}, deadline_s=20.0)) == 2


def test_one_that_fails_alone_loses_the_group_as_the_others_may_wait_for_it(alive, monkeypatch):
    monkeypatch.setattr("rl_jax.remote.group.AFTER_S", 0.5)
    began_s = time.monotonic()
    bodies = [{"fails": False, "sleep_s": 60.0}, {"fails": True}]
    with pytest.raises(Raised, match="as told"):
        alive.order("fail", bodies, deadline_s=60.0)
    assert time.monotonic() - began_s < 10.0
    with pytest.raises(GroupLost, match="1 of 2 processes failed in fail: as told"):
        alive.order("echo", {}, deadline_s=20.0)
    alive.start()
    assert len(alive.order("echo", {}, deadline_s=20.0)) == 2


@pytest.mark.parametrize(
    "how, why", [(signal.SIGKILL, "learner.1"), (signal.SIGSTOP, "nothing came from learner.1")]
)
def test_one_that_dies_or_stands_still_is_named_before_the_orders_deadline(alive, how, why):
    alive.order("echo", {}, deadline_s=60.0)  # both were heard once: from then on the lease counts
    pids = alive.pids
    os.kill(pids[1], how)
    began_s = time.monotonic()
    with pytest.raises(GroupLost, match=why):
        alive.order("sleep", {"sleep_s": 60.0}, deadline_s=60.0)
    assert time.monotonic() - began_s < 20.0
    alive.end()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_one_that_does_not_start_says_what_of(tmp_path):
    broken = Group(
        [spec("learner.0", "tests.remote.missing_process")],
        SETTINGS,
        LocalStarter(SETTINGS, tmp_path),
    )
    with pytest.raises(GroupLost, match=r"learner\.0") as caught:
        broken.start()
        broken.order("echo", {}, deadline_s=20.0)
    told = [str(caught.value), *broken.end()]  # whichever saw its end first
    assert "No module named tests.remote.missing_process" in "; ".join(told)
