"""A job in a sandbox: what comes back, what is left of it, and what is told where it cannot run."""

import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rl_jax.sandbox import owner, watch
from rl_jax.sandbox.files import BadSnapshot, read_files
from rl_jax.sandbox.records import Ends, Job, Limits, SandboxError
from rl_jax.sandbox.run import Sandbox
from rl_jax.sandbox.text import readable

LIMITS = Limits(wall_s=20.0)


def shell(script, **more):
    return Job(("sh", "-c", script), limits=more.pop("limits", LIMITS), **more)


def census():
    """What of this machine a sandbox could leave behind."""
    return {
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "temporary files": {
            n for n in os.listdir("/tmp") if n.startswith(("rl_jax-s", "bwrap", "nsjail"))
        },
        "descriptors": len(os.listdir("/proc/self/fd")),
        "sandboxes": [pid for pid, tag in owner.tagged() if f"/{os.getpid()}/" in tag],
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "threads": threading.active_count(),
    }


@pytest.mark.slow
def test_streams_status_and_signal_come_back(backend):
    result = backend.run(shell("cat; echo out; echo err >&2; exit 3", stdin=b"in\n"))
    assert (result.stdout, result.stderr) == (b"in\nout\n", b"err\n")
    assert (result.status, result.signal, result.limit) == (3, None, "")
    result = backend.run(shell("kill -SEGV $$"))
    assert (result.status, result.signal, result.limit) == (None, 11, "")
    assert backend.run(Job(("echo", "\ud835é"), limits=LIMITS)).stdout == "?é\n".encode()
    result = backend.run(Job(("no_such_program",), limits=LIMITS))
    assert result.status == 127 and b"no_such_program" in result.stderr


@pytest.mark.slow
def test_stdin_is_no_way_to_memory_of_this_process(bubblewrap):
    """It is an unnamed file; nobody can make it larger, by any way to it."""
    script = "for p in /proc/self/fd/0 /dev/stdin; do (echo more >> $p) 2>/dev/null && echo wrote; done; cat"
    assert bubblewrap.run(shell(script, stdin=b"in\n")).stdout == b"in\n"


@pytest.mark.slow
def test_work_goes_from_job_to_job_as_it_was_left(backend):
    first = backend.run(
        shell("mkdir d; mv a d/b; ln -s d/b link; chmod +x d/b", files={"a": b"#!/bin/sh\necho hi\n"}, keeps_files=True)
    )  # fmt: skip
    second = backend.run(
        shell("./link; cat new", files={"new": b"n"}, snapshot=first.snapshot, keeps_files=True)
    )
    assert second.stdout == b"hi\nn" and second.snapshot
    assert read_files(second.snapshot, 1 << 20) == {"d/b": b"#!/bin/sh\necho hi\n", "new": b"n"}
    with pytest.raises(BadSnapshot, match="more than 10 bytes"):
        read_files(second.snapshot, 10)
    with pytest.raises(BadSnapshot):
        read_files(b"x" * 1024, 1 << 20)


HUNTER = """
import os, signal, time
for i in range(12):
    with open(f"{i}", "wb") as file:
        file.write(os.urandom(1 << 20))
if os.fork() == 0:
    os.setsid()
    while True:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if open(f"/proc/{pid}/comm").read() == "tar\\n":
                    os.kill(int(pid), signal.SIGKILL)
            except OSError:
                pass
time.sleep(0.2)
"""


@pytest.mark.slow
def test_processes_that_a_program_leaves_do_not_touch_its_files(backend):
    """Here one ends whatever would send them."""
    result = backend.run(Job(("python3", "-c", HUNTER), limits=LIMITS, keeps_files=True))
    assert result.limit == "" and result.snapshot
    assert set(read_files(result.snapshot, 16 << 20)) == {str(i) for i in range(12)}


@pytest.mark.slow
def test_what_a_program_left_and_cannot_be_put_back_is_its_own_doing(backend):
    left = backend.run(shell("mkdir a; echo x > a/b", keeps_files=True)).snapshot
    result = backend.run(shell("echo ran", snapshot=left, files={"a": b"x"}))
    assert (result.limit, result.stdout, result.status) == ("disk", b"", None)


@pytest.mark.slow
def test_an_end_by_a_limit_keeps_no_files_and_the_output_so_far(bubblewrap):
    limits = replace(LIMITS, wall_s=0.5)
    result = bubblewrap.run(shell("echo so far; touch a; sleep 9", limits=limits, keeps_files=True))
    assert (result.limit, result.stdout, result.snapshot) == ("wall", b"so far\n", None)
    assert 0.5 <= result.wall_s < 3.0


