"""Files of JSON lines that somebody may still be writing, read piece by piece.

Invariants: a line is taken once its newline is there, so a torn last line waits and is no fault; a line that is not a
JSON object, or is longer than MAX_LINE, is counted and told by its number, and reading goes on behind it; memory is
bounded by one chunk and one line, whatever the file holds; a file that became shorter is read anew from its start.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
MAX_LINE = 4 << 20  # bytes; a row of 1,000 metrics has 40,000


class LineFile:
    """Sole owner of how far a file was read. Not for several threads at once."""

    def __init__(
        self, path: Path, take: Callable[[dict[str, Any]], None], reset: Callable[[], None]
    ):
        """take(record): of each new line, in order; reset(): everything taken is void, the file begins anew."""
        self.path, self._take, self._reset = path, take, reset
        self.num_bad = 0
        self.first_bad = ""  # where and why
        self.num_lines = 0
        self._offset = 0
        self._held = b""  # of a line whose end is not there
        self._is_long = False  # the line under way is passed over
        self._identity: tuple[int, int] | None = None  # device and inode

    def read(self) -> None:
        """Take what is new. A file that is not there has no lines. Raises OSError, of one that may not be read."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            stat = os.fstat(file.fileno())
            identity = (stat.st_dev, stat.st_ino)
            if self._identity not in (None, identity) or stat.st_size < self._offset:
                self._begin()
            self._identity = identity
            file.seek(self._offset)
            while chunk := file.read(CHUNK):
                self._offset += len(chunk)
                self._feed(chunk)

    def fault(self) -> str:
        """One line of what could not be read; "" where all could."""
        if not self.num_bad:
            return ""
        return f"{self.path.name}: {self.num_bad} of {self.num_lines} lines cannot be read ({self.first_bad})"

    def _begin(self) -> None:
        self.num_bad = self.num_lines = self._offset = 0
        self.first_bad, self._held, self._is_long = "", b"", False
        self._reset()

    def _feed(self, chunk: bytes) -> None:
        *lines, rest = (self._held + chunk).split(b"\n")
        for line in lines:
            self.num_lines += 1
            if self._is_long:
                self._is_long = False
                continue
            self._line(line)
        if len(rest) > MAX_LINE and not self._is_long:
            self._is_long = True
            self._bad(self.num_lines + 1, f"longer than {MAX_LINE} bytes")
        self._held = b"" if self._is_long else rest

    def _line(self, line: bytes) -> None:
        if not line.strip():
            return
        if len(line) > MAX_LINE:
            self._bad(self.num_lines, f"longer than {MAX_LINE} bytes")
            return
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"a {type(record).__name__}, not an object")
            self._take(record)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._bad(self.num_lines, f"{type(error).__name__}: {str(error)[:120]}")

    def _bad(self, number: int, why: str) -> None:
        self.num_bad += 1
        if not self.first_bad:
            self.first_bad = f"first line {number}: {why}"


def read_object(path: Path, max_bytes: int = MAX_LINE) -> tuple[dict[str, Any], str]:
    """(the JSON object of a small file, "") or ({}, why not); a file that is not there is ({}, "")."""
    try:
        with open(path, "rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            return {}, f"{path.name} is longer than {max_bytes} bytes and is not shown"
        found = json.loads(raw)
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name} cannot be read ({type(error).__name__}: {str(error)[:120]})"
    if not isinstance(found, dict):
        return {}, f"{path.name} is a {type(found).__name__}, not an object"
    return found, ""
