"""Listener: the driver's end of links over TCP. One thread shakes hands with who connects, and gives those that are
expected to whoever expects them.

Owns: the listening socket, connections under way to a handshake (at most MAX_HALF_OPEN), and which attempts of which
servers were ever expected.
Life of a guest: 1 it connects, and gets a nonce. 2 It has HANDSHAKE_S to send its claim and proof (link.py). 3 One that
is wrong in any way is hung up on without a word; one that proved itself is told why it is refused, or is given to
whoever expects it.
Invariants: an attempt is linked once, and never after it was withdrawn; a guest takes no memory beyond its claim's
limit, and no time of another guest but a moment of one thread; every guest counts once, under what became of it.
Must not: start, end or speak with a process; tell anybody the secret.
"""

import contextlib
import hmac
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_jax.remote.link import (
    CLAIM,
    HANDSHAKE_S,
    MAGIC,
    MAX_CLAIM,
    NONCE_SIZE,
    PROOF_SIZE,
    address_text,
    answer_bytes,
    proof,
    tune,
)

MAX_HALF_OPEN = 32
SEND_S = 1.0  # for an answer, which fits in any socket's buffer
MAX_REMEMBERED = 1 << 12  # attempts that are over, of one server; the latest
CLOSE_S = 5.0
REFUSALS = ("crowded", "slow", "gone", "garbage", "unproved", "unknown", "duplicate", "late")

log = logging.getLogger(__name__)


class _Refused(Exception):
    """What becomes of a guest. again: it may be let in later."""

    def __init__(self, kind: str, why: str, again: bool = False):
        super().__init__(why)
        self.kind, self.again = kind, again


@dataclass(eq=False)
class Expected:
    """An attempt that is awaited: made by Listener.expect, and to be ended by `withdraw`."""

    listener: "Listener"
    server: str
    attempt: str
    by_name: bool  # whether its process must name the attempt
    told: Mapping[str, Any]
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _sock: socket.socket | None = None
    _is_over: bool = False

    def link(self, timeout_s: float) -> socket.socket | None:
        """The socket of its process, once; None if it has not come by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._sock is not None, timeout_s)
            sock, self._sock = self._sock, None
            return sock

    def withdraw(self) -> None:
        """Nobody waits for it any more: what comes now is late."""
        self.listener.forget(self)
        with self._changed:
            self._is_over = True
            if self._sock is not None:
                self._sock.close()
                self._sock = None

    def give(self, sock: socket.socket) -> None:
        """Of the listener's thread."""
        with self._changed:
            if self._is_over:
                sock.close()
                return
            self._sock = sock
            self._changed.notify_all()


@dataclass(eq=False)
class _Guest:
    sock: socket.socket
    where: str
    nonce: bytes
    end_s: float
    got: bytearray = field(default_factory=bytearray)
    size: int = CLAIM.size  # of what is to come, as far as it is known


