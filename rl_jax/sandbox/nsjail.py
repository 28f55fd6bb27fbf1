"""nsjail: the same isolation by another program, for machines that have it. "nsjail:/path/of/nsjail" names which.

    setpriv (a user of its own) -> nsjail (namespaces, mounts, seccomp) -> prlimit (limits) -> launcher.sh -> command

Its root is read-only by itself, and its tmpfs bounds the number of files too. It mounts over two folders in /tmp, named
by its user, and leaves them behind: empty, as the mounts were its own. A root process's sandboxes have a user each, so
theirs go when they end (a plain user's share two, which stay); `reap` takes those of processes that were killed.
"""

import contextlib
import glob
import os

from rl_jax.sandbox import identity, seccomp
from rl_jax.sandbox.host import PATH, find_program, read_only_paths
from rl_jax.sandbox.launch import launcher_words, limit_words
from rl_jax.sandbox.owner import SPARE_S
from rl_jax.sandbox.records import TEMP, WORK, Command, Ends, Job, SandboxMissing

REMEDY = "install it (github.com/google/nsjail), or name it: nsjail:/path/of/nsjail"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
UNKNOWN = frozenset({"umount2"})  # to its policy compiler
FOLDERS = ("/tmp/nsjail.{}.root", "/tmp/nsjail.{}.tmp")


class Nsjail:
    name = "nsjail"

    def __init__(self, arg: str = ""):
        """arg: the program's path; "" = found."""
        self._path = arg

    def check(self) -> None:
        if self._path and not os.access(self._path, os.X_OK):
            raise SandboxMissing(f"sandbox nsjail: {self._path} is no program; {REMEDY}")
        self._path = self._path or find_program(self.name, "nsjail", REMEDY)
        for program in ("setpriv", "prlimit", "bash"):
            find_program(self.name, program, f"install {program}")

    def command(self, job: Job, ends: Ends) -> Command:
        host = identity.host_id(ends.num)
        uid, gid = (os.getuid(), os.getgid()) if host is None else (host, host)
        limits, report = job.limits, str(ends.report)
        argv = [
            *identity.words(ends.num, find_program(self.name, "setpriv", "install util-linux")),
            "--pdeathsig", "KILL", self._path, "-Mo", "-Q", "--disable_rlimits", "--nice_level", "0",
            "--user", f"{identity.INSIDE}:{uid}:1", "--group", f"{identity.INSIDE}:{gid}:1",
            "--hostname", "sandbox", "--cwd", "/box", "--pass_fd", report,
            "--time_limit", str(int(limits.wall_s + SPARE_S)),
            *_mounts(limits.disk_bytes, limits.files),
            "--env", f"PATH={PATH}", "--env", f"HOME={WORK}", "--env", f"TMPDIR={TEMP}",
            "--env", "LANG=C.UTF-8", "--env", "PYTHONHASHSEED=0",
            "--seccomp_string", _policy(),
            "--", "/usr/bin/prlimit", *limit_words(limits)[1:], *launcher_words(job, ends, report),
        ]  # fmt: skip
        return Command(
            tuple(argv),
            descriptors=(ends.report,),
            environment={"PATH": PATH},
            leaves=_folders(host),
        )

    def reap(self) -> int:
        for path in glob.glob(FOLDERS[0].format("*")):
            host = path.split(".")[1]
            if not (host.isdigit() and identity.is_left(int(host))):
                continue
            for folder in _folders(int(host)):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        return 0


def _folders(host: int | None) -> tuple[str, ...]:
    """That nsjail leaves of a sandbox with a user of its own."""
    return () if host is None else tuple(folder.format(host) for folder in FOLDERS)


def _mounts(disk_bytes: int, files: int) -> list[str]:
    out = []
    for path, target in read_only_paths().items():
        out += ["--symlink", f"{target}:{path}"] if target else ["--bindmount_ro", path]
    for device in DEVICES:
        out += ["--bindmount", device]
    out += ["--symlink", "/proc/self/fd:/dev/fd", "--symlink", f"{TEMP}:/tmp"]
    return [*out, "--mount", f"none:/box:tmpfs:size={disk_bytes},nr_inodes={files},mode=0755"]


def _policy() -> str:
    """seccomp.py's, in the language of its compiler."""
    names = [name for name in seccomp.DENIED if name not in UNKNOWN]
    return (
        f"ERRNO({seccomp.EPERM}) {{ {', '.join(names)}, clone(flags) {{ (flags & {seccomp.CLONE_NEW}) != 0 }} }}"
        f" ERRNO({seccomp.ENOSYS}) {{ clone3 }} DEFAULT ALLOW"
    )
