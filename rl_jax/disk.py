"""Writes that fail by name, files that only grow, and a full disk told from other failures.

The interpreter names the file where an open fails and not where a write does; `naming` adds it. `open_lines` goes on
with a file of lines whose writer may have died in the last one. `disk_full` finds the full disk behind an error;
`existing` is where a path that is not there yet would lie.
Must not: retry, or delete anything but a torn line.
"""

import errno
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOG = logging.getLogger(__name__)
TAIL_BYTES = 1 << 16  # read at a time, from the end; most lines are shorter


@contextmanager
def naming(path: Path | str) -> Generator[None, None, None]:
    """An OSError raised inside that names no file gets `path` as its filename."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def open_lines(path: Path | str) -> TextIO:
    """A file of lines, to append to; a torn last line is cut first. Its owner alone may call this. Raises OSError."""
    cut_torn_line(path)
    return open(path, "a", encoding="utf-8")


def cut_torn_line(path: Path | str) -> None:
    """Cut what follows the last newline, with a warning: the process that wrote it died in it, and the next line would
    be glued to it. Nothing happens to a file that is not there. Raises OSError."""
    path = Path(path)
    if not path.exists():
        return
    with naming(path), open(path, "rb+") as file:
        size = start = file.seek(0, os.SEEK_END)
        whole = 0  # bytes up to and with the last newline
        while start and not whole:
            end, start = start, max(start - TAIL_BYTES, 0)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            whole = 0 if found < 0 else start + found + 1
        if whole < size:
            file.truncate(whole)
            LOG.warning("%s: cut a torn last line of %d bytes", path, size - whole)


def existing(path: Path | str) -> Path:
    """The path, or the nearest of its parents that exists."""
    path = Path(path).absolute()
    return next(
        p for p in (path, *path.parents) if os.path.exists(p)
    )  # False too where we may not look


def disk_full(error: BaseException | None) -> OSError | None:
    """The error of a full disk (or quota) that is `error` or led to it; None if there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error
        error = error.__cause__ or error.__context__
    return None
