"""The reaper: what has no owner any more, or is over its time, is ended; everything else is left alone."""

import os
import subprocess
import time

from rl_jax.sandbox import owner


def process(tag):
    """One with a tag among its words, as a sandbox's first process has."""
    return subprocess.Popen(["sh", "-c", "sleep 30 & wait", tag])


def gone_tag():
    """Of an owner that has ended."""
    with subprocess.Popen(["true"]) as gone:
        return owner.new_tag(60.0, 1).replace(f"/{os.getpid()}/", f"/{gone.pid}/")


def test_only_sandboxes_without_an_owner_or_over_time_are_ended(monkeypatch):
    mine = owner.new_tag(60.0, 1)
    parts = mine.split("/")
    others = {
        "gone": gone_tag(),
        "another process of that id": "/".join([*parts[:2], "1", *parts[3:]]),
        "over its time": "/".join([*parts[:3], "1", parts[4]]),
    }
    kept = {"mine": mine, "no tag": "rl_jax-sandbox/x/1/1/1", "more than a tag": f"x{gone_tag()}"}
    assert all(map(owner.is_over, others.values())) and not any(map(owner.is_over, kept.values()))
    processes = {name: process(tag) for name, tag in (others | kept).items()}
    pids, tagged = {one.pid for one in processes.values()}, owner.tagged
    # The reaper is the whole machine's, and other tests have sandboxes whose owner has just ended.
    monkeypatch.setattr(owner, "tagged", lambda: [pair for pair in tagged() if pair[0] in pids])
    try:
        assert (os.getpid(), mine) not in owner.tagged()
        assert (processes["mine"].pid, mine) in owner.tagged()
        assert not owner._end(processes["mine"].pid, others["gone"])  # the id is another's by now
        assert owner.reap() == len(others)
        for name in others:
            assert processes[name].wait(5) == -9, name
        time.sleep(0.05)
        assert [name for name in kept if processes[name].poll() is not None] == []
        assert owner.reap() == 0
    finally:
        for one in processes.values():
            subprocess.run(["pkill", "-9", "-P", str(one.pid)], check=False)
            one.kill()
            one.wait()


def test_a_tag_names_the_process_and_a_time_beyond_the_wall_clock_limit():
    _, pid, started, until_s, num = owner.new_tag(10.0, 7).split("/")
    assert (int(pid), int(started), int(num)) == (os.getpid(), owner.start_of(os.getpid()), 7)
    assert 10 < int(until_s) - time.monotonic() < 10 + owner.SPARE_S + 1
    assert owner.start_of(2**22 + 1) == 0
