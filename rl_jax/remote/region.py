"""Regions of memory that one process writes and others of its host read: how a bucket of weights gets to them without a
socket.

A Region is an anonymous file in memory (memfd_create). It has no name that could be left behind and lies in no file
system whose size could be too small (/dev/shm); it is gone with the last process that holds it, however that ends. A
reader opens it through /proc/PID/fd for the time of one bucket, which the kernel allows to processes of the same user
that see the writer's PID; a key in the region tells whether what it opened is what was meant.
Layout: HEADER bytes that hold the key and the stamp, then the arrays in order, each at a multiple of ALIGN.
Life of a bucket: 1 `fill` takes the stamp away, writes the arrays, and stamps them (sync, version, bucket, turn of this
region, length, checksum). 2 The reader is told the stamp over its channel. 3 `take` copies the arrays out, and compares
the whole header before and after with the stamp it was told, and the checksum with that of its copy.
Invariants: a reader gets what it was told of or an error (Torn, NotHere), never a mixture or an older bucket, whatever
the writer does meanwhile; it gets a copy, as JAX may use host memory it is given in place; readers cannot write or
change the size (seals); the memory is there before anything is written, or the region is not (NoRoom).
Must not: know channels, servers or syncs, or decide when a region may be written again (carriers.py, store_process.py).
"""

import contextlib
import fcntl
import json
import math
import mmap
import os
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rl_jax.remote.framing import DTYPES

NAME = "rl_jax-weights"  # of the anonymous files, for a person who looks into /proc
MAGIC = b"rlJshm1\n"
KEY_SIZE = 16  # bytes
HEADER = 4096  # bytes: a page
ALIGN = 64  # bytes: what JAX uses in place on a CPU, so that the reader's copy is the only one
CHUNK = 1 << 20  # bytes copied and summed at once: they stay in a core's cache
SPARE = 256 << 20  # bytes of memory that a new region must leave to the host
# Linux's numbers, which the fcntl module has not in all versions of Python.
F_ADD_SEALS, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 1033, 0x2, 0x4, 0x10

Box = tuple[tuple[int, int], ...]  # per dimension [start, stop) of a part in the whole array
Described = Sequence[Sequence[Any]]  # [name, dtype, shape] of each array


class NoRoom(OSError):
    """The host has not the memory for a region, or gives none."""


class NotHere(RuntimeError):
    """What was told is no region that this process can open: another host, PID namespace or user, or it is gone."""


class Torn(RuntimeError):
    """The region holds something else than what was told, or did before the copy was whole."""


@dataclass(frozen=True)
class Stamp:
    """What lies in a region."""

    sync_id: str
    version: int
    bucket: int
    turn: int  # rises with every bucket of this region
    length: int  # bytes behind the header
    checksum: int


@dataclass(frozen=True)
class Part:
    """A piece of one array: where it belongs, and its elements."""

    name: str
    box: Box
    data: Any  # np.ndarray, or a jax.Array of one device


# --- arrays and where they lie -------------------------------------------------------------------


def describe(arrays: Mapping[str, Any]) -> list[list[Any]]:
    """[name, dtype, shape] of each, as JSON. Raises: ValueError for a dtype that is none of framing.DTYPES."""
    out = []
    for name, array in arrays.items():
        dtype = np.dtype(array.dtype).newbyteorder("=").name
        if dtype not in DTYPES:
            raise ValueError(f"{name} is of {array.dtype}, which processes do not exchange")
        out.append([name, dtype, list(array.shape)])
    return out


def shards(arrays: Mapping[str, Any]) -> list[list[Part]]:
    """The arrays in disjoint parts, shard by shard: what one device of theirs holds and no one before it."""
    by_device: dict[int, list[Part]] = {}
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            box = tuple((0, size) for size in np.shape(array))
            by_device.setdefault(-1, []).append(Part(name, box, np.asarray(array)))
            continue
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                box = tuple(s.indices(size)[:2] for s, size in zip(shard.index, array.shape))
                by_device.setdefault(shard.device.id, []).append(Part(name, box, shard.data))
    return [by_device[device] for device in sorted(by_device)]


def _places(described: Described) -> dict[str, "_Place"]:
    """Where each array lies, in order."""
    places, at = {}, 0
    for name, dtype, shape in described:
        places[name] = _Place(at, DTYPES[dtype], tuple(shape))
        at += places[name].room
    return places


