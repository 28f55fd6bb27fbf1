"""The processes of one sandbox as the host sees them: what they hold, and their end.

Owns: nothing; all is read from /proc. Invariant: `end` returns when the sandbox's first process is gone, and with it,
as a PID namespace ends with its first process, all others.
"""

import os
import re
import select
import signal
import time

_HELD = re.compile(rb"^(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB", re.M)


def descendants(pid: int) -> list[int]:
    """All processes below one, parents first."""
    out, queue = [], [pid]
    while queue:
        for child in _children(queue.pop(0)):
            out.append(child)
            queue.append(child)
    return out


def held_bytes(pids: list[int]) -> int:
    """Memory that processes hold of their own: what is backed by files of the host is not counted."""
    return sum(_held(pid) for pid in pids)


def waited_s(pids: list[int]) -> float:
    """Seconds that the process which waited longest for a processor was ready to run and did not."""
    return max(map(_waited_s, pids), default=0.0)


def num_files(first: int, path: str) -> int:
    """Files on the file system at an absolute path of a sandbox; 0 where that may not be asked."""
    try:
        found = os.statvfs(f"/proc/{first}/root{path}")
    except OSError:
        return 0
    return found.f_files - found.f_ffree


def open_first(outer: int) -> int | None:
    """A descriptor of the sandbox's first process, which the caller closes; None where it is gone."""
    return next((d for pid in _children(outer) if (d := _open(pid)) is not None), None)


def is_gone(descriptor: int, patience_s: float) -> bool:
    """Whether a process is, within patience_s."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * patience_s)))


def end(outer: int, patience_s: float) -> bool:
    """Kill the sandbox below `outer`, a child that is not reaped yet; whether it is gone within patience_s."""
    # The first process below is that of the PID namespace; `outer` ends by itself once it is gone.
    descriptors = [d for pid in _children(outer) if (d := _open(pid)) is not None]
    try:
        for descriptor in descriptors:
            _kill(descriptor)
        if not descriptors:
            os.kill(outer, signal.SIGKILL)
        deadline_s = time.monotonic() + patience_s
        return all(is_gone(d, deadline_s - time.monotonic()) for d in descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _held(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return 1024 * sum(int(number) for number in _HELD.findall(file.read()))
    except OSError:
        return 0


def _waited_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):  # it is gone, or the kernel does not count
        return 0.0


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _kill(descriptor: int) -> None:
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has just ended
