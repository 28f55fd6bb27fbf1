"""Channel: calls in both directions over one stream socket, every one with a deadline, between two processes.

Owns: the socket, its reader, writer and pulse threads, and what waits for an answer.
Life of a call: 1 `ask` or `call` gives it an id, encodes it and puts it in a send queue (Lane). 2 The writer sends it
frame by frame; what is left of its deadline is written at that moment, and the other side counts it on its own clock.
3 The other side's handler answers or fails it, at once or later, in any order; parts that it tells before that come
before it, in their order. 4 The answer settles it; a call that ends otherwise (deadline, death of the peer) is settled
with the error, and what comes for it then is dropped and counted.
Liveness: each side sends a pulse every heartbeat_s. A peer from which nothing came for lease_s is dead (PeerSilent), as
is one whose stream ends (PeerGone) or is no stream of frames (FramingError): every waiting call fails at once, and
on_close is called once. Only time in which this process ran counts against the peer, so a process that was stopped
itself does not blame the others when it goes on.
Invariants: every call is settled exactly once; nothing waits without a deadline; a peer that does not read blocks no
caller: queues are bounded, a full one refuses (QueueFull) or, for BULK, is waited for until the call's deadline.
Messages of one lane arrive in order; pulses go before all else, BULK (weights) behind all else.
Must not: run a handler's long work (the handler hands it to a thread of its own), or know what is asked.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from rl_jax.remote import framing
from rl_jax.remote.clock_offset import ClockOffset
from rl_jax.remote.framing import FramingError, Message, Reader, Refused, Unsendable
from rl_jax.settings import ClusterSettings
from rl_jax.waits import Wait

MAX_QUEUED = 256 << 20  # bytes that wait in one lane; a lone larger message is let in
MAX_WAITING = 1 << 16  # messages that wait in one lane
LATE_BEATS = 3  # without one of which a peer is silent

log = logging.getLogger(__name__)


class Lane(IntEnum):
    """Which messages go first; order holds within a lane only."""

    PULSE = 0
    ORDERED = 1
    BULK = 2


class PeerGone(ConnectionError):
    """The other process ended, or closed its side."""


class PeerSilent(ConnectionError):
    """Nothing came from the other process for a whole lease."""


class CallTimeout(TimeoutError):
    """A call had no answer by its deadline."""


class QueueFull(RuntimeError):
    """More waits to be sent than may: the other side does not read."""


class RemoteError(RuntimeError):
    """The other side's handler raised something that has no type here."""


# What a handler may raise that arrives as what it was. TimeoutError says that the peer's own wait ended.
RAISED: Mapping[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, KeyError, TimeoutError, RuntimeError)
}


@dataclass(frozen=True)
class Answer:
    body: Any
    arrays: tuple[np.ndarray, ...]


Done = Callable[[Answer | Exception], None]


@dataclass(frozen=True)
class Request:
    """A call, or a message that wants no answer, as its handler gets it."""

    verb: str
    body: Any
    arrays: tuple[np.ndarray, ...]
    deadline_s: float  # on this process's monotonic clock
    answer: Callable[..., None]  # (body, arrays=()), once
    fail: Callable[[Exception], None]  # or this
    part: Callable[..., None]  # (body, arrays=()), any number before either

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())


@dataclass
class _Waiting:
    verb: str
    deadline_s: float
    done: Done
    on_part: Callable[[Answer], None] | None


@dataclass
class _Outgoing:
    number: int
    envelope: dict[str, Any]
    body: bytes
    arrays: tuple[np.ndarray, ...]
    deadline_s: float
    size: int  # bytes
    frames: Iterator[tuple[bytes, memoryview]] | None = None  # once its first one was made