class Listener:
    """Listens as soon as it is made. Public methods from any thread."""

    def __init__(self, host: str, port: int, secret: bytes, servers: Iterable[str]):
        """port: 0 = any that is free. servers: all there will ever be. Raises: OSError naming the address."""
        self._secret, self._servers = secret, frozenset(servers)
        self._lock = threading.Lock()
        self._awaited: dict[str, Expected] = {}  # by server
        self._linked: dict[str, Expected] = {}  # until withdrawn
        self._retired: set[str] = set()  # of which no process is awaited any more
        self._over: dict[str, deque[str]] = {
            name: deque(maxlen=MAX_REMEMBERED) for name in self._servers
        }  # attempts
        self._came: set[str] = set()
        self._counters: Counter[str] = Counter(dict.fromkeys(("linked", *REFUSALS), 0))
        self._guests: dict[socket.socket, _Guest] = {}
        self._closing = False
        try:
            family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._sock = socket.create_server((host, port), family=family, backlog=MAX_HALF_OPEN)
        except OSError as error:
            where = address_text(host, port)
            raise OSError(f"cannot listen on cluster.host:port = {where}: {error}") from None
        self._sock.setblocking(False)
        self.address: tuple[str, int] = (host, self._sock.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def expect(
        self, server: str, attempt: str, told: Mapping[str, Any], *, by_name: bool
    ) -> Expected:
        """From now on a process of the server may come, and is told this. by_name: only one that names the attempt."""
        if server not in self._servers:
            raise ValueError(f"{server!r} is none of {', '.join(sorted(self._servers))}")
        expected = Expected(self, server, attempt, by_name, {**told, "attempt": attempt})
        with self._lock:
            if server in self._awaited or server in self._linked:
                raise ValueError(f"{server} is awaited, or linked, already")
            self._awaited[server] = expected
        return expected

    def forget(self, expected: Expected) -> None:
        """By Expected.withdraw."""
        with self._lock:
            for table in (self._awaited, self._linked):
                if table.get(expected.server) is expected:
                    del table[expected.server]
                    self._over[expected.server].append(expected.attempt)

    def retire(self, server: str) -> None:
        """No process of it is awaited any more: one that comes is told so, and does not try again."""
        with self._lock:
            self._retired.add(server)

    def missing(self) -> list[str]:
        """Servers of which no process ever came."""
        with self._lock:
            return sorted(self._servers - self._came)

    def stats(self) -> dict[str, int]:
        """Guests by what became of them: linked, or why not."""
        return dict(self._counters)

    def close(self) -> None:
        """Hang up on guests, and listen no more. Links live on. Once more is nothing."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):  # the thread saw it by itself
            self._wake.send(b"x")
        self._thread.join(CLOSE_S)
        refused = {kind: num for kind in REFUSALS if (num := self._counters[kind])}
        if refused:
            log.warning("connections that were refused, by cause: %s", refused)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._sock, self._wake, self._woken:
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in selector.select(self._patience_s()):
                    if key.fileobj is self._sock:
                        self._accept(selector)
                    elif key.fileobj is not self._woken and isinstance(key.fileobj, socket.socket):
                        self._serve(selector, self._guests[key.fileobj])
                now = time.monotonic()
                for guest in [g for g in self._guests.values() if g.end_s <= now]:
                    slow = _Refused("slow", f"no handshake within {HANDSHAKE_S:g} s")
                    self._refuse(selector, guest, slow)
            for sock in self._guests:
                sock.close()

    def _patience_s(self) -> float | None:
        ends = [guest.end_s for guest in self._guests.values()]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, address = self._sock.accept()
        except OSError as error:  # it went away again, or there are no descriptors
            log.warning("a connection could not be taken: %s", error)
            time.sleep(0.01)  # the same may be told at once again
            return
        where, nonce = address_text(*address[:2]), secrets.token_bytes(NONCE_SIZE)
        guest = _Guest(sock, where, nonce, time.monotonic() + HANDSHAKE_S)
        try:
            if len(self._guests) >= MAX_HALF_OPEN:
                raise _Refused("crowded", f"{MAX_HALF_OPEN} others are shaking hands")
            sock.setblocking(False)
            tune(sock)
            sock.send(MAGIC + nonce)  # always fits
        except (_Refused, OSError) as error:
            self._count(guest, error)
            sock.close()
            return
        self._guests[sock] = guest
        selector.register(sock, selectors.EVENT_READ)

    def _serve(self, selector: selectors.BaseSelector, guest: _Guest) -> None:
        """What a guest sent; at most its claim is ever read."""
        try:
            data = guest.sock.recv(guest.size - len(guest.got))
            if not data:
                raise _Refused("gone", "it hung up")
            guest.got += data
            if len(guest.got) == CLAIM.size == guest.size:
                magic, _, size = CLAIM.unpack(guest.got)
                if magic != MAGIC or not 0 < size <= MAX_CLAIM:
                    raise _Refused("garbage", "what it sends is no claim")
                guest.size += size + PROOF_SIZE
            elif len(guest.got) == guest.size:
                self._judge(selector, guest)
        except BlockingIOError:
            return
        except (_Refused, OSError) as error:
            self._refuse(selector, guest, error)

    def _judge(self, selector: selectors.BaseSelector, guest: _Guest) -> None:
        """A whole claim. Raises: _Refused, OSError."""
        got = bytes(guest.got)
        _, nonce, _ = CLAIM.unpack(got[: CLAIM.size])
        claim, proved = got[CLAIM.size : -PROOF_SIZE], got[-PROOF_SIZE:]
        said = (guest.nonce, nonce, claim)
        if not hmac.compare_digest(proved, proof(self._secret, "process", *said)):
            raise _Refused("unproved", "it does not know the secret")
        selector.unregister(guest.sock)
        del self._guests[guest.sock]
        guest.sock.settimeout(SEND_S)
        try:
            expected = self._expected(claim)
        except _Refused as error:
            self._count(guest, error)
            body = {"refused": str(error), "again": error.again}
            with guest.sock, contextlib.suppress(OSError):
                guest.sock.sendall(answer_bytes(self._secret, said, body))
            return
        guest.sock.sendall(answer_bytes(self._secret, said, expected.told))
        with self._lock:
            is_awaited = self._awaited.get(expected.server) is expected
            if is_awaited:
                del self._awaited[expected.server]
                self._linked[expected.server] = expected
                self._came.add(expected.server)
        if not is_awaited:
            raise _Refused("late", f"{expected.server} is not awaited any more")
        guest.sock.settimeout(None)
        self._counters["linked"] += 1
        log.info("%s came from %s", expected.server, guest.where)
        expected.give(guest.sock)

    def _expected(self, claim: bytes) -> Expected:
        """Whom the claim is of. Raises: _Refused."""
        try:
            said = json.loads(claim)
            server, attempt = str(said["server"]), str(said["attempt"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _Refused("garbage", "what it claims cannot be read") from None
        if server not in self._servers:
            names = ", ".join(sorted(self._servers))
            raise _Refused("unknown", f"there is no server {server!r:.40} ({names})")
        with self._lock:
            expected, linked = self._awaited.get(server), self._linked.get(server)
            is_over, is_retired = attempt in self._over[server], server in self._retired
        if is_over:
            raise _Refused("late", f"attempt {attempt:.40} of {server} is over")
        if linked is not None and attempt in ("", linked.attempt):
            text = f"{server} has a process already"
            raise _Refused("duplicate", text, again=not attempt)
        if attempt and (expected is None or attempt != expected.attempt):
            raise _Refused("unknown", f"{server} awaits no attempt {attempt!r:.40}")
        if expected is None:
            when = "any more" if is_retired else "now"
            raise _Refused("late", f"{server} awaits no process {when}", again=not is_retired)
        if expected.by_name and not attempt:
            raise _Refused("unknown", f"{server} is started by the driver itself")
        return expected

    def _refuse(self, selector: selectors.BaseSelector, guest: _Guest, error: Exception) -> None:
        if self._guests.pop(guest.sock, None) is not None:
            selector.unregister(guest.sock)
        self._count(guest, error)
        guest.sock.close()

    def _count(self, guest: _Guest, error: Exception) -> None:
        kind = error.kind if isinstance(error, _Refused) else "gone"
        self._counters[kind] += 1
        text = "a connection from %s is refused (%s): %s"
        log.warning(text, guest.where, kind, error, extra={"kind": "refused connections"})
