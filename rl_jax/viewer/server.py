"""The page and its answers over HTTP on loopback.

Invariants: it listens on loopback alone, and answers only requests whose Host is loopback and whose Origin, if any, is
its own (rl_jax/asgi.py says why); only GET; a policy forbids the page everything but its own files and answers: no
inline code, nothing from elsewhere, no frame; a client that reads slowly or sends nothing is let go after TIMEOUT_S.
Must not: serve a file of the run as it is, or any path beyond PAGE_FILES.
"""

import gzip
import socket
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from rl_jax.asgi import refusal
from rl_jax.viewer.api import Api, Refusal, to_json

PAGE = Path(__file__).parent / "page"
SCRIPTS = (
    "core.js",
    "curves.js",
    "list.js",
    "episode.js",
    "more.js",
    "main.js",
)  # in the order in which they run
STYLE, HTML = "view.css", "index.html"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
PAGE_FILES = {"/": HTML, **{f"/{name}": name for name in (STYLE, *SCRIPTS)}}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TIMEOUT_S = 30.0
MAX_TARGET = 16_000  # characters of a request's target
ZIPPED = 4096  # bytes from which an answer is compressed
MAX_THREADS = 32  # requests at once


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rl_jax", ""
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        headers = {
            k.lower().encode("latin-1"): v.encode("latin-1", "replace")
            for k, v in self.headers.items()
        }
        if (why := refusal(headers, has_token=False)) is not None or b"host" not in headers:
            self._send(403, to_json({"error": why or "a request without Host"}), "application/json")
            return
        if len(self.path) > MAX_TARGET:
            self._send(
                414,
                to_json({"error": f"a target of more than {MAX_TARGET} characters"}),
                "application/json",
            )
            return
        target = urlsplit(self.path)
        if (name := PAGE_FILES.get(target.path)) is not None:
            self._send(200, (PAGE / name).read_bytes(), TYPES[Path(name).suffix])
            return
        place = target.path.removeprefix("/api/")
        if place == target.path:
            self._send(
                404, to_json({"error": "nothing is here; the page is at /"}), "application/json"
            )
            return
        self._answer(
            place, dict(parse_qsl(target.query, keep_blank_values=True, max_num_fields=50))
        )

    def do_HEAD(self) -> None:
        self._send(405, b"", "text/plain")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD

    def _answer(self, place: str, asked: Mapping[str, str]) -> None:
        server = self.server
        assert isinstance(server, Server), "it made this handler"
        try:
            with server.room:
                status, body = 200, to_json(server.api.answer(place, asked))
        except Refusal as error:
            status, body = error.status, to_json({"error": error.detail})
        except (
            Exception
        ) as error:  # boundary: a file of a form nobody thought of must not end the viewer
            status, body = 500, to_json({"error": f"{type(error).__name__}: {str(error)[:300]}"})
        self._send(status, body, "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.close_connection = self.close_connection or status >= 400
        self.send_response(status)
        if len(body) >= ZIPPED and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what a browser asks is of no interest in the terminal."""


class Server(ThreadingHTTPServer):
    """Serves one Api until close()."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, api: Api, port: int = 0, host: str = "127.0.0.1"):
        """port 0: any. Raises OSError: it is taken."""
        self.api, self.room = api, threading.BoundedSemaphore(MAX_THREADS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is no fault of the viewer; anything else is told."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)