@pytest.mark.slow
@pytest.mark.parametrize("waited_s, took_s", [(0.0, 0.3), (0.2, 0.5), (60.0, 0.6)])
def test_waits_for_a_processor_are_not_counted_up_to_a_bound(
    waited_s, took_s, bubblewrap, monkeypatch
):
    monkeypatch.setattr(watch, "waited_s", lambda pids: waited_s)
    result = bubblewrap.run(shell("sleep 9", limits=replace(LIMITS, wall_s=0.3)))
    assert result.limit == "wall" and took_s <= result.wall_s < took_s + 3.0


@pytest.mark.slow
def test_a_process_that_others_keep_from_running_has_waited():
    spin = [sys.executable, "-c", "while True: pass"]
    processor = min(os.sched_getaffinity(0))
    both = [subprocess.Popen(["taskset", "-c", str(processor), *spin]) for _ in range(2)]
    idle = subprocess.Popen(["sleep", "60"])
    try:
        deadline_s = time.monotonic() + 20
        while watch.waited_s([both[0].pid]) < 0.1 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert watch.waited_s([idle.pid, both[0].pid]) >= 0.1 > watch.waited_s([])
    finally:
        for process in (*both, idle):
            process.kill()
            process.wait()


@pytest.mark.slow
def test_output_is_whole_up_to_its_limit_and_counted_beyond(bubblewrap):
    every = bytes(range(256))
    limits = replace(LIMITS, output_bytes=1000)
    script = "import os; os.write(1, bytes(range(256)) * 8); os.write(2, b'e' * 10)"
    result = bubblewrap.run(Job(("python3", "-c", script), limits=limits))
    assert result.stdout == (every * 8)[:1000] and result.stderr == b"e" * 10
    assert result.dropped_bytes == 2048 - 1000 and result.limit == ""


def test_readable_output_has_no_escapes_and_says_what_is_missing():
    said = readable(b"\x1b[31mred\x1b[0m \x1b]0;title\x07ok\x00\x9b\xff\tline\r\nend\x08", 100)
    assert said == "red ok\ufffd\ufffd\ufffd\tline\nend\ufffd"
    assert readable(b"a" * 30 + b"b" * 30, 20) == (
        "a" * 10 + "\n... 40 characters left out ...\n" + "b" * 10
    )


@pytest.mark.parametrize(
    ("argv", "files", "said"),
    [
        ((), {}, "without a command"),
        (("a\0b",), {}, "with a NUL"),
        (("x" * 200_000,), {}, "at most 100000 bytes"),
        (("true",), {"/etc/x": b""}, "relative path"),
        (("true",), {"a/../../x": b""}, "relative path"),
        (("true",), {"": b""}, "relative path"),
    ],
)
def test_a_job_that_cannot_be_is_refused(argv, files, said):
    with pytest.raises(ValueError, match=said):
        Job(argv, files=files)


@pytest.mark.parametrize("limit", [{"wall_s": 0}, {"processes": -1}, {"memory_bytes": 1 << 20}])
def test_a_limit_that_bounds_nothing_is_refused(limit):
    (name,) = limit
    with pytest.raises(ValueError, match=f"sandbox limit {name}="):
        Limits(**limit)


@pytest.mark.slow
def test_what_did_not_start_is_nobodys_result(bubblewrap):
    """Files that do not fit are a fault of who asked for them, told as such."""
    limits = replace(LIMITS, disk_bytes=4096)
    with pytest.raises(SandboxError, match="did not start its program"):
        bubblewrap.run(Job(("true",), files={"big": b"x" * 100_000}, limits=limits))


class Broken:
    """A backend whose program fails."""

    name = "broken"

    def __init__(self, backend):
        self._backend = backend

    def command(self, job, ends):
        command = self._backend.command(job, ends)
        return replace(command, argv=("sh", "-c", "echo cannot make a namespace >&2; exit 1"))


def test_a_backend_that_fails_is_told_by_its_own_words(bubblewrap):
    before = census()
    with pytest.raises(SandboxError, match=r"exit 1\): cannot make a namespace"):
        Sandbox(Broken(bubblewrap._backend)).run(shell("true"))
    assert census() == before


@pytest.mark.slow
def test_threads_run_sandboxes_of_their_own_at_once(bubblewrap):
    """Each as a user of its own, so that the limit of processes of one does not count the others'."""
    limits = replace(LIMITS, processes=12)
    found = {}

    def run(i):
        script = "sleep 0.3 & sleep 0.3 & sleep 0.3 & wait; echo $?"
        found[i] = bubblewrap.run(shell(script, limits=limits))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [found[i].stdout for i in range(8)] == [b"0\n"] * 8


