"""A link of bounded speed between processes of one host: a TCP proxy that counts what crosses it.

All connections share the speed, each direction for itself, as they would a network card's. Bytes are counted when they
are passed on.
"""

import contextlib
import socket
import threading
import time

PIECE = 1 << 14  # bytes passed on at once


class SlowLink:
    """Listens on `address` as soon as it is made, and passes on to `target`."""

    def __init__(self, target: tuple[str, int], bytes_per_s: float):
        self.target, self.bytes_per_s = target, bytes_per_s
        self.down_bytes = self.up_bytes = 0  # from the target, and to it
        self._lock = threading.Lock()
        self._free_s = {"down": 0.0, "up": 0.0}  # when the direction has passed on what it took
        self._socks: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = ("127.0.0.1", self._listening.getsockname()[1])
        threading.Thread(target=self._accept, name="slow-link", daemon=True).start()

    def close(self) -> None:
        """End it, and every connection with it."""
        with self._lock:
            socks, self._socks = self._socks, []
        for sock in (self._listening, *socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                guest, _ = self._listening.accept()
                host = socket.create_connection(self.target)
                with self._lock:
                    self._socks += [guest, host]
                for pair, way in (((guest, host), "up"), ((host, guest), "down")):
                    run = threading.Thread(target=self._pass, args=(*pair, way), daemon=True)
                    run.start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                time.sleep(self._turn(way, len(data)))
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _turn(self, way: str, size: int) -> float:
        """Seconds until this piece may go."""
        with self._lock:
            now = time.monotonic()
            begins_s = max(now, self._free_s[way])
            self._free_s[way] = begins_s + size / self.bytes_per_s
            if way == "up":
                self.up_bytes += size
            else:
                self.down_bytes += size
            return max(0.0, self._free_s[way] - now)
