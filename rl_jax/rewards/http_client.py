"""HttpClient: JSON over HTTP/1.1 with a deadline for everything, retries within a budget, and answers of bounded size.

Owns: connections (kept for the next call), what is tried again and when, and the one error of a call that failed.

Invariants
    connect_s bounds the way to a connection (name, TCP, TLS); read_s one try from the request to the last byte of its
    answer, so that bytes that trickle end it too; total_s the call with all its tries and pauses.
    Tried again: what got no answer, 408, 425, 429 and 5xx. The pause is random, up to FIRST_PAUSE_S doubled each time;
    Retry-After (seconds or a date) is the least it may be, and one that leads beyond total_s ends the call at once.
    A 429 with Retry-After is how a service that works paces its callers, and where no connection is made it may be
    starting again: both cost time alone. All other retries of a call are counted, and come out of one budget of all
    calls, which every answer fills by one: where nothing works any more, calls fail at the first try instead of
    multiplying the load.
    A request may arrive twice, so what it asks for must be the same both times: scorers are pure.
    An answer is a status and JSON, or an HttpError. What JSON cannot hold (NaN, Infinity) is an error like any other.

Must not: block the loop, follow a redirect, or log a token.
"""

import asyncio
import json
import random
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from rl_jax.clock import now_s

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
MAX_HEAD = 32 << 10  # bytes of a status line and its headers
MAX_BODY = 8 << 20
RETRIED = frozenset((408, 425, 429))  # and every 5xx
DETAIL = 200  # characters of an answer that an error shows


class HttpError(Exception):
    """A call without a usable answer.

    kind: connect (no connection) | lost (it ended) | timeout | status | protocol (no HTTP, too large, no JSON)
    """

    def __init__(self, kind: str, detail: str, status: int = 0, after_s: float = 0.0):
        super().__init__(detail)
        self.kind, self.detail, self.status, self.after_s = kind, detail, status, after_s

    @property
    def is_retried(self) -> bool:
        if self.kind == "status":
            return self.status in RETRIED or self.status >= 500
        return self.kind in ("connect", "lost", "timeout")

    @property
    def is_free(self) -> bool:
        """Whether another try multiplies nobody's load."""
        return self.kind == "connect" or (self.status == 429 and self.after_s > 0)


@dataclass(frozen=True)
class Deadlines:
    """Seconds, each at least what the one before it takes."""

    connect_s: float = 2.0
    read_s: float = 30.0
    total_s: float = 60.0


@dataclass
class RetryBudget:
    """Retries that all calls of a client share."""

    size: int = 50
    left: int = field(init=False)

    def __post_init__(self):
        self.left = self.size

    def take(self) -> bool:
        """Whether one more may be made."""
        if self.left <= 0:
            return False
        self.left -= 1
        return True

    def refill(self) -> None:
        """A call was answered."""
        self.left = min(self.size, self.left + 1)


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.num_answers = 0
        self.has_answered = False  # a byte of the answer to the last request came

    @property
    def is_alive(self) -> bool:
        return not (self.reader.at_eof() or self.writer.is_closing())

    def close(self) -> None:
        self.writer.close()


