"""Exporter: GET /metrics of one process, on a thread of its own; stdlib only.

Owns: the socket and what it answers. Invariants: on loopback it needs no token, beyond that always one (compared in
constant time); a page of a browser is not answered (asgi.refusal); a reader that is slow or does not end has READ_S and
MAX_READERS at once, others are told 503; a source that fails is a 500, logged, and nothing else stops.
Must not: wait for a part of the run, or write a token anywhere.
"""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rl_jax import asgi
from rl_jax.asgi import NO_TOKEN, is_loopback, knows, refusal
from rl_jax.exposition import CONTENT_TYPE

LOG = logging.getLogger(__name__)

READ_S = 5.0  # for a request to come, and its answer to be read
MAX_READERS = 8


class Exporter:
    """`source` gives the text; called on a reader's thread."""

    def __init__(self, host: str, port: int, source: Callable[[], str], token: str = ""):
        """port: 0 = any that is free. Raises: OSError if it cannot be had; ValueError: open to others, and no token."""
        if not token and not is_loopback(host):
            raise ValueError(
                f"metrics.host={host} is open to others; give metrics.token_file, or use 127.0.0.1"
            )
        self._server = _Server((host, port), source, token.encode("ascii"))
        self.address = (host, int(self._server.server_address[1]))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(READ_S)


def open_exporter(scrape: Mapping[str, Any], source: Callable[[], str]) -> Exporter | None:
    """As spec.Spec.scrape says, {} = none. A port that cannot be had is told in the log, and costs nothing else."""
    if not scrape:
        return None
    try:
        token = read_token(scrape["token_file"])
        exporter = Exporter(scrape["host"], scrape["port"], source, token)
    except (OSError, ValueError) as error:
        LOG.warning("no metrics at %s:%s: %s", scrape["host"], scrape["port"], error)
        return None
    LOG.info("metrics at http://%s:%d/metrics", *exporter.address)
    return exporter


def read_token(path: str) -> str:
    """ "" = none; else one word, as scrapers send it. Raises: ValueError."""
    token = asgi.read_token(path, "metrics.token_file")
    if len(token.split()) > 1:
        raise ValueError(f"metrics.token_file={path} must hold one line with one word")
    return token


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], source: Callable[[], str], token: bytes):
        self.source, self.token = source, token
        self._free = threading.BoundedSemaphore(MAX_READERS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        try:
            request.settimeout(READ_S)
            request.sendall(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        except OSError:
            pass  # gone already
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        LOG.info("a reader of metrics ended", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = READ_S
    server_version, sys_version = "rl_jax", ""

    @property
    def _own(self) -> _Server:
        assert isinstance(self.server, _Server)
        return self.server

    def do_GET(self) -> None:
        headers = {
            k.lower().encode("latin-1"): v.encode("latin-1", "replace")
            for k, v in self.headers.items()
        }
        if (why := refusal(headers, bool(self._own.token))) is not None:
            self._say(403, why)
        elif not knows(headers, self._own.token):
            self._say(401, NO_TOKEN)
        elif self.path.partition("?")[0] != "/metrics":
            self._say(404, "there is /metrics")
        else:
            try:
                text = self._own.source()
            except Exception:  # the boundary to the scraper
                LOG.warning(
                    "the metrics could not be told", exc_info=True, extra={"kind": "metrics"}
                )
                self._say(500, "it failed; the log says how")
            else:
                self._say(200, text, CONTENT_TYPE)

    def log_message(self, format: str, *args: Any) -> None:
        """Not in the log: scrapers come every few seconds."""

    def _say(self, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = (text if text.endswith("\n") else text + "\n").encode()
        self.send_response(status)
        for name, value in (
            ("content-type", kind),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
