"""Messages over a stream socket: a JSON header and raw arrays, cut into frames of bounded size. Never pickle.

A message is what an envelope (the channel's) and a body say, both JSON, and arrays: little-endian buffers whose dtype
(one of DTYPES) and shape stand in the header. A frame is a head (magic, kind, the message's number, size and crc32, and
the crc32 of these) and at most MAX_HEADER (of a header) or CHUNK bytes (of data). Data of one message comes in order;
frames of several messages may alternate, so that a gigabyte of weights holds up no heartbeat.
Invariants: what is read equals what was written, bit for bit, also over a network whose own checksums are weak; a
message that cannot be read is told as Refused and disturbs no other one, as long as the frames can be told apart; where
they cannot (a head that is damaged, a size beyond the limit) FramingError ends the stream.
Must not: know calls or records, wait with a deadline (who shuts the socket down wakes a reader or writer), or trust a
size before it is checked.
"""

import json
import math
import socket
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

MAGIC = b"rlJ1"
HEAD = struct.Struct("<4sBxxxIII")  # magic, kind, message, payload bytes, crc32 of the payload
FRAME = struct.Struct(f"<{HEAD.size}sI")  # the head, and its crc32
HEADER, DATA, CANCEL = 1, 2, 3
MAX_HEADER = 4 << 20  # bytes: 20,000 parameters' digests take half of it
CHUNK = 1 << 20  # bytes of one data frame: a millisecond on one host
MAX_ARRAYS = 1 << 16  # of one message
MAX_DIMS = 16
MAX_MESSAGE = 1 << 34  # bytes of one message's arrays; what is larger comes in several messages
MAX_OPEN = 8  # messages whose data is on its way

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name).newbyteorder("<")
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64",
    )
}  # fmt: skip


class FramingError(ConnectionError):
    """What came is no sequence of frames: the stream cannot be read any further."""


class Unsendable(ValueError):
    """A message that must not be sent: not JSON, an array's dtype, or beyond a limit."""


@dataclass(frozen=True)
class Message:
    envelope: Mapping[str, Any]
    body: Any
    arrays: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A message that came and could not be read. envelope: what its header said, if that could be read."""

    why: str
    envelope: Mapping[str, Any] | None = None


# --- writing -------------------------------------------------------------------------------------


def encode_json(value: Any) -> bytes:
    """ASCII JSON without a line break; lone surrogates as escapes. Raises: Unsendable (NaN, a type, the size)."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise Unsendable(f"cannot be JSON: {error}") from None
    if len(text) > MAX_HEADER // 2:
        raise Unsendable(f"takes {len(text)} bytes as JSON, the limit is {MAX_HEADER // 2}")
    return text


