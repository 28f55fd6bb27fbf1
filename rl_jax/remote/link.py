"""The handshake of a link over TCP: the run's secret, what the two sides say, and the side of who connects.

    1 listener -> process   MAGIC, a nonce
    2 process -> listener   MAGIC, a nonce of its own, the size of its claim, the claim, its proof
    3 listener -> process   the size of its answer, the answer, its proof
A claim is JSON {server, attempt}; an answer what the process is told (attempt, factory, settings), or {refused, again}.
A proof is HMAC-SHA256 by the run's secret over who speaks and all that was said before it: both nonces are fresh, so
nothing that was overheard proves anything again. After 3 the socket is a Channel's.
Invariants: the secret itself crosses no socket, stands in no command line and no message; before step 2 is right the
listener has said its nonce and nothing else; nothing is read beyond a limit or a deadline.
Must not: hide what is sent afterwards, or seal it against whoever can change a connection under way: this is for a
private network. Decide who may come (listener.py).
"""

import hmac
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAGIC = b"rlJlink1"
NONCE_SIZE = PROOF_SIZE = SECRET_SIZE = 32  # bytes
CLAIM = struct.Struct(f"<{len(MAGIC)}s{NONCE_SIZE}sH")
ANSWER = struct.Struct("<I")
MAX_CLAIM, MAX_ANSWER = 1024, 1 << 16  # bytes
HANDSHAKE_S = 5.0  # from the connection to the last byte
TRY_EVERY_S = 0.5
# A connection on which nothing is heard of the other machine is given up by the kernel, too; a lease ends sooner.
KEEP_IDLE_S, KEEP_EVERY_S, KEEP_NUM = 10, 5, 3


class LinkError(ConnectionError):
    """No link: the other side is not there, is another one, or refused."""


# --- the secret ----------------------------------------------------------------------------------


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_SIZE)


def secret_of(text: str, where: str) -> bytes:
    """From hexadecimal digits. where: they come from, for the error. Raises: ValueError, which does not tell them."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        raise ValueError(f"{where} is no secret: it must be hexadecimal digits") from None
    if len(secret) < SECRET_SIZE:
        raise ValueError(
            f"{where} holds {len(secret)} bytes; a secret has at least {SECRET_SIZE}: openssl rand -hex {SECRET_SIZE}"
        )
    return secret


def write_secret(path: Path, secret: bytes) -> None:
    """A new file that its owner alone may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret.hex() + "\n")


def read_secret(path: Path) -> bytes:
    """Raises: OSError; ValueError for a file that others may read, or without a secret."""
    with path.open() as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ValueError(f"{path} may be read by others (mode {mode:o}): chmod 600 it")
        return secret_of(file.read(4096), str(path))


# --- what is said --------------------------------------------------------------------------------


def proof(secret: bytes, speaker: str, *said: bytes) -> bytes:
    """speaker: process | listener. said: all before, in order."""
    mac = hmac.new(secret, speaker.encode(), "sha256")
    for part in said:
        mac.update(len(part).to_bytes(4, "little") + part)
    return mac.digest()


def answer_bytes(secret: bytes, said: tuple[bytes, ...], body: Mapping[str, Any]) -> bytes:
    """Step 3. said: the listener's nonce, the process's, and the claim."""
    text = json.dumps(body, allow_nan=False).encode("ascii")
    assert len(text) <= MAX_ANSWER, "settings are some hundred bytes"
    return ANSWER.pack(len(text)) + text + proof(secret, "listener", *said, text)


def tune(sock: socket.socket) -> None:
    """For small messages that are waited for, and a machine that vanishes."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_EVERY_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEP_NUM),
    ):
        sock.setsockopt(level, option, value)


def address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(text: str) -> tuple[str, int]:
    """Of HOST:PORT. Raises: ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is no HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


# --- the process's side --------------------------------------------------------------------------


def connect(
    address: tuple[str, int], secret: bytes, server: str, attempt: str, patience_s: float
) -> tuple[socket.socket, dict[str, Any]]:
    """A link to the driver, tried again and again while it may come about; and what the driver tells.

    attempt: that the process was started as; "": whichever is awaited.
    Raises: LinkError, at once where trying again is of no use.
    """
    end_s = time.monotonic() + patience_s
    while True:
        try:
            sock, answer = _meet(address, secret, server, attempt)
        except OSError as error:  # LinkError of another listener among them
            why, again = f"{error}", True
        else:
            if "refused" not in answer:
                return sock, answer
            sock.close()
            why, again = f"the driver refuses it: {answer['refused']}", bool(answer.get("again"))
        if not again or time.monotonic() > end_s:
            raise LinkError(f"{server} has no link to {address_text(*address)}: {why}")
        time.sleep(TRY_EVERY_S)


def _meet(
    address: tuple[str, int], secret: bytes, server: str, attempt: str
) -> tuple[socket.socket, dict[str, Any]]:
    """One handshake. Raises: OSError."""
    end_s = time.monotonic() + HANDSHAKE_S
    sock = socket.create_connection(address, HANDSHAKE_S)
    try:
        tune(sock)
        hello = _read(sock, len(MAGIC) + NONCE_SIZE, end_s)
        if not hello.startswith(MAGIC):
            raise LinkError("what listens there is no driver")
        claim = json.dumps({"server": server, "attempt": attempt}).encode("ascii")
        theirs, ours = hello[len(MAGIC) :], secrets.token_bytes(NONCE_SIZE)
        said = (theirs, ours, claim)
        sock.sendall(CLAIM.pack(MAGIC, ours, len(claim)) + claim + proof(secret, "process", *said))
        (size,) = ANSWER.unpack(_read(sock, ANSWER.size, end_s))
        if size > MAX_ANSWER:
            raise LinkError(f"its answer has {size} bytes, the limit is {MAX_ANSWER}")
        text = _read(sock, size, end_s)
        if not hmac.compare_digest(
            _read(sock, PROOF_SIZE, end_s), proof(secret, "listener", *said, text)
        ):
            raise LinkError("what listens there does not know the secret of this run")
        sock.settimeout(None)
        return sock, json.loads(text)
    except BaseException:
        sock.close()
        raise


def _read(sock: socket.socket, size: int, end_s: float) -> bytes:
    got = bytearray()
    while len(got) < size:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise LinkError(f"no handshake within {HANDSHAKE_S:g} s")
        sock.settimeout(left_s)
        if not (data := sock.recv(size - len(got))):
            raise LinkError("it hangs up: it has another secret, no driver, or no room now")
        got += data
    return bytes(got)