class Channel:
    """One end. All public methods may be called from any thread but the channel's own, where they must not wait."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        attempt: str,
        settings: ClusterSettings,
        *,
        handlers: Mapping[str, Callable[[Request], None]] | None = None,
        pulse: Callable[[], Any] = lambda: None,
        on_pulse: Callable[[Any], None] = lambda body: None,
        on_close: Callable[[Exception], None] = lambda error: None,
        grace_s: float = 0.0,
    ):
        """name: of the other side, for messages. attempt: names this connection of two processes; what carries another
        one is dropped. handlers: by verb, on the reader's thread. pulse: the body of each pulse, which the other
        side's on_pulse gets. on_close: once, before the calls that wait fail. grace_s: by how much the first lease is
        longer."""
        self.name, self.attempt, self.settings = name, attempt, settings
        self.host = _host(sock)  # of this side, by which the other one reached it, or is on it
        self.closed: Exception | None = None  # why nothing goes through any more
        self.clock = ClockOffset()
        self._sock, self._handlers = sock, dict(handlers or {})
        self._pulse, self._on_pulse, self._on_close = pulse, on_pulse, on_close
        self._lock = threading.Condition()
        self._queues: dict[Lane, deque[_Outgoing]] = {lane: deque() for lane in Lane}
        self._queued = dict.fromkeys(Lane, 0)  # bytes
        self._waiting: dict[int, _Waiting] = {}
        self._num_calls = self._num_sent = 0
        self._counters: Counter[str] = Counter(late=0, foreign=0, refused=0, expired=0)
        self._reader = Reader(sock, self._heard)
        self._silent_s, self._heard_s = -grace_s, time.monotonic()
        self._threads = [
            threading.Thread(target=run, name=f"{what}-{name}", daemon=True)
            for what, run in (("read", self._read), ("write", self._write), ("pulse", self._beat))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stats(self) -> dict[str, int]:
        """Counts of what was dropped: answers that came too late, messages of another attempt, messages that could not
        be read, messages whose deadline passed before they were sent; and data of refused messages."""
        return {**self._counters, "stray": self._reader.num_stray}

    # --- asking ------------------------------------------------------------------------------

    def ask(
        self,
        verb: str,
        body: Any,
        arrays: Sequence[Any] = (),
        *,
        deadline_s: float,
        done: Done,
        on_part: Callable[[Answer], None] | None = None,
        lane: Lane = Lane.ORDERED,
    ) -> int:
        """Call without waiting; returns its id. on_part: gets what the handler tells before its answer, on the
        channel's threads, and must return at once.

        done gets the Answer or the error exactly once, on the channel's threads, or here where the call cannot be
        sent; it must return at once.
        """
        deadline = time.monotonic() + deadline_s
        with self._lock:
            self._num_calls += 1
            number = self._num_calls
            self._waiting[number] = _Waiting(verb, deadline, done, on_part)
        try:
            self._put({"k": "call", "id": number, "v": verb}, body, arrays, deadline, lane)
        except (QueueFull, Unsendable, ConnectionError, CallTimeout) as error:
            self._settle(number, error)
        return number

    def call(
        self,
        verb: str,
        body: Any = None,
        arrays: Sequence[Any] = (),
        *,
        deadline_s: float,
        lane: Lane = Lane.ORDERED,
    ) -> Answer:
        """Call and wait. Raises: what the handler failed with, CallTimeout, ConnectionError, QueueFull, Unsendable."""
        done = threading.Event()
        result: list[Answer | Exception] = []

        def settle(value: Answer | Exception) -> None:
            result.append(value)
            done.set()

        number = self.ask(verb, body, arrays, deadline_s=deadline_s, done=settle, lane=lane)
        if not done.wait(deadline_s):
            with self._lock:
                waiting = self._waiting.pop(number, None)
            if waiting is not None:
                settle(self._late(verb))
            done.wait()  # whoever took it out before is just settling it
        (value,) = result
        if isinstance(value, Exception):
            raise value
        return value

    def tell(self, verb: str, body: Any = None, arrays: Sequence[Any] = ()) -> None:
        """Send what wants no answer. It never waits; a peer for which it does not fit in the queue is given up.

        Raises: Unsendable.
        """
        try:
            self._put({"k": "tell", "v": verb}, body, arrays, float("inf"), Lane.ORDERED)
        except QueueFull as error:
            self.close(error)
        except ConnectionError:
            pass  # on_close has said so

    def close(self, error: Exception | None = None) -> None:
        """End both directions; every waiting call fails. The first reason stands."""
        error = error or PeerGone(f"the connection to {self.name} was closed here")
        with self._lock:
            if self.closed is not None:
                return
            self.closed = error
            waiting, self._waiting = self._waiting, {}
            for queue in self._queues.values():
                queue.clear()
            self._lock.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes reader and writer
        _run(self._on_close, error)  # who learns of a failed call must find the server gone, too
        for call in waiting.values():
            _run(call.done, error)

    def join(self, timeout_s: float) -> None:
        """After `close`: wait for the threads, then free the socket."""
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(timeout_s)
        self._sock.close()

    # --- sending -----------------------------------------------------------------------------

    def _put(
        self,
        envelope: dict[str, Any],
        body: Any,
        arrays: Sequence[Any],
        deadline: float,
        lane: Lane,
    ) -> None:
        """Queue a message. Raises: Unsendable; QueueFull; ConnectionError once closed; CallTimeout (BULK)."""
        content, buffers = framing.encode_json(body), framing.plain_arrays(arrays)
        size = len(content) + sum(array.nbytes for array in buffers)
        out = _Outgoing(0, {**envelope, "at": self.attempt}, content, buffers, deadline, size)
        with self._lock:
            queue = self._queues[lane]
            while self.closed is None and self._is_full(lane, out.size):
                if lane is not Lane.BULK:
                    raise QueueFull(
                        f"{self.name} does not read: {len(queue)} messages of {self._queued[lane]} bytes wait for it"
                    )
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise CallTimeout(f"{self.name} did not read what was sent before in time")
                self._lock.wait(left_s)
            if self.closed is not None:
                raise self._ended()
            self._num_sent += 1
            out.number = self._num_sent & 0xFFFFFFFF
            queue.append(out)
            self._queued[lane] += out.size
            self._lock.notify_all()

    def _is_full(self, lane: Lane, size: int) -> bool:
        queue = self._queues[lane]
        return len(queue) >= MAX_WAITING or (bool(queue) and self._queued[lane] + size > MAX_QUEUED)

    def _ended(self) -> ConnectionError:
        """Why the channel is closed, for a call that comes afterwards."""
        return PeerGone(f"{self.name} is gone: {self.closed}")

    def _write(self) -> None:
        try:
            while (frame := self._next_frame()) is not None:
                head, payload = frame
                if len(payload) <= framing.FRAME.size:
                    self._sock.sendall(head + bytes(payload))
                else:
                    self._sock.sendall(head)
                    self._sock.sendall(payload)
        except OSError as error:
            self.close(PeerGone(f"{self.name} takes no more: {error}"))

    def _next_frame(self) -> tuple[bytes, memoryview] | None:
        """Of the first lane that has one; waits for it. None once closed."""
        with self._lock:
            while self.closed is None:
                for lane, queue in self._queues.items():
                    while queue:
                        frame = self._frame_of(queue[0])
                        if frame is not None:
                            return frame
                        self._queued[lane] -= queue.popleft().size
                        self._lock.notify_all()
                self._lock.wait()
            return None

    def _frame_of(self, out: _Outgoing) -> tuple[bytes, memoryview] | None:
        """The next frame of a message, None behind its last; one whose deadline has passed is cut short."""
        left_s = out.deadline_s - time.monotonic()
        if left_s <= 0 and out.frames is not None and out.arrays:
            out.arrays, out.frames = (), iter(())
            self._counters["expired"] += 1
            return framing.cancel_frame(out.number)
        if out.frames is None:
            if left_s <= 0:
                self._counters["expired"] += 1
                return None
            if left_s != float("inf"):
                out.envelope["left_s"] = left_s
            out.frames = framing.frames(out.number, out.envelope, out.body, out.arrays)
        return next(out.frames, None)

    # --- receiving ---------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while (message := self._reader.read()) is not None:
                self._received(message)
            error: Exception = PeerGone(f"{self.name} closed its side")
        except FramingError as failure:
            error = failure
        except OSError as failure:
            error = PeerGone(f"{self.name}: {failure}")
        self.close(error)

    @property
    def is_silent(self) -> bool:
        """Whether nothing came for longer than it should, and a lease is not over. Any thread."""
        return self.closed is None and self._silent_s >= LATE_BEATS * self.settings.heartbeat_s

    def waits(self) -> list[Wait]:
        """A peer that is silent. Any thread."""
        if not self.is_silent:
            return []
        limit = f"cluster.lease_s={self.settings.lease_s:g}"
        return [Wait(f"a sign of life of {self.name}", self._heard_s, limit)]

    def _heard(self) -> None:
        self._silent_s, self._heard_s = 0.0, time.monotonic()

    def _received(self, message: Message | Refused) -> None:
        envelope = message.envelope or {}
        if message.envelope is not None and envelope.get("at") != self.attempt:
            self._counters["foreign"] += 1
            return
        kind, number, verb = envelope.get("k"), envelope.get("id"), envelope.get("v")
        if isinstance(message, Refused):
            self._refuse(message.why, kind, number)
        elif kind == "answer" and type(number) is int:
            self._settle(number, Answer(message.body, message.arrays))
        elif kind == "error" and type(number) is int:
            self._settle(number, _raised(message.body, self.name))
        elif kind == "part" and type(number) is int:
            self._part(number, Answer(message.body, message.arrays))
        elif kind == "pulse":
            self.clock.heard(envelope.get("clock"), time.monotonic())
            _run(self._on_pulse, message.body)
        elif kind in ("call", "tell") and isinstance(verb, str):
            self._handle(message, verb, number if kind == "call" else None)
        else:
            self._refuse(f"there is no message {kind!r:.40} {verb!r:.40}", kind, number)

    def _refuse(self, why: str, kind: Any, number: Any) -> None:
        """A message that cannot be used; whoever waits for it, here or there, is told."""
        self._counters["refused"] += 1
        log.error("a message of %s is refused: %s", self.name, why)
        if type(number) is int and kind in ("answer", "error"):
            self._settle(number, RemoteError(f"the answer of {self.name} is refused: {why}"))
        elif type(number) is int and kind == "call":
            self._fail(number, ValueError(f"the call is refused: {why}"))

    def _handle(self, message: Message, verb: str, number: int | None) -> None:
        left_s = message.envelope.get("left_s", float("inf"))
        if type(left_s) not in (int, float) or (number is not None and type(number) is not int):
            self._refuse(f"{verb} is left {left_s!r:.40} s", "tell", None)
            return
        fail = lambda error: None if number is None else self._fail(number, error)
        request = Request(
            verb,
            message.body,
            message.arrays,
            time.monotonic() + left_s,
            lambda body=None, arrays=(): None if number is None else self._answer(number, body, arrays),
            fail,
            lambda body=None, arrays=(): None if number is None else self._answer(number, body, arrays, "part"),
        )  # fmt: skip
        handler = self._handlers.get(verb)
        if handler is None:
            self._refuse(
                f"there is no verb {verb!r:.40}", "tell" if number is None else "call", number
            )
            return
        try:
            handler(request)
        except Exception as error:  # the boundary to a handler: its failure is its caller's to know
            if number is None:
                log.exception("%s of %s failed", verb, self.name)
            fail(error)

    def _answer(self, number: int, body: Any, arrays: Sequence[Any], kind: str = "answer") -> None:
        envelope = {"k": kind, "id": number}
        try:
            self._put(envelope, body, arrays, float("inf"), Lane.ORDERED)
        except Unsendable as error:
            self._fail(number, RuntimeError(f"the answer {error}"))
        except QueueFull as error:
            self.close(error)  # an answer that is dropped would leave its caller waiting
        except ConnectionError:
            pass  # nobody waits for it any more

    def _fail(self, number: int, error: Exception) -> None:
        text = str(error.args[0]) if len(error.args) == 1 else str(error)
        known = [name for name, kind in RAISED.items() if isinstance(error, kind)]
        body = {"type": known[0] if known else type(error).__name__, "text": text[:10_000]}
        with contextlib.suppress(ConnectionError):
            try:
                envelope = {"k": "error", "id": number}
                self._put(envelope, body, (), float("inf"), Lane.ORDERED)
            except QueueFull as full:
                self.close(full)

    # --- settling and liveness ---------------------------------------------------------------

    def _settle(self, number: int, result: Answer | Exception) -> None:
        with self._lock:
            call = self._waiting.pop(number, None)
            if call is None:
                self._counters["late"] += 1
                return
        _run(call.done, result)

    def _part(self, number: int, part: Answer) -> None:
        with self._lock:
            call = self._waiting.get(number)
        if call is None:
            self._counters["late"] += 1
        elif call.on_part is not None:
            _run(call.on_part, part)

    def _overdue(self) -> None:
        """Fail calls whose time is over."""
        now = time.monotonic()
        with self._lock:
            numbers = [n for n, call in self._waiting.items() if call.deadline_s <= now]
            calls = [self._waiting.pop(n) for n in numbers]
        for call in calls:
            _run(call.done, self._late(call.verb))

    def _late(self, verb: str) -> CallTimeout:
        return CallTimeout(f"{self.name} did not answer {verb} in time")

    def _beat(self) -> None:
        try:
            self._beats()
        except Exception as error:  # without pulses the other side would think us dead
            log.exception("no more pulses for %s", self.name)
            self.close(error)

    def _beats(self) -> None:
        """Send pulses, and look for calls and a peer whose time is over."""
        every, last = self.settings.heartbeat_s, time.monotonic()
        while self.closed is None:
            if not self._queues[Lane.PULSE]:  # else the last one has not even gone
                with contextlib.suppress(ConnectionError):
                    told, stamp = self._pulse(), self.clock.stamp(time.monotonic())
                    pulse = {"k": "pulse", "clock": stamp}
                    self._put(pulse, told, (), float("inf"), Lane.PULSE)
            with self._lock:
                self._lock.wait_for(lambda: self.closed is not None, every)
            now = time.monotonic()
            # A gap is our own: the peer's pulses lie in the socket then, unread.
            self._silent_s += min(now - last, 2 * every)
            last = now
            self._overdue()
            if self._silent_s > self.settings.lease_s:
                silent = f"nothing came from {self.name} for {self._silent_s:.3g} s"
                self.close(PeerSilent(f"{silent} (cluster.lease_s={self.settings.lease_s:g})"))


def _raised(body: Any, name: str) -> Exception:
    """What the other side's handler failed with."""
    is_told = isinstance(body, Mapping) and isinstance(body.get("text"), str)
    kind, text = (body.get("type"), body["text"]) if is_told else (None, f"{body!r:.200}")
    error = RAISED.get(kind) if isinstance(kind, str) else None
    return RemoteError(f"{name}: {kind}: {text}") if error is None else error(text)


def _run(function: Callable[[Any], None], value: Any) -> None:
    """A caller's code on a thread of the channel."""
    try:
        function(value)
    except Exception:  # the boundary to the caller: the channel goes on
        log.exception("a callback of the channel raised")


def _host(sock: socket.socket) -> str:
    is_over_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
    return sock.getsockname()[0] if is_over_tcp else "127.0.0.1"
