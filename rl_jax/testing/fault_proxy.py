"""FaultProxy: a TCP hop between a driver and a server's process, at which a network breaks in the ways a network can.

Owns: its listening socket, the pairs of connections through it, and a thread for each direction. Faults, for the
connections that are there: `hold` lets nothing through and keeps what comes (a partition; `release` lets it flow
again), `half_close_after(n)` gives n more bytes to the process and then ends that direction only, `reset` breaks both.
New connections pass as long as nothing is held.
Must not: read what it carries.
"""

import contextlib
import socket
import struct
import threading

CHUNK, POLL_S = 1 << 16, 0.02


class FaultProxy:
    """Close it after both ends. Public methods from any thread."""

    def __init__(self, target: tuple[str, int]):
        """target: where connections go."""
        self._target = target
        self._flows = threading.Event()  # clear: nothing gets through
        self._flows.set()
        self._closing = threading.Event()
        self._left: int | None = None  # bytes to the process before its direction ends
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._start(self._accept)

    def hold(self) -> None:
        self._flows.clear()

    def release(self) -> None:
        self._flows.set()

    def half_close_after(self, num_bytes: int) -> None:
        """Of what goes to the process."""
        self._left = num_bytes

    def reset(self) -> None:
        """Both ends of every connection see it broken, without a farewell."""
        pairs, self._pairs = self._pairs, []
        for sock in (sock for pair in pairs for sock in pair):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        self._closing.set()
        self._flows.set()
        self._server.close()
        self.reset()

    def _start(self, run, *args) -> None:
        threading.Thread(target=run, args=args, name="fault-proxy", daemon=True).start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                process, _ = self._server.accept()
                driver = socket.create_connection(self._target)
            except OSError:
                continue  # closed, or nobody there
            self._pairs.append((process, driver))
            self._start(self._carry, driver, process, True)
            self._start(self._carry, process, driver, False)

    def _carry(self, source: socket.socket, target: socket.socket, to_process: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                while not self._flows.wait(POLL_S):
                    pass
                if to_process and self._left is not None and len(data) >= self._left:
                    target.sendall(data[: self._left])
                    self._left = None
                    break
                if to_process and self._left is not None:
                    self._left -= len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
