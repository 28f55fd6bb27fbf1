"""Lines over a child's pipes on an event loop, which nothing here blocks.

LinePipe can be moved from one loop to another (detach, attach), which asyncio's own subprocess streams cannot: task
lists are fetched before the loop exists on which episodes will run.
"""

import asyncio
import os
from collections.abc import Callable
from typing import IO

MAX_LINE = 64 << 20  # bytes; a longer line ends the pipe
READ_SIZE = 1 << 18


class LinePipe:
    """Newline-framed bytes to and from two file descriptors, which it owns. One thread at a time."""

    def __init__(self, writer: IO[bytes], reader: IO[bytes]):
        self._writer, self._reader = writer, reader
        self._in, self._out = writer.fileno(), reader.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._unsent = bytearray()
        self._received = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_line: Callable[[bytes], None] = lambda line: None
        self._on_end: Callable[[], None] = lambda: None

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_line: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        """Deliver lines on this loop. on_end: once, when the other side closed or sent a line beyond MAX_LINE."""
        self._loop, self._on_line, self._on_end = loop, on_line, on_end
        loop.add_reader(self._out, self._read)
        if self._unsent:
            loop.add_writer(self._in, self._flush)

    def detach(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._out)
            self._loop.remove_writer(self._in)
            self._loop = None

    def send(self, line: bytes) -> None:
        """Write what the pipe takes now; the rest when it takes more."""
        is_waiting = bool(self._unsent)
        self._unsent += line
        if not is_waiting:
            self._flush()

    def drain(self) -> None:
        """Deliver what has arrived, now."""
        while self._loop is not None and self._read():
            pass

    def close_writer(self) -> None:
        """End the other side's input."""
        self.detach()
        self._writer.close()

    def close(self) -> None:
        self.close_writer()
        self._reader.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._in, self._unsent)]
        except BlockingIOError:
            if self._loop is not None:
                self._loop.add_writer(self._in, self._flush)
            return
        except BrokenPipeError:
            self._unsent.clear()  # the reader will see the end
        if self._loop is not None:
            self._loop.remove_writer(self._in)

    def _read(self) -> bool:
        """False when nothing is there to be read."""
        try:
            data = os.read(self._out, READ_SIZE)
        except BlockingIOError:
            return False
        self._received += data
        if not data or (b"\n" not in data and len(self._received) > MAX_LINE):
            self.detach()
            self._on_end()
            return False
        if b"\n" in data:
            *lines, rest = bytes(self._received).split(b"\n")
            self._received = bytearray(rest)
            for line in lines:
                self._on_line(line)
        return True
