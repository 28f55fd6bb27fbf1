"""What every process of a run does for its driver: orders run one after the other on the main thread, quick commands at
once on the channel's, until the channel ends, and the process with it.

Life: 1 the channel is opened on the socket to the driver; its pulses say what `pulse` gives. 2 `run` takes orders,
whose methods are `_VERB`; one that fails tells the driver why. Where the driver wants a timeline (`trace`), what was
recorded goes there as `spans` twice a second. 3 The driver is gone, or gave no sign of life for a
lease: the process ends at once, whatever it does.
Must not: write a file (what it prints is its log), or keep state that the driver could not lose.
"""

import logging
import os
import queue
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_jax.exporter import open_exporter
from rl_jax.exposition import Text, tell_process
from rl_jax.remote.channel import Channel, Request
from rl_jax.remote.program import leave
from rl_jax.settings import ClusterSettings
from rl_jax.timeline import Span, Timeline, clock_id

MAX_ORDERS = 1 << 10  # more than all syncs of a run that time out could leave waiting

log = logging.getLogger(__name__)


class Service:
    """The process as its channel sees it. A subclass names its verbs and has a method for each."""

    orders: tuple[str, ...] = ()  # in order, on the main thread
    quick: tuple[str, ...] = ()  # at once, on the channel's thread
    others: Mapping[str, Callable[[Request], None]] = {}  # by verb, on the channel's thread

    def __init__(self, sock: socket.socket, told: Mapping[str, Any]):
        """told: factory, attempt and the cluster's settings."""
        self.told, self.sock = told, sock
        self.timeline, self._head = Timeline(), {"clock": clock_id(), "pid": os.getpid()}
        self._waiting: queue.Queue[Request] = queue.Queue(MAX_ORDERS)
        handlers: dict[str, Callable[[Request], None]] = dict.fromkeys(self.orders, self._later)
        handlers |= dict.fromkeys(self.quick, self._now) | dict(self.others)
        handlers["trace"] = lambda request: self.timeline.start(self._told_spans)
        self._channel = Channel(
            sock,
            "the driver",
            told["attempt"],
            ClusterSettings(**told["settings"]),
            handlers=handlers,
            pulse=self.pulse,
            on_close=leave,
        )
        self._orders: Counter[str] = Counter()  # begun, by verb
        self._exporter = open_exporter(told.get("scrape", {}), self._metrics)

    def run(self) -> None:
        """Serve until the channel ends, and the process with it."""
        self._channel.start()
        while True:
            request = self._waiting.get()
            try:
                if request.left_s <= 0:
                    raise TimeoutError(f"{request.verb} came too late to be begun")
                self._orders[request.verb] += 1
                getattr(self, f"_{request.verb}")(request)
            except Exception as error:  # the boundary to the driver, which must learn of it
                log.exception("%s failed", request.verb)
                self.failed(request, error)
            del request  # its arrays must not live until the next one

    def pulse(self) -> dict[str, Any] | None:
        """What it says of itself every cluster.heartbeat_s; None while there is nothing to say."""
        return None

    def tell(self, text: Text) -> None:
        """Its metrics beside those that every process has. Any thread."""

    def failed(self, request: Request, error: Exception) -> None:
        """Tell the driver what an order raised."""
        request.fail(error)

    def check_ready(self) -> None:
        """Raises: RuntimeError where no quick command can be obeyed yet."""

    def _told_spans(self, spans: Sequence[Span], lost: int) -> None:
        if spans:
            self._channel.tell("spans", {"head": self._head, "s": spans, "lost": lost})

    def _metrics(self) -> str:
        text = Text(process=self.told.get("name", ""))
        tell_process(text)
        for verb, num in sorted(self._orders.items()):
            text.add("rl_jax:orders_total", num, verb=verb)
        self.tell(text)
        return str(text)

    def _later(self, request: Request) -> None:
        try:
            self._waiting.put_nowait(request)
        except queue.Full:
            raise RuntimeError(f"{MAX_ORDERS} orders wait already; the first is stuck") from None

    def _now(self, request: Request) -> None:
        self.check_ready()
        getattr(self, f"_{request.verb}")(request)
