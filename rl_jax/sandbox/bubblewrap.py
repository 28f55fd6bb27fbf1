"""bubblewrap: namespaces made by one unprivileged program, the backend that everything was measured with.

    setpriv (a user of its own) -> bwrap (namespaces, mounts, seccomp) -> prlimit (limits) -> launcher.sh -> the command

Invariants
    bwrap starts with an environment of PATH alone: process 1 inside is bwrap itself, and /proc/1/environ shows it.
    Nothing but /box is writable, and that has a size: bwrap makes / and /dev as tmpfs without one, so both are made
    read-only. /dev/shm is read-only too: POSIX semaphores of programs fail.
    It binds itself to its owner's thread (--die-with-parent), and nothing does before: a bwrap that is killed between
    making its first process and telling it to go on leaves that one waiting for good. Until then the launcher's
    unanswered report is the end.
    RLIMIT_NPROC is set inside the user namespace, which counts the processes of this sandbox alone (Linux 5.14).
"""

import re
import subprocess

from rl_jax.sandbox import identity, seccomp
from rl_jax.sandbox.files import sealed
from rl_jax.sandbox.host import PATH, find_program, read_only_paths
from rl_jax.sandbox.launch import launcher_words, limit_words
from rl_jax.sandbox.records import TEMP, WORK, Command, Ends, Job, SandboxMissing

MIN_VERSION = (0, 8)  # --size and --disable-userns
REMEDY = "install it: apt-get install bubblewrap"


class Bubblewrap:
    name = "bubblewrap"

    def __init__(self, arg: str = ""):
        """Raises ValueError: it has no variants."""
        if arg:
            raise ValueError(f"sandbox bubblewrap:{arg}: bubblewrap takes nothing behind a colon")

    def check(self) -> None:
        for program, remedy in {
            "bwrap": REMEDY,
            "setpriv": "install util-linux",
            "prlimit": "install util-linux",
            "bash": "install bash",
        }.items():
            find_program(self.name, program, remedy)
        told = subprocess.run(
            [find_program(self.name, "bwrap", REMEDY), "--version"],
            capture_output=True, text=True, timeout=10, env={}, check=False,
        ).stdout  # fmt: skip
        version = tuple(int(n) for n in re.findall(r"\d+", told)[:2])
        if version < MIN_VERSION:
            raise SandboxMissing(
                f"sandbox bubblewrap: {told.strip() or 'bwrap'} is older than 0.8, which bounds disk and namespaces;"
                " install a newer one, or use another backend"
            )
        if not seccomp.is_known():
            raise SandboxMissing(
                "sandbox bubblewrap: no seccomp filter is known for this processor; use sandbox container"
            )

    def command(self, job: Job, ends: Ends) -> Command:
        rules = sealed(seccomp.program())
        inner = [*limit_words(job.limits), *launcher_words(job, ends, str(ends.report))]
        argv = [
            *identity.words(ends.num, find_program(self.name, "setpriv", "install util-linux")),
            find_program(self.name, "bwrap", REMEDY),
            *_isolation(),
            *_mounts(job.limits.disk_bytes),
            "--clearenv", "--setenv", "PATH", PATH, "--setenv", "HOME", WORK,
            "--setenv", "TMPDIR", TEMP, "--setenv", "LANG", "C.UTF-8",
            "--setenv", "PYTHONHASHSEED", "0",
            "--seccomp", str(rules), "--", *inner,
        ]  # fmt: skip
        return Command(
            tuple(argv),
            descriptors=(ends.report, rules),
            environment={"PATH": PATH},
            closes=(rules,),
        )

    def reap(self) -> int:
        return 0


def _isolation() -> list[str]:
    inside = str(identity.INSIDE)
    return [
        "--unshare-all", "--unshare-user", "--disable-userns", "--uid", inside, "--gid", inside,
        "--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
    ]  # fmt: skip


def _mounts(disk_bytes: int) -> list[str]:
    out = []
    for path, target in read_only_paths().items():
        out += ["--symlink", target, path] if target else ["--ro-bind", path, path]
    return [
        *out, "--proc", "/proc", "--dev", "/dev",
        "--size", str(disk_bytes), "--tmpfs", "/box", "--dir", WORK, "--dir", TEMP,
        "--symlink", TEMP.lstrip("/"), "/tmp",
        "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK,
    ]  # fmt: skip
