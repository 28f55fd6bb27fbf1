"""As whom a sandbox runs on the host: never as root, and each sandbox of a root process as a user of its own.

The kernel does not hold RLIMIT_NPROC against root, whatever its id inside is, and counts processes by user: sandboxes
that share a user would starve each other. A plain user cannot become another; its sandboxes run as itself, apart by
namespaces.
"""

import os

FIRST, PER_PROCESS = 0x70000000, 64  # ids nobody has; a process's sandboxes at a time
MAX_PID = 1 << 22
INSIDE = 65534  # the id that programs see


def host_id(num: int) -> int | None:
    """The user and group id of a process's num-th sandbox; None: the process's own, which is not root's."""
    if os.geteuid() != 0:
        return None
    wanted = FIRST + (os.getpid() % MAX_PID) * PER_PROCESS + num % PER_PROCESS
    return _nearest(wanted, _ranges("uid") & _ranges("gid"))


def is_left(host: int) -> bool:
    """Whether it is the id of a sandbox whose process is gone. False where host_id had to take another than its own."""
    pid = (host - FIRST) // PER_PROCESS
    return 0 < pid < MAX_PID and not os.path.exists(f"/proc/{pid}")


def words(num: int, program: str = "setpriv") -> list[str]:
    """The command that drops to host_id(num) and gains no privilege again."""
    out = [program, "--no-new-privs"]
    if (host := host_id(num)) is not None:
        out += [f"--reuid={host}", f"--regid={host}", "--clear-groups"]
    return out


def _nearest(wanted: int, ranges: frozenset[tuple[int, int]]) -> int:
    """`wanted` where this user namespace has it, as a container's root has few ids; else one that it has, not 0."""
    if any(first <= wanted < end for first, end in ranges):
        return wanted
    first, end = max(ranges, key=lambda r: r[1] - r[0], default=(INSIDE, INSIDE + 1))
    size = min(end - max(first, 1), MAX_PID)
    return end - 1 - wanted % size if size > 0 else INSIDE


def _ranges(kind: str) -> frozenset[tuple[int, int]]:
    """Ids of this user namespace, from and to."""
    with open(f"/proc/self/{kind}_map", encoding="ascii") as file:
        rows = [[int(word) for word in line.split()] for line in file]
    return frozenset((first, first + size) for first, _, size in rows)