class HttpClient:
    """Of one service; all calls on one loop. A URL without a path leads to the service's root."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        deadlines: Deadlines = Deadlines(),
        retries: int = 5,
        budget: RetryBudget | None = None,
        connections: int = 64,
    ):
        """token: sent as a bearer's. retries: of one call. connections: calls at once; the others wait for one.

        Raises: ValueError for a URL that is no http(s) one, or a token that a header cannot hold.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL; use http://HOST:PORT or https://HOST")
        if parts.username or parts.password:
            raise ValueError("the URL holds a password; put it into a token file")
        if not token.isprintable() or not token.isascii():
            raise ValueError("the token holds characters that no header may; use one line of ASCII")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.deadlines, self.retries = deadlines, retries
        self.budget = budget if budget is not None else RetryBudget()
        self.num_retries = 0
        self._host, self._is_tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._base, self._netloc, self._token = parts.path.rstrip("/"), parts.netloc, token
        self._idle: list[Connection] = []
        self._places = asyncio.Semaphore(connections)

    async def close(self) -> None:
        """Close the connections that are kept; the client can be used again, on another loop too."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    async def call(
        self, method: str, path: str, payload: Any = None, *, read_s: float | None = None
    ) -> Any:
        """The JSON of a 200. read_s: instead of the client's. Raises: HttpError, within total_s of its turn."""
        body = b"" if payload is None else encoded(payload)
        async with self._places:
            return await self._call(method, path, body, read_s or self.deadlines.read_s)

    async def _call(self, method: str, path: str, body: bytes, read_s: float) -> Any:
        end_s, num_tries, num_pauses = now_s() + self.deadlines.total_s, 0, 0
        while True:
            left_s = end_s - now_s()
            try:
                answer = await self._try(method, path, body, min(read_s, left_s))
            except HttpError as error:
                num_tries += not error.is_free
                why = "" if error.is_retried else "which no retry mends"
                if not why and num_tries > self.retries:
                    why = f"after {num_tries} tries"
                pause_s = error.after_s + random.uniform(
                    0, min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_pauses, 10))
                )
                if not why and now_s() + pause_s >= end_s:
                    why = f"and no time for another try within {self.deadlines.total_s:g} s"
                if not why and not error.is_free and not self.budget.take():
                    why = f"and the budget of {self.budget.size} retries is used up"
                if why:
                    raise HttpError(
                        error.kind, f"{self.url}: {error.detail}, {why}", error.status
                    ) from None
                self.num_retries += 1
                num_pauses += 1
                await asyncio.sleep(pause_s)
            else:
                self.budget.refill()
                return answer

    async def _try(self, method: str, path: str, body: bytes, read_s: float) -> Any:
        """One try; one more at once where a kept connection turns out to be closed."""
        while True:
            connection = self._kept() or await self._connect()
            is_kept = connection.num_answers > 0
            deadline = asyncio.timeout(read_s)
            try:
                async with deadline:
                    status, headers, data = await self._exchange(connection, method, path, body)
                break
            except TimeoutError:
                connection.close()
                raise HttpError("timeout", f"no whole answer within {read_s:.3g} s") from None
            except asyncio.LimitOverrunError:
                connection.close()
                raise HttpError("protocol", f"a line or headers of over {MAX_HEAD} bytes") from None
            except (OSError, EOFError) as error:
                connection.close()
                if is_kept and not connection.has_answered:
                    continue
                said = " ".join(str(error).split()) or type(error).__name__
                raise HttpError("lost", f"the connection was lost ({said})") from None
            except BaseException:
                connection.close()
                raise
        if connection.is_alive:
            connection.num_answers += 1
            self._idle.append(connection)
        if status != 200:
            after_s = retry_after_s(headers.get("retry-after", ""), headers.get("date", ""))
            raise HttpError("status", f"status {status} ({shown(data)})", status, after_s)
        return decoded(data)

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_alive:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        limit_s = self.deadlines.connect_s
        context = ssl.create_default_context() if self._is_tls else None
        try:
            async with asyncio.timeout(limit_s):
                streams = await asyncio.open_connection(
                    self._host, self._port, ssl=context, limit=MAX_HEAD
                )
        except TimeoutError:
            raise HttpError("connect", f"no connection within {limit_s:g} s") from None
        except OSError as error:
            raise HttpError("connect", f"no connection ({error.strerror or error})") from None
        return Connection(*streams)

    async def _exchange(
        self, connection: Connection, method: str, path: str, body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        connection.has_answered = False
        head = [f"{method} {self._base}{path} HTTP/1.1", f"Host: {self._netloc}", "Accept: application/json",
                f"Content-Length: {len(body)}", "Content-Type: application/json"]  # fmt: skip
        if self._token:
            head.append(f"Authorization: Bearer {self._token}")
        connection.writer.write("\r\n".join(head).encode("ascii") + b"\r\n\r\n" + body)
        await connection.writer.drain()
        status, headers = await _read_head(connection)
        data = await _read_body(connection.reader, status, headers)
        if headers.get("connection", "").lower() == "close":
            connection.close()
        return status, headers, data


def encoded(payload: Any) -> bytes:
    """JSON, ASCII alone. Raises: ValueError for NaN."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).encode("ascii")


def decoded(data: bytes) -> Any:
    """Raises: HttpError protocol for what is no JSON, or holds what JSON has no word for."""
    try:
        return json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise HttpError("protocol", f"the answer is no JSON ({error}): {shown(data)!r}") from None


def shown(data: bytes) -> str:
    """The beginning of an answer, on one line."""
    return " ".join(data[:DETAIL].decode("utf-8", "replace").split())


def _refuse(name: str) -> Any:
    raise ValueError(f"it holds {name}")


def retry_after_s(text: str, date: str) -> float:
    """Seconds that a Retry-After asks for, as a number or a time of day, of which the answer's own Date is the now.

    0 for none, or for what is neither.
    """
    if text.strip().isdecimal() and len(text) < 10:
        return float(text)
    try:
        seconds = (parsedate_to_datetime(text) - parsedate_to_datetime(date)).total_seconds()
    except (TypeError, ValueError):
        return 0.0
    return max(0.0, seconds)


async def _read_head(connection: Connection) -> tuple[int, Mapping[str, str]]:
    """(status, headers with names in lower case) of the answer, past any 1xx."""
    while True:
        try:
            raw = await connection.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            connection.has_answered = bool(error.partial)
            raise
        connection.has_answered = True
        first, *lines = raw.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            raise HttpError("protocol", f"{first[:80]!r} is no answer of HTTP/1.1")
        if not words[1].startswith("1"):
            pairs = (line.partition(":") for line in lines if line)
            return int(words[1]), {name.strip().lower(): text.strip() for name, _, text in pairs}


async def _read_body(
    reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]
) -> bytes:
    """Raises: HttpError protocol for one beyond MAX_BODY, or without a readable size; EOFError if it is cut."""
    too_large = HttpError("protocol", f"an answer of more than {MAX_BODY} bytes")
    if status in (204, 304):
        return b""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = bytearray()
        while size := await _chunk_size(reader):
            if len(body) + size > MAX_BODY:
                raise too_large
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        while (await reader.readuntil(b"\r\n")) != b"\r\n":
            pass  # trailers
        return bytes(body)
    if "content-length" not in headers:  # it ends with the connection
        body = bytearray()
        while piece := await reader.read(1 << 16):
            body += piece
            if len(body) > MAX_BODY:
                raise too_large
        return bytes(body)
    length = headers["content-length"]
    if not length.isdecimal():
        raise HttpError("protocol", f"an answer whose Content-Length is {length[:40]!r}")
    if len(length) > 12 or int(length) > MAX_BODY:
        raise too_large
    return await reader.readexactly(int(length))


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    digits = (await reader.readuntil(b"\r\n")).partition(b";")[0].strip()
    if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", digits):
        raise HttpError("protocol", "a chunk without a size")
    return int(digits, 16)