def length_of(described: Described) -> int:
    """Bytes that the arrays take in a region, behind its header."""
    return sum(place.room for place in _places(described).values())


@dataclass(frozen=True)
class _Place:
    at: int  # behind the header
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes until the next one."""
        return -(-self.size // ALIGN) * ALIGN

    def view(self, room: np.ndarray) -> np.ndarray:
        """The array that lies in u8[room]."""
        return room[: self.size].view(self.dtype).reshape(self.shape)


def _sum(chunk: np.ndarray) -> int:
    """Of u8[8 n], as 64-bit words."""
    return int(np.add.reduce(chunk.view(np.uint64), dtype=np.uint64))


def _checksum(sums: Sequence[int]) -> int:
    """Of the sums of all arrays' chunks: five times as fast as a crc32 of the bytes, and no mixture of two buckets
    passes."""
    return zlib.crc32(np.array(sums, "<u8").tobytes())


def _header(key: bytes, stamp: Stamp) -> bytes:
    text = json.dumps(asdict(stamp), sort_keys=True).encode("ascii")
    assert len(text) < HEADER - len(MAGIC) - KEY_SIZE, "a stamp has some hundred bytes"
    return (MAGIC + key + text).ljust(HEADER, b"\0")


# --- writing -------------------------------------------------------------------------------------


def free_bytes() -> int:
    """Memory that this process could still take, by what the host has and what its cgroup may."""
    free = [_meminfo("MemAvailable")]
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = f"/sys/fs/cgroup{'/memory' if controllers else ''}"
            for folder in (f"{root}{path}", root):
                names = ("memory.max", "memory.current")
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else names
                limit, used = (_number(f"{folder}/{name}") for name in names)
                if limit is not None and used is not None:
                    free.append(limit - used + _reclaimable(f"{folder}/memory.stat"))
    return max(0, min(free))


def _reclaimable(path: str) -> int:
    """Bytes that a cgroup counts as used and the kernel takes back when they are asked for: cached files."""
    rows = dict(line.split(" ", 1) for line in _lines(path))
    return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _number(path: str) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdecimal() else None


def _meminfo(name: str) -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 1 << 62  # not told: what is asked for will show


class Region:
    """One that this process writes; one thread at a time."""

    def __init__(self, size: int, free: int | None = None):
        """size: bytes behind the header. free: memory that may be counted on, if that is less than there is.

        Raises: NoRoom, one line.
        """
        self.size = size
        free = min(free_bytes(), 1 << 62 if free is None else free)
        if size + HEADER + SPARE > free:
            raise NoRoom(
                f"a region of {size:,} bytes does not fit: {free:,} bytes of memory are free, of which"
                f" {SPARE:,} are left alone"
            )
        self._key, self._turn, self._fd = secrets.token_bytes(KEY_SIZE), 0, -1
        try:
            self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, HEADER + size)
            os.posix_fallocate(self._fd, 0, HEADER + size)  # else a write could find no page
            self._map = mmap.mmap(self._fd, HEADER + size)
        except OSError as error:
            if self._fd >= 0:
                os.close(self._fd)
            raise NoRoom(
                f"a region of {size:,} bytes does not come to be: {error.strerror}"
            ) from None
        fcntl.fcntl(self._fd, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW)
        with contextlib.suppress(OSError):  # before Linux 5.1; the stamps hold without it
            fcntl.fcntl(self._fd, F_ADD_SEALS, SEAL_FUTURE_WRITE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._bytes[: len(MAGIC) + KEY_SIZE] = np.frombuffer(MAGIC + self._key, np.uint8)

    @property
    def address(self) -> dict[str, Any]:
        """Where processes of this host find it, as JSON."""
        return {"pid": os.getpid(), "fd": self._fd, "key": self._key.hex()}

    def begin(self) -> None:
        """What lies there counts no more."""
        self._turn += 1
        self._bytes[len(MAGIC) + KEY_SIZE : HEADER] = 0

    def write(self, described: Described, parts: Sequence[Part]) -> None:
        """After `begin`, part by part. Raises: ValueError for what does not fit."""
        if length_of(described) > self.size:
            raise ValueError(f"{length_of(described)} bytes in a region of {self.size}")
        places = _places(described)
        for part in parts:
            whole = places[part.name].view(self._bytes[HEADER + places[part.name].at :])
            here, data = whole[(*(slice(*r) for r in part.box), ...)], np.asarray(part.data)
            if here.dtype != data.dtype or here.shape != data.shape:
                raise ValueError(
                    f"{data.dtype}{list(data.shape)} is no part {part.box} of {part.name}"
                )
            here[...] = data

    def stamp(self, sync_id: str, version: int, bucket: int, described: Described) -> Stamp:
        """After all parts: from now on it is a bucket."""
        sums, length = [], 0
        for place in _places(described).values():
            held = self._bytes[HEADER + place.at : HEADER + place.at + place.room]
            sums += [_sum(held[at : at + CHUNK]) for at in range(0, place.room, CHUNK)]
            length += place.room
        stamp = Stamp(sync_id, version, bucket, self._turn, length, _checksum(sums))
        self._bytes[:HEADER] = np.frombuffer(_header(self._key, stamp), np.uint8)
        return stamp

    def fill(self, sync_id: str, version: int, bucket: int, arrays: Mapping[str, Any]) -> Stamp:
        """All of it. arrays: of the host, or jax.Arrays, sharded or not."""
        described = describe(arrays)
        self.begin()
        for parts in shards(arrays):
            self.write(described, parts)
        return self.stamp(sync_id, version, bucket, described)

    def told(self, stamp: Stamp, described: Described) -> dict[str, Any]:
        """What a reader must be told, as JSON."""
        return {"at": self.address, "stamp": asdict(stamp), "arrays": list(described)}

    def close(self) -> None:
        """The memory is free once no reader is left in it. Once more is nothing."""
        if self._fd >= 0:
            del self._bytes
            self._map.close()
            os.close(self._fd)
            self._fd = -1


# --- reading -------------------------------------------------------------------------------------


def reach(address: Mapping[str, Any]) -> None:
    """Raises: NotHere, saying why, where this process cannot read the region."""
    with _opened(address):
        pass


def take(told: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a bucket, in memory of their own. told: of Region.told. Raises: NotHere, Torn."""
    stamp, described = Stamp(**told["stamp"]), told["arrays"]
    if length_of(described) != stamp.length:
        raise ValueError(f"arrays of {length_of(described)} bytes are told as {stamp.length}")
    what = f"bucket {stamp.bucket} of sync {stamp.sync_id}"
    header = _header(bytes.fromhex(told["at"]["key"]), stamp)
    taken, sums = {}, []
    with _opened(told["at"]) as fd:
        if os.pread(fd, HEADER, 0) != header:
            raise Torn(f"{what} is not, or no more, in its region")
        for name, place in _places(described).items():
            # An allocation each: the allocator has most of them from the version before, pages and all.
            room = np.empty(place.room + ALIGN, np.uint8)
            start = -room.ctypes.data % ALIGN
            room = room[start : start + place.room]
            for at in range(0, place.room, CHUNK):
                chunk = room[at : at + CHUNK]
                if os.preadv(fd, [chunk], HEADER + place.at + at) != len(chunk):
                    raise Torn(f"the region of {what} is too short")
                sums.append(_sum(chunk))
            taken[name] = place.view(room)
        if os.pread(fd, HEADER, 0) != header:
            raise Torn(f"{what} was written over while it was read")
    if _checksum(sums) != stamp.checksum:
        raise Torn(f"the checksum of {what} differs")
    return taken


@contextlib.contextmanager
def _opened(address: Mapping[str, Any]) -> Iterator[int]:
    path = f"/proc/{int(address['pid'])}/fd/{int(address['fd'])}"
    try:
        # Opening anything else than a region could do something.
        if not os.readlink(path).startswith(f"/memfd:{NAME} "):
            raise NotHere(f"{path} is no region")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotHere(f"there is no region at {path}: {error.strerror}") from None
    try:
        known = MAGIC + bytes.fromhex(address["key"])
        if not stat.S_ISREG(os.fstat(fd).st_mode) or os.pread(fd, len(known), 0) != known:
            raise NotHere(f"{path} is another region")
        yield fd
    finally:
        os.close(fd)
