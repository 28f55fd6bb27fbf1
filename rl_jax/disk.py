"""Writes that fail by name, and a full disk told from other failures.

The interpreter names the file where an open fails and not where a write does; `naming` adds it. `disk_full` finds the
full disk behind an error; `existing` is where a path that is not there yet would lie.
Must not: retry, or delete anything.
"""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path | str) -> Generator[None, None, None]:
    """An OSError raised inside that names no file gets `path` as its filename."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


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
