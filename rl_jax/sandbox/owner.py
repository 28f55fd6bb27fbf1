"""Whose a sandbox is, how long it may live, and the end of those that nobody ends any more.

Every sandbox has its owner's tag among the words of its command line, which a reaper reads in /proc: the process that
made it, when that started (ids are used again), and until when it may live. A sandbox ends with the thread that made it
(PDEATHSIG); `reap` ends those that came between two instructions, and those whose owner is stopped, after their time.

Must not: signal a process that has no tag. A program that puts a tag into its own command line ends nobody but itself.
"""

import os
import re
import signal
import time
from collections.abc import Iterator

SPARE_S = 30.0  # beyond its wall clock limit
_TAG = re.compile(r"rl_jax-sandbox/(\d+)/(\d+)/(\d+)/\d+")


def new_tag(wall_s: float, num: int) -> str:
    """Of a sandbox that this process makes now, its num-th."""
    pid, until_s = os.getpid(), time.monotonic() + wall_s + SPARE_S  # one clock for all processes
    return f"rl_jax-sandbox/{pid}/{start_of(pid)}/{until_s:.0f}/{num}"


def start_of(pid: int) -> int:
    """When a process started, in clock ticks since the boot; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def is_over(tag: str) -> bool:
    """Whether a tag's owner is gone or its time is over. A text that is no tag is not over."""
    found = _TAG.fullmatch(tag)
    if not found:
        return False
    pid, started, until_s = (int(number) for number in found.groups())
    return start_of(pid) != started or time.monotonic() > until_s


def tagged() -> Iterator[tuple[int, str]]:
    """(process, tag) of all sandboxes' first processes that this one can see."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (tag := _tag_of(int(entry))):
            yield int(entry), tag


def reap() -> int:
    """End every sandbox whose owner is gone or whose time is over. Returns how many processes got a signal."""
    num = 0
    for pid, tag in tagged():
        if is_over(tag):
            num += _end(pid, tag)
    return num


def _tag_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    return next((word for word in words if _TAG.fullmatch(word)), "")


def _end(pid: int, tag: str) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if _tag_of(pid) != tag:  # its id is another's by now
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
