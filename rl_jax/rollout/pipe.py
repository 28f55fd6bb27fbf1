"""Lines over a child's pipes on an event loop, and the child's stderr in a log. Nothing here blocks the loop.

LinePipe can be moved from one loop to another (detach, attach), which asyncio's own subprocess streams cannot: task
lists are fetched before the loop exists on which episodes will run.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO

MAX_LINE = 64 << 20  # bytes; a longer line ends the pipe
READ_SIZE = 1 << 18
LOG_TAIL = 8192  # bytes of a log kept for error messages
MAX_LOG = 64 << 20  # bytes of a log file: a child that prints without end must not fill the disk
DRAIN_S = 1.0  # for a dead child's last output to be read


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


class Log:
    """What a child prints: a bounded file once there is a run directory, and a tail for error messages.

    A thread of its own reads it, so a child can never block on printing.
    """

    def __init__(self, name: str, stream: IO[bytes]):
        self.name = name
        self._stream = stream
        self._lock = threading.Lock()
        self._tail = bytearray()
        self._file: BinaryIO | None = None
        self._num_written = 0
        self._thread = threading.Thread(target=self._pump, name=f"log-{name}", daemon=True)
        self._thread.start()

    def open(self, log_dir: Path) -> None:
        """From now on append to log_dir/NAME.log, starting with the tail so far. The same directory twice is one."""
        with self._lock:
            if self._file is None:
                log_dir.mkdir(parents=True, exist_ok=True)
                self._file = (log_dir / f"{self.name}.log").open("ab", buffering=0)
                self._num_written = self._file.tell()
                self._write(bytes(self._tail))

    def note(self, text: str) -> None:
        """The driver's own line in the child's log."""
        self._append(f"[rl_jax] {text}\n".encode("utf-8", "replace"))

    def tail(self) -> str:
        """The last output."""
        with self._lock:
            return self._tail.decode("utf-8", "replace")

    def last_line(self) -> str:
        lines = [line.strip() for line in self.tail().splitlines() if line.strip()]
        return f"its last output: {lines[-1][:300]!r}" if lines else "it printed nothing"

    def drain(self) -> None:
        """Wait for the rest of a dead child's output; not longer than DRAIN_S, should another process hold the pipe."""
        self._thread.join(DRAIN_S)

    def _pump(self) -> None:
        with self._stream:
            while data := os.read(self._stream.fileno(), READ_SIZE):
                self._append(data)
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _append(self, data: bytes) -> None:
        with self._lock:
            self._tail += data
            del self._tail[:-LOG_TAIL]
            self._write(data)

    def _write(self, data: bytes) -> None:
        if self._file is None or self._num_written > MAX_LOG:
            return
        self._num_written += len(data)
        note = b"\n[log ends: its size limit is reached]\n" if self._num_written > MAX_LOG else b""
        try:
            self._file.write(data + note)
        except OSError:
            # Logs are dropped when the disk is full; ledger and checkpoints decide whether the run goes on.
            self._num_written = MAX_LOG + 1
