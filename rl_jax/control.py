"""The control file of a run: lines by which somebody steers it while it runs, and how both sides handle them.

    {"seq": 3, "time": ..., "who": "ann@host", "attempt": 0, "verb": "set", "key": "eval.every", "value": 10}

Owns: control.jsonl in the run directory. Whoever may write the directory may steer; nobody else can.
Invariants: a line is written whole, under a lock of the operating system, with the next number; numbers only rise. A
command is for one attempt, and no other one obeys it. A reader sees whole lines only, each once, and reads a bounded
number of bytes at a time; a line that cannot be read is told with why, never skipped in silence.
Must not: know what a verb does (steering.py), or import jax.
"""

import fcntl
import getpass
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CONTROL = "control.jsonl"
VERBS = ("pause", "resume", "stop", "save", "set")
MAX_LINE = 4096  # bytes
MAX_READ = 1 << 16  # bytes of one poll
TEXT_CHARS = 200  # of a text that is shown to people


@dataclass(frozen=True)
class Command:
    seq: int
    time: float  # seconds since the epoch, when it was sent
    who: str
    attempt: int
    verb: str
    key: str = ""  # of set
    value: Any = None  # of set: a number, a text, true or false
    wrong: str = ""  # why it cannot be obeyed, where the line itself is at fault


def send(run_dir: Path | str, attempt: int, verb: str, key: str = "", value: Any = None) -> Command:
    """Append one command for this attempt; returns it with its number. Raises: OSError; ValueError: too long."""
    path = Path(run_dir) / CONTROL
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        seq = 1 + max((c.seq for c in map(_parse, text.splitlines())), default=0)
        command = Command(seq, round(time.time(), 3), sender(), attempt, verb, key, value)
        fields = {k: v for k, v in asdict(command).items() if k != "wrong"}
        line = json.dumps(fields, allow_nan=False).encode("ascii") + b"\n"
        if len(line) > MAX_LINE:
            raise ValueError(f"the command has {len(line)} bytes; at most {MAX_LINE} are read")
        torn = b"\n" if text and not text.endswith(b"\n") else b""  # its writer died in it
        os.write(file.fileno(), torn + line)
        os.fsync(file.fileno())
    return command


def sender() -> str:
    """user@host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no name for this number
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Reader:
    """The run's end. Not thread-safe."""

    def __init__(self, run_dir: Path | str, attempt: int):
        self._path, self._attempt = Path(run_dir) / CONTROL, attempt
        self._offset = self._last_seq = 0

    def poll(self) -> list[Command]:
        """New commands of this attempt, in order, with `wrong` where one cannot be obeyed. Never raises."""
        try:
            with open(self._path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._offset = self._offset if self._offset <= size else 0  # cut by hand
                if size == self._offset:
                    return []
                file.seek(self._offset)
                text = file.read(MAX_READ)
        except OSError:  # not there, or for the moment not readable
            return []
        whole = text.rfind(b"\n") + 1
        if not whole and len(text) == MAX_READ:
            whole = MAX_READ  # no line is that long: it goes, in pieces that are told
        self._offset += whole
        found = [_parse(line) for line in text[:whole].splitlines() if line.strip()]
        return [self._checked(c) for c in found if c.wrong or c.attempt >= self._attempt]

    def _checked(self, command: Command) -> Command:
        if command.wrong:
            return command
        wrong = ""
        if command.seq <= self._last_seq:
            wrong = (
                f"seq is {command.seq}, and {self._last_seq} was read already: numbers only rise"
            )
        elif command.attempt != self._attempt:
            wrong = f"it is for attempt {command.attempt}, and this is attempt {self._attempt}"
        self._last_seq = max(self._last_seq, command.seq)
        return Command(**{**asdict(command), "wrong": wrong})


def _parse(line: bytes) -> Command:
    """Of anything that may stand in the file."""
    wrong = lambda why: Command(0, 0.0, "", 0, "", wrong=f"not a command ({why})")
    if len(line) > MAX_LINE:
        return wrong(f"{len(line)} bytes, at most {MAX_LINE}")
    try:
        said = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return wrong("not JSON")
    if not isinstance(said, Mapping):
        return wrong("not an object")
    for name, kinds in (("seq", int), ("attempt", int), ("verb", str), ("who", str)):
        if not isinstance(said.get(name), kinds) or isinstance(said.get(name), bool):
            return wrong(f"{name} is missing or of another type")
    sent, key, value = said.get("time", 0.0), said.get("key", ""), said.get("value")
    if not isinstance(sent, (int, float)) or not isinstance(key, str):
        return wrong("time or key is of another type")
    if value is not None and not isinstance(value, (bool, int, float, str)):
        return wrong("value is neither a number nor a text")
    who, verb = printable(said["who"]), printable(said["verb"])
    return Command(said["seq"], float(sent), who, said["attempt"], verb, printable(key), value)


def printable(text: str) -> str:
    """Somebody else's text in one line without control characters, cut."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:TEXT_CHARS])
    return shown + ("..." if len(text) > TEXT_CHARS else "")


def _no_constant(name: str) -> Any:
    raise ValueError(name)
