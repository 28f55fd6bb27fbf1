"""What a token costs, as a server's thread measures it and the router reads it.

Invariants: an average is weighed by the work, so small pieces, which pay for padding, count little; it follows what
changes, what was measured long ago counting little; None until something was measured. One writer, the server's thread.
Must not: read a clock (times are arguments), or wait.
"""

RATE_TOKENS = (
    4096.0  # a few chunks: what changes (clocks, company on the devices) is followed within seconds
)
RATE_BLOCKS = 64.0


class Rate:
    """Seconds a unit of work."""

    def __init__(self, half_life: float):
        """half_life: units of work after which what was measured before counts half."""
        self._half_life = half_life
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        keep = 0.5 ** (amount / self._half_life)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + seconds

    @property
    def unit_s(self) -> float | None:
        return self._seconds / self._amount if self._amount else None


class AppendRate:
    """Of a decode server, where the device computes chunks and blocks in one stream and the host waits for blocks only:
    a chunk takes what a block behind it takes longer than blocks alone."""

    def __init__(self):
        self._token, self._block = Rate(RATE_TOKENS), Rate(RATE_BLOCKS)
        self._num_tokens, self._start_s = 0, 0.0  # of the chunks since the last block

    @property
    def token_s(self) -> float | None:
        return self._token.unit_s

    @property
    def block_s(self) -> float | None:
        """Of a block alone."""
        return self._block.unit_s

    def chunk(self, num_tokens: int, start_s: float) -> None:
        """A chunk was dispatched."""
        if not self._num_tokens:
            self._start_s = start_s
        self._num_tokens += num_tokens

    def block(self, start_s: float, end_s: float) -> None:
        """A block was dispatched, and its tokens are here."""
        alone_s = self._block.unit_s
        if not self._num_tokens:
            self._block.add(1, end_s - start_s)
        elif alone_s is not None:
            self._token.add(self._num_tokens, max(0.0, end_s - self._start_s - alone_s))
        self.forget()

    def forget(self) -> None:
        """No block follows the last chunks at once."""
        self._num_tokens = 0