def plain_arrays(arrays: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """As host arrays, contiguous and little-endian. Raises: Unsendable."""
    out = []
    for given in arrays:
        array = np.asarray(given)
        name = array.dtype.newbyteorder("=").name
        if name not in DTYPES or array.ndim > MAX_DIMS:
            raise Unsendable(f"an array of {array.dtype}{list(array.shape)} cannot be sent")
        array = array.astype(DTYPES[name], copy=False)
        # ascontiguousarray makes a vector of a scalar.
        out.append(np.ascontiguousarray(array).reshape(array.shape))
    size = sum(array.nbytes for array in out)
    if len(out) > MAX_ARRAYS or size > MAX_MESSAGE:
        raise Unsendable(
            f"{len(out)} arrays of {size} bytes in all: the most are {MAX_ARRAYS} of {MAX_MESSAGE}; send several"
        )
    return tuple(out)


def frames(
    number: int, envelope: Mapping[str, Any], body: bytes, arrays: Sequence[np.ndarray]
) -> Iterator[tuple[bytes, memoryview]]:
    """(frame head, payload) of one message, to be written in order. body: of encode_json. arrays: of plain_arrays."""
    described = [[a.dtype.newbyteorder("=").name, list(a.shape)] for a in arrays]
    yield _frame(HEADER, number, encode_json([dict(envelope), described]) + b"\n" + body)
    for array in arrays:
        raw = memoryview(array.reshape(-1).view(np.uint8))
        for at in range(0, len(raw), CHUNK):
            yield _frame(DATA, number, raw[at : at + CHUNK])


def cancel_frame(number: int) -> tuple[bytes, memoryview]:
    """The rest of the message will not come."""
    return _frame(CANCEL, number, b"")


def _frame(kind: int, number: int, payload: Any) -> tuple[bytes, memoryview]:
    return frame_head(kind, number, len(payload), zlib.crc32(payload)), memoryview(payload)


def frame_head(kind: int, number: int, size: int, crc: int) -> bytes:
    """What comes before a payload of `size` bytes with this crc32."""
    head = HEAD.pack(MAGIC, kind, number, size, crc)
    return FRAME.pack(head, zlib.crc32(head))


# --- reading -------------------------------------------------------------------------------------


@dataclass
class _Open:
    """A message whose data is on its way."""

    envelope: Mapping[str, Any]
    body: Any
    arrays: list[np.ndarray]
    index: int = 0  # of the array that is filled now
    filled: int = 0  # bytes of it
    views: list[memoryview] = field(default_factory=list)

    def next_view(self, size: int) -> memoryview | None:
        """Where the next `size` bytes go; None if no array misses so many."""
        view = self.views[self.index] if self.index < len(self.views) else None
        if view is None or self.filled + size > len(view):
            return None
        return view[self.filled : self.filled + size]

    def advance(self, size: int) -> bool:
        """Whether all data has come, now that `size` bytes more have."""
        self.filled += size
        while self.index < len(self.views) and self.filled == len(self.views[self.index]):
            self.index, self.filled = self.index + 1, 0
        return self.index == len(self.views)


class Reader:
    """Messages that come over a socket; one thread."""

    def __init__(self, sock: socket.socket, on_frame: Callable[[], None] = lambda: None):
        """on_frame: called for every frame, whatever it is: a sign of life."""
        self._sock, self._on_frame = sock, on_frame
        self._open: dict[int, _Open] = {}
        self._head = bytearray(FRAME.size)
        self.num_stray = 0  # data frames of messages that were refused before

    def read(self) -> Message | Refused | None:
        """The next whole message, in the order in which they become whole; None at the end of the stream.

        Raises: FramingError; OSError of the socket.
        """
        while True:
            if not self._fill(memoryview(self._head), may_end=True):
                return None
            head, check = FRAME.unpack(self._head)
            magic, kind, number, size, crc = HEAD.unpack(head)
            limit = {HEADER: MAX_HEADER, DATA: CHUNK, CANCEL: 0}.get(kind, -1)
            if magic != MAGIC or size > limit or zlib.crc32(head) != check:
                raise FramingError(f"no frame begins with {bytes(self._head)!r}")
            self._on_frame()
            if kind == HEADER:
                whole = self._header(number, size, crc)
            elif kind == DATA:
                whole = self._data(number, size, crc)
            else:
                whole = None
                self._open.pop(number, None)
            if whole is not None:
                return whole

    def _header(self, number: int, size: int, crc: int) -> Message | Refused | None:
        payload = bytearray(size)
        self._fill(memoryview(payload))
        self._open.pop(number, None)
        if zlib.crc32(payload) != crc:
            return Refused("the checksum of a header differs")
        try:
            opened = _opened(bytes(payload))
        except _Malformed as error:
            return Refused(f"a header cannot be read: {error}", error.envelope)
        if opened.advance(0):
            return Message(opened.envelope, opened.body, tuple(opened.arrays))
        if len(self._open) >= MAX_OPEN:
            return Refused(f"more than {MAX_OPEN} messages are on their way", opened.envelope)
        self._open[number] = opened
        return None

    def _data(self, number: int, size: int, crc: int) -> Message | Refused | None:
        opened = self._open.get(number)
        view = None if opened is None else opened.next_view(size)
        payload = memoryview(bytearray(size)) if view is None else view
        self._fill(payload)
        if opened is None:
            self.num_stray += 1
            return None
        why = ""
        if view is None:
            why = "a message has more data than its header says"
        elif zlib.crc32(payload) != crc:
            why = "the checksum of an array's data differs"
        if why:
            del self._open[number]
            return Refused(why, opened.envelope)
        if not opened.advance(size):
            return None
        del self._open[number]
        return Message(opened.envelope, opened.body, tuple(opened.arrays))

    def _fill(self, view: memoryview, may_end: bool = False) -> bool:
        """Read until the view is full; False if the stream ends before its first byte, where it may."""
        done = 0
        while done < len(view):
            num = self._sock.recv_into(view[done:])
            if num == 0:
                if may_end and done == 0:
                    return False
                raise FramingError("the stream ends within a frame")
            done += num
        return True


class _Malformed(ValueError):
    def __init__(self, why: str, envelope: Mapping[str, Any] | None = None):
        super().__init__(why)
        self.envelope = envelope


def _opened(payload: bytes) -> _Open:
    """What a header says, with room for its arrays. Raises: _Malformed."""
    head, _, body = payload.partition(b"\n")
    try:
        envelope, described = _json(head)
    except (TypeError, ValueError) as error:
        raise _Malformed(f"{error}") from None
    if not isinstance(envelope, dict) or not isinstance(described, list):
        raise _Malformed("it is no envelope and list of arrays")
    try:
        arrays = _room(described)
        content = _json(body)
    except (TypeError, ValueError, MemoryError) as error:
        raise _Malformed(f"{error}", envelope) from None
    views = [memoryview(array.reshape(-1).view(np.uint8)) for array in arrays]
    return _Open(envelope, content, arrays, views=views)


def _json(text: bytes) -> Any:
    """Raises: ValueError, for the names of numbers that are none and for nesting without end too."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _room(described: Sequence[Any]) -> list[np.ndarray]:
    """Arrays to be filled. Raises: ValueError, TypeError, MemoryError."""
    if len(described) > MAX_ARRAYS:
        raise ValueError(f"{len(described)} arrays, the limit is {MAX_ARRAYS}")
    places, total = [], 0
    for item in described:
        name, shape = item
        if not isinstance(name, str) or name not in DTYPES:
            raise ValueError(f"dtype {name!r:.40} is not one of {', '.join(DTYPES)}")
        is_plain = isinstance(shape, list) and len(shape) <= MAX_DIMS
        if not is_plain or not all(type(n) is int and 0 <= n <= MAX_MESSAGE for n in shape):
            raise ValueError(f"{shape!r:.80} is no shape")
        total += math.prod(shape) * DTYPES[name].itemsize
        places.append((tuple(shape), DTYPES[name]))
    if total > MAX_MESSAGE:
        raise ValueError(f"{total} bytes of arrays, the limit is {MAX_MESSAGE}")
    return [np.empty(shape, dtype) for shape, dtype in places]
