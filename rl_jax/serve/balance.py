"""Balance: when a server shall change its role, prefill or decode, from how long requests wait for each.

Owns: the averages of both waits, and what the last move left behind. A pure value: `look` takes what one look saw and
returns the next value and the role that gains a server, or None.
A move needs all of these, so that a constant load moves little:
1. One role's average wait is `factor` times the other's and at least `least_s`, for `looks` looks in a row, over which
   it does not fall: what is left of a burst, or of the time before the last move, drains by itself.
2. The other role keeps a live server.
3. `rest` looks have passed since the last move; for one to prefill also since the first request. A rollout begins with
   every episode at its first prompt: what waits there then is that burst, and nothing could wait to decode yet.
4. A move to a split that was left before needs `factor` times the wait that was left there, which counts half after
   `fade` looks: of neighbours that all have somebody waiting, the better one is kept.
A role that has no live server gets one at once, if the other has two.
Must not: read a clock, know servers, or act (roles.py does).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

ROLES = ("prefill", "decode")
FALLS = 0.9  # a wait that falls below this share within `looks` looks is draining


@dataclass(frozen=True)
class Band:
    """Looks are about a second apart (liveness.interval_s)."""

    factor: float = 2.0
    least_s: float = 0.1  # less is noise: a chunk or a block
    looks: int = 5
    rest: int = 20
    fade: float = 600.0
    half_life: float = 3.0  # looks after which a wait counts half in its average


@dataclass(frozen=True)
class Seen:
    """One look. num_*: live servers in the role; *_s: how long requests wait there now."""

    prefill_s: float
    decode_s: float
    num_prefill: int
    num_decode: int


@dataclass(frozen=True)
class Balance:
    band: Band = Band()
    prefill_s: float = 0.0  # averages
    decode_s: float = 0.0
    side: str = ""  # the role that waits too long, for so many looks
    num_looks: int = 0
    first_s: float = 0.0  # its average at the first of these looks
    rest: int = 0  # looks until a move is possible
    num_seen: int = 0  # looks, up to band.rest
    left: Mapping[int, float] = field(
        default_factory=dict
    )  # num_prefill -> the wait when it was left

    def look(self, seen: Seen) -> tuple["Balance", str | None]:
        """The next value, and the role that gains a server of the other one now."""
        new = self._averaged(seen)
        counts = {"prefill": seen.num_prefill, "decode": seen.num_decode}
        starved = [role for role in ROLES if counts[role] == 0]
        if starved:
            can = max(counts.values()) > 1
            return (new._moved(seen, starved[0]), starved[0]) if can else (new._calm(), None)
        side = new._side()
        giver = "decode" if side == "prefill" else "prefill"
        if not side or counts[giver] < 2 or new._is_worse(seen, side):
            return new._calm(), None
        new = new._counted(side)
        is_early = side == "prefill" and new.num_seen <= new.band.rest
        if new.num_looks < new.band.looks or new.rest > 0 or is_early:
            return new, None
        return new._moved(seen, side), side

    def _averaged(self, seen: Seen) -> "Balance":
        keep = 0.5 ** (1 / self.band.half_life)
        fades = 0.5 ** (1 / self.band.fade)
        return replace(
            self,
            prefill_s=self.prefill_s * keep + seen.prefill_s * (1 - keep),
            decode_s=self.decode_s * keep + seen.decode_s * (1 - keep),
            rest=max(0, self.rest - 1),
            num_seen=min(self.num_seen, self.band.rest) + 1,
            left={num: wait_s * fades for num, wait_s in self.left.items()},
        )

    def _wait_s(self, side: str) -> float:
        return self.prefill_s if side == "prefill" else self.decode_s

    def _side(self) -> str:
        """The role that waits too long, or ""."""
        side, other = ROLES if self.prefill_s > self.decode_s else ROLES[::-1]
        wait_s = self._wait_s(side)
        is_over = wait_s >= self.band.least_s and wait_s >= self.band.factor * self._wait_s(other)
        return side if is_over else ""

    def _is_worse(self, seen: Seen, side: str) -> bool:
        """Whether the move would lead back to where as long was waited, or nearly."""
        leads_to = seen.num_prefill + (1 if side == "prefill" else -1)
        return self._wait_s(side) < self.band.factor * self.left.get(leads_to, 0.0)

    def _counted(self, side: str) -> "Balance":
        """One more look at which this side waits too long, or the first one where it had begun to fall."""
        wait_s = self._wait_s(side)
        goes_on = side == self.side and wait_s >= FALLS * self.first_s
        first_s = self.first_s if goes_on else wait_s
        return replace(
            self, side=side, num_looks=1 + (self.num_looks if goes_on else 0), first_s=first_s
        )

    def _calm(self) -> "Balance":
        return replace(self, side="", num_looks=0, first_s=0.0)

    def _moved(self, seen: Seen, side: str) -> "Balance":
        left = {**self.left, seen.num_prefill: self._wait_s(side)}
        return replace(self._calm(), rest=self.band.rest, left=left)
