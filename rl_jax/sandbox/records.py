"""The nouns of a sandbox: what is run, within which limits, what came of it, and what a backend must offer.

Must not: start anything.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

WORK, TEMP = "/box/work", "/box/tmp"  # inside: the working directory and home, and /tmp
MIN_MEMORY = 32 << 20  # below it, neither a shell nor tar starts
MAX_ARGUMENT = 100_000  # bytes of one argument; Linux takes 131,071
_NAME = re.compile(r"(?!/)(?!.*(?:^|/)\.\.?(?:/|$))[^\0]{1,200}")


class SandboxError(RuntimeError):
    """A sandbox that did not start, or whose own parts failed: nobody's program is to blame. One line."""


class SandboxMissing(SandboxError):
    """This machine has no such isolation; the line says why, and what to do."""


@dataclass(frozen=True)
class Limits:
    """Of one job, all its processes together unless it says otherwise."""

    wall_s: float = 10.0  # waits for a processor that is free aside, up to as much again
    cpu_s: int = 5  # of each process
    memory_bytes: int = 512 << 20  # address space of each process, and memory of all together
    processes: int = 32  # threads count
    file_bytes: int = 8 << 20  # of one file
    disk_bytes: int = 16 << 20  # of all files
    files: int = 4096  # that may exist
    output_bytes: int = 64 << 10  # kept of stdout, and of stderr

    def __post_init__(self):
        for name in (f.name for f in fields(self)):
            value, least = getattr(self, name), MIN_MEMORY if name == "memory_bytes" else 0
            if not least <= value < 1 << 50 or value == 0:
                limit = f"at least {least}" if least else "above 0"
                raise ValueError(f"sandbox limit {name}={value!r} must be {limit} and below 2**50")


@dataclass(frozen=True)
class Job:
    """One command in a sandbox of its own.

    Raises: ValueError for an empty command, an argument with a NUL or of more than MAX_ARGUMENT bytes, or a name of a
    file that is absolute, has .. in it, or is longer than 200 characters.
    """

    argv: tuple[str, ...]  # found on the sandbox's PATH; runs in WORK
    files: Mapping[str, bytes] = field(default_factory=dict)  # path below WORK -> content
    snapshot: bytes = b""  # Result.snapshot of an earlier job: its WORK, under `files`
    stdin: bytes = b""
    limits: Limits = field(default_factory=Limits)
    keeps_files: bool = False  # take a snapshot of WORK at the end

    def __post_init__(self):
        if not self.argv:
            raise ValueError("sandbox job without a command")
        for word in self.argv:
            size = len(word.encode("utf-8", "replace"))
            if "\0" in word or size > MAX_ARGUMENT:
                raise ValueError(
                    f"an argument of {size} bytes{', with a NUL,' if chr(0) in word else ''} is no argument; at most"
                    f" {MAX_ARGUMENT} bytes, none of them 0; put it into a file"
                )
        for name in self.files:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"sandbox file {name[:80]!r} must be a relative path without . or .."
                )


@dataclass(frozen=True)
class Result:
    """What the program did, in its own word: a program may print, exit and write as it likes.

    Limit "disk" is also that of a snapshot that cannot be put back: what a program left is its own doing.
    """

    status: int | None  # exit status; None = it was ended
    signal: int | None  # that ended it; as shells tell it, an exit status above 128 counts as one
    limit: (
        str  # which limit ended it: wall | cpu | memory | file | disk | files | output; "" = none
    )
    stdout: bytes  # the first Limits.output_bytes
    stderr: bytes
    dropped_bytes: int  # of both, beyond that
    snapshot: (
        bytes | None
    )  # tar of WORK, for Job.snapshot; None = not asked for, or ended before it was whole
    wall_s: float  # from before the start until everything was gone


@dataclass(frozen=True)
class Ends:
    """Where a backend leads the job's streams, beside stdin, stdout and stderr."""

    report: int  # descriptor that run.py's launcher reports on
    files_bytes: int  # of stdin, first: the tar of the job's files
    keeps_files: bool
    tag: str  # of the owner, in the command line (owner.py)
    num: int  # counts a process's jobs


class Backend(Protocol):
    name: str

    def check(self) -> None:
        """What can be told without running anything. Raises SandboxMissing."""
        ...

    def command(self, job: Job, ends: Ends) -> "Command": ...

    def reap(self) -> int:
        """End what processes that are gone left behind, beside processes; how many."""
        ...


@dataclass(frozen=True)
class Command:
    """What a backend starts. It gets no environment beyond `environment`, and no descriptor beyond `descriptors`."""

    argv: tuple[str, ...]
    descriptors: tuple[int, ...] = ()  # inherited
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""  # with a fifo `report`, which stands for Ends.report; removed at the end
    cleanup: tuple[str, ...] = ()  # a command that ends what killing the first one leaves
    closes: tuple[int, ...] = ()  # descriptors of this process, to be closed once it was started
    leaves: tuple[
        str, ...
    ] = ()  # empty folders that the program makes and forgets; removed at the end