@pytest.mark.slow(seconds=4)
def test_many_sandboxes_leave_no_process_mount_or_file(backend, request, capsys):
    num = int(request.config.getoption("--num_sandboxes"))
    backend.run(shell("true"))
    before, seconds = census(), []
    for i in range(num):
        # Every fifth is killed, with a child that has a session of its own.
        script = (
            "setsid sleep 60 & sleep 60" if i % 5 == 4 else "echo x > a; setsid sleep 60 & true"
        )
        limits = replace(LIMITS, wall_s=0.1 if i % 5 == 4 else 20.0)
        result = backend.run(shell(script, limits=limits, files={"b": b"x"}))
        seconds += [result.wall_s] * (i % 5 != 4)
        assert result.limit == ("wall" if i % 5 == 4 else "")
    assert census() == before
    with capsys.disabled():
        print(f"\n{num} sandboxes, those not killed: p50 {statistics.median(seconds) * 1e3:.1f} ms")


DRIVER = """
import threading
from rl_jax.sandbox.load import open_sandbox
from rl_jax.sandbox.records import Job, Limits
sandbox = open_sandbox("bubblewrap")
job = Job(("sh", "-c", "setsid sleep 50 & sleep 50"), limits=Limits(wall_s=60.0))
for _ in range({num}):
    threading.Thread(target=sandbox.run, args=(job,)).start()
print("started", flush=True)
"""


@pytest.mark.slow
def test_a_sandbox_that_nobody_answers_does_not_run_its_program(bubblewrap):
    """Its owner died before it was told to end with it: here the answer never comes, and the link ends."""
    ours, theirs = socket.socketpair()
    job = shell("echo ran; sleep 60")
    command = bubblewrap._backend.command(
        job, Ends(theirs.fileno(), 0, False, owner.new_tag(9.0, 1), 1)
    )
    argv = [
        word for word in command.argv if word not in ("--pdeathsig", "KILL", "--die-with-parent")
    ]
    with subprocess.Popen(
        argv, env={**command.environment}, pass_fds=command.descriptors,
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
    ) as live:  # fmt: skip
        for descriptor in command.closes:
            os.close(descriptor)
        theirs.close()
        assert ours.recv(1) == b"R"
        ours.close()
        assert live.communicate(timeout=20)[0] == b""


NUMBERED = """
import os, socket, subprocess
from rl_jax.sandbox import owner
from rl_jax.sandbox.load import open_sandbox
from rl_jax.sandbox.records import Ends, Job, Limits
ours, theirs = socket.socketpair()
os.dup2(theirs.fileno(), {number})
theirs.close()
job = Job(("echo", "ran"), limits=Limits(wall_s=60.0))
ends = Ends({number}, 0, False, owner.new_tag(60.0, 1), 1)
command = open_sandbox("bubblewrap")._backend.command(job, ends)
live = subprocess.Popen(
    command.argv, env={{**command.environment}}, pass_fds=command.descriptors,
    stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
)
os.close({number})
assert ours.recv(1) == b"R"
ours.send(b"G")
print(live.communicate(timeout=20)[0], live.returncode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [5, 7, 8, 9, 10, 11, 63])
def test_the_number_of_the_descriptor_to_report_to_does_not_matter(bubblewrap, number):
    """The launcher has numbers of its own, 8 and 9, and bash keeps what it saves from 10 on."""
    done = subprocess.run(
        [sys.executable, "-c", NUMBERED.format(number=number)],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout == "b'ran\\n' 0\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.02, 0.04, 0.08])
def test_kill_of_the_driver_leaves_no_sandbox_that_was_just_starting(bubblewrap, after_s):
    """Whatever its sandboxes were at: none runs a program, and none waits for good."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(num=12)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as driver:  # fmt: skip
        assert driver.stdout and driver.stdout.readline() == b"started\n"
        time.sleep(after_s)
        driver.kill()
    deadline_s = time.monotonic() + 10
    while left := [pair for pair in owner.tagged() if f"/{driver.pid}/" in pair[1]]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.02)


@pytest.mark.slow(seconds=3)
def test_kill_of_the_driver_leaves_no_sandbox(bubblewrap, request):
    num = int(request.config.getoption("--num_sandboxes")) // 5
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(num=num)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )  # fmt: skip
    assert driver.stdout and driver.stdout.readline() == b"started\n"
    mark = f"/{driver.pid}/"

    def live():
        return {tag for _, tag in owner.tagged() if mark in tag}

    deadline_s = time.monotonic() + 20
    while len(live()) < num and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert len(live()) == num
    driver.kill()
    driver.wait()
    deadline_s = time.monotonic() + 10
    while live() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert live() == set()
    driver.stdout.close()
