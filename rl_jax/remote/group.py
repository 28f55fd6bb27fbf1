"""A group of processes that do the same orders together: started, asked and ended as one.

Life: 1 `start` starts every process and links it. 2 `order` sends one order to all, and returns what each of them
answered. 3 A process that ends, gives no sign of life for a lease, or does not answer in time loses the whole group, as
the others may wait for it in a collective for good: every order fails with GroupLost until `start` made a new group of
new processes. 4 `end` kills what is left.
Invariants: one order at a time; nothing waits without a deadline; no process outlives the driver.
Must not: know what is asked, or start anything anew by itself.
"""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl_jax.remote.channel import Answer, Channel
from rl_jax.remote.framing import Unsendable
from rl_jax.remote.process import ENDED_HERE, RemoteProcess
from rl_jax.remote.spec import Spec
from rl_jax.remote.starter import Starter
from rl_jax.settings import ClusterSettings
from rl_jax.waits import Wait

AFTER_S = 5.0  # for the others to fail as the first one did

log = logging.getLogger(__name__)


class GroupLost(ConnectionError):
    """A process of the group cannot be asked any more, so none of them can."""


class Raised(Exception):
    """What an order raised in the processes. kind: the name of its type."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class Group:
    """Sole owner of its processes. `start` and `end` belong to one thread, `order` to any."""

    def __init__(self, specs: Sequence[Spec], settings: ClusterSettings, starter: Starter):
        self.specs, self.settings = tuple(specs), settings
        self._starter = starter
        self._processes: list[RemoteProcess] = []
        self._channels: list[Channel] = []
        self._lost: str | None = "no process was started yet"
        self._lock, self._change = threading.Lock(), threading.Lock()
        self._num = 0  # groups started
        self._wait: Wait | None = None  # the order under way

    @property
    def lost(self) -> str | None:
        """Why nothing can be asked, or None."""
        return self._lost

    @property
    def pids(self) -> list[int | None]:
        """Of the processes that were started last; None for one that is not of this host."""
        return [process.pid for process in self._processes]

    def waits(self) -> list[Wait]:
        """The order under way, and processes that are silent. Any thread."""
        silent = [wait for channel in list(self._channels) for wait in channel.waits()]
        wait = self._wait
        return silent if wait is None else [wait, *silent]

    def start(self) -> None:
        """Start every process, and link them. Raises: GroupLost naming one that did not come, and why."""
        self.end()
        self._num += 1
        num, self._lost = self._num, None
        for spec in self.specs:
            attempt = f"{num}.{secrets.token_hex(4)}"
            try:
                process = RemoteProcess(
                    spec, attempt, self.settings, self._starter,
                    on_pulse=lambda process, body: None,
                    on_end=lambda why, name=spec.name: self._ended(num, f"{name}: {why}"),
                )  # fmt: skip
            except OSError as error:
                self._ended(num, f"{spec.name} cannot be started: {error}")
                break
            self._processes.append(process)
        for process in self._processes:
            channel = process.connect()
            if channel is None:
                break
            self._channels.append(channel)
        if (why := self._lost) is not None:
            hows = [how.partition(": ") for how in self.end()]
            others = ["".join(how) for how in hows if how[2] != ENDED_HERE and how[2] not in why]
            raise GroupLost("; ".join([why, *others]))

    def order(
        self,
        verb: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        arrays: Sequence[Any] = (),
        *,
        deadline_s: float,
        only_first: bool = False,
    ) -> list[Answer]:
        """What each process answered, in the order of specs. body: of all of them, or one for each.

        Raises: GroupLost; Raised; Unsendable, with nothing asked of anybody.
        """
        with self._lock:
            if self._lost is not None:
                raise GroupLost(self._lost)
            channels = self._channels[:1] if only_first else self._channels
            names = ", ".join(channel.name for channel in channels)
            self._wait = Wait(f"{verb} of {names}", time.monotonic(), f"{deadline_s:g} s")
            try:
                return self._ordered(channels, verb, body, arrays, deadline_s)
            finally:
                self._wait = None

    def end(self) -> list[str]:
        """Kill every process, and wait until it is gone. Returns: how each came to its end."""
        self._ended(self._num, ENDED_HERE)
        hows = [f"{process.name}: {process.end()}" for process in self._processes]
        for how in hows:
            log.info("%s", how)
        self._processes, self._channels = [], []
        return hows

    def _ordered(
        self, channels: Sequence[Channel], verb: str, body: Any, arrays: Any, deadline_s: float
    ) -> list[Answer]:
        bodies = [body] * len(channels) if isinstance(body, Mapping) else list(body)
        answers: dict[int, Answer | Exception] = {}
        came: queue.Queue[tuple[int, Answer | Exception]] = queue.Queue()
        for i, (channel, told) in enumerate(zip(channels, bodies, strict=True)):
            done = lambda result, i=i: came.put((i, result))
            channel.ask(verb, dict(told), arrays, deadline_s=deadline_s, done=done)
        end_s = time.monotonic() + deadline_s + AFTER_S  # the channels keep the deadline
        while len(answers) < len(channels):
            try:
                i, result = came.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:  # the others may be in a collective that never ends
                break
            answers[i] = result
            if isinstance(result, Unsendable):
                raise result
            if isinstance(result, Exception):
                self._ended(self._num, f"{self.specs[i].name}: {result}")
                raise GroupLost(self._lost)
            if _raised(result) is not None:
                end_s = min(end_s, time.monotonic() + AFTER_S)
        return self._settled(verb, answers, len(channels))

    def _settled(
        self, verb: str, answers: Mapping[int, Answer | Exception], num: int
    ) -> list[Answer]:
        """Raises: Raised of the first process that raised; the group is lost where not all of them did."""
        raised = [error for answer in answers.values() if (error := _raised(answer)) is not None]
        if len(raised) not in (0, num):
            some = f"{len(raised)} of {num} processes failed in {verb}"
            self._ended(self._num, f"{some}: {raised[0]}")
        elif len(answers) < num:
            self._ended(self._num, f"{len(answers)} of {num} processes answered {verb} in time")
        if raised:
            raise raised[0]
        if self._lost is not None:
            raise GroupLost(self._lost)
        return [answer for i in range(num) if isinstance(answer := answers[i], Answer)]

    def _ended(self, num: int, why: str) -> None:
        """The first reason stands. num: which group it is of."""
        with self._change:
            if num == self._num and self._lost is None:
                self._lost = why


def _raised(answer: Answer | Exception | None) -> Raised | None:
    if isinstance(answer, Answer) and isinstance(answer.body, Mapping) and "raised" in answer.body:
        return Raised(str(answer.body["raised"]), str(answer.body["text"]))
    return None
