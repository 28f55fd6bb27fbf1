"""What other threads may ask of a server's thread, and the inbox through which they ask.

Invariants: commands are taken in the order in which they were put, all between two blocks; a Reply
is answered or given up exactly once, so a caller that stopped waiting knows whether its command
will still be carried out. Requests are bounded by serve.queue_size at the door; the other commands
each follow from a request or a sync, so these bound them.
Must not: be waited on without a deadline.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_jax.types import NewTokens, Prefix, Turn, TurnError, TurnRequest

OnDone = Callable[[Turn | TurnError], None]
OnTokens = Callable[[NewTokens], None]
OnPrefix = Callable[[Prefix | TurnError, Mapping[str, float]], None]  # result, times_s


class Reply:
    """A one-shot answer between two threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._state = "open"  # open | claimed | given_up
        self._value: Any = None
        self._error: BaseException | None = None

    def claim(self) -> bool:
        """The server's side, before it acts: False if the caller has given up."""
        with self._lock:
            if self._state == "given_up":
                return False
            self._state = "claimed"
            return True

    def set(self, value: Any) -> None:
        self._value = value
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def wait(self, deadline_s: float, what: str) -> Any:
        """The answer. Raises: what the server failed with; TimeoutError after deadline_s, naming
        `what`.

        After a TimeoutError a command that was not claimed yet will never be carried out.
        """
        if not self._done.wait(deadline_s):
            with self._lock:
                started = self._state == "claimed"
                self._state = "given_up"
            if not self._done.is_set():
                state = "under way" if started else "withdrawn"
                raise TimeoutError(f"{what}: no answer in {deadline_s:g} s, the command is {state}")
        if self._error is not None:
            raise self._error
        return self._value


@dataclass(frozen=True)
class Add:
    request: TurnRequest
    prefix: Prefix | None
    on_done: OnDone
    arrived_s: float  # time.monotonic()
    job: "PrefixJob | None" = (
        None  # nothing is generated: the KV of the context[:-1] goes to another server
    )
    on_tokens: OnTokens | None = None  # told of each block's tokens


@dataclass(eq=False)
class PrefixJob:
    """Where a decode server sends a prefix that it computes for another one."""

    server: str  # that computes it
    target: Any  # DecodeServer
    start: int  # the first token that the target lacks, at a page's begin
    on_prefix: OnPrefix
    prefix: Prefix | None = None  # once it is there, and how long that took
    transfer_s: float = 0.0

    def done(self, result: Turn | TurnError) -> None:
        """The OnDone of its request."""
        if isinstance(result, TurnError):
            self.on_prefix(result, {})
        elif self.prefix is None:
            self.on_prefix(TurnError("closed", self.server, "aborted"), {})
        else:
            times_s = {name: result.times_s[name] for name in ("queue", "prefill")}
            self.on_prefix(self.prefix, {**times_s, "transfer": self.transfer_s})


@dataclass(frozen=True)
class Abort:
    uid: str
    reason: str


@dataclass(frozen=True)
class Release:
    session: str


@dataclass(frozen=True)
class Pause:
    pass


@dataclass(frozen=True)
class Resume:
    pass


@dataclass(frozen=True)
class Drain:
    abort: bool = False  # end what is here now instead of waiting for it
    reply: Reply = field(default_factory=Reply)


@dataclass(frozen=True)
class Commit:
    sync_id: str
    kv: str  # recompute | keep
    reply: Reply = field(default_factory=Reply)


@dataclass(frozen=True)
class Fence:
    reason: str


Command = Add | Abort | Release | Pause | Resume | Drain | Commit | Fence


class Inbox:
    """Commands for one server thread; `put` from any thread, `take` from the server's only."""

    def __init__(self):
        self._commands: deque = deque()
        self._ready = threading.Condition()
        self._closed = False

    def put(self, command) -> bool:
        """False once closed: the command will not be taken."""
        with self._ready:
            if self._closed:
                return False
            self._commands.append(command)
            self._ready.notify()
            return True

    def take(self, timeout_s: float) -> list:
        """All commands, in order; waits for one if timeout_s > 0 and there is none."""
        with self._ready:
            if not self._commands and not self._closed and timeout_s > 0:
                self._ready.wait(timeout_s)
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def close(self) -> list:
        """Refuse what comes now; returns what was not taken."""
        with self._ready:
            self._closed = True
            commands = list(self._commands)
            self._commands.clear()
            self._ready.notify()
            return commands
