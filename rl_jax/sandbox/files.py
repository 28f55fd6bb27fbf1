"""Files into and out of a sandbox: as tar archives in memory, never on the host's disk.

Invariants: what goes in is sealed, so that no program can write to it. What comes out is never unpacked on the host:
`read_files` gives the regular files' bytes, within bounds, and follows no link.
"""

import fcntl
import io
import os
import tarfile
from collections.abc import Mapping

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class BadSnapshot(ValueError):
    """A snapshot that is no whole tar archive."""


def pack(files: Mapping[str, bytes]) -> bytes:
    """A tar archive; b"" of no files."""
    if not files:
        return b""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def read_files(snapshot: bytes, max_bytes: int) -> dict[str, bytes]:
    """The regular files of a snapshot, path below the working directory -> content; links and devices are left out.

    Raises: BadSnapshot if it is no archive, or its files have more than max_bytes together.
    """
    out: dict[str, bytes] = {}
    size = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(snapshot)) as archive:
            for entry in archive:
                if not entry.isreg():
                    continue
                size += entry.size
                if size > max_bytes or entry.size < 0:
                    raise BadSnapshot(f"the files have more than {max_bytes} bytes")
                stream = archive.extractfile(entry)
                out[os.path.normpath(entry.name)] = stream.read() if stream else b""
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise BadSnapshot(str(error) or "no archive") from None
    return out


def sealed(*parts: bytes) -> int:
    """A descriptor at the start of an unnamed file that nobody can change any more; the caller closes it."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(descriptor, view) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
