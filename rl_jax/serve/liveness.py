"""Whether a server that has work stands still. Progress counts, not answers: one that compiles answers nobody.

A server that has stood still for SUSPECT of its bound is suspect: it may be dead, and is alive again, with all it has,
by any progress. Behind the bound it is dead.
Invariants: time is counted look by look, and no more of it than two intervals a look, so that a pause of this whole
process (a suspended machine, a stopped process) is nobody's death; a server that waits for something to do does not
stand still; one that compiles may take serve.compile_deadline_s for a program.
Must not: read a clock, act (the router does), or be used from two threads.
"""

from dataclasses import dataclass

from rl_jax.serve.loop import Progress
from rl_jax.settings import ServeSettings
from rl_jax.waits import Wait

LOOK_S = 1.0  # between two looks, at most
LOOKS = 4  # in a timeout, at least
SUSPECT = 0.5  # of a bound


def interval_s(settings: ServeSettings) -> float:
    """Between two looks."""
    return min(LOOK_S, settings.progress_timeout_s / LOOKS, settings.compile_deadline_s / LOOKS)


@dataclass
class _Seen:
    num_done: int
    at_s: float
    since_s: float
    still_s: float = 0.0
    bound_s: float = float("inf")
    doing: str = ""
    limit: str = ""


class Liveness:
    def __init__(self):
        self._seen: dict[str, _Seen] = {}

    def look(
        self, name: str, progress: Progress, settings: ServeSettings, now_s: float
    ) -> str | None:
        """Why a server that has work counts as dead, or None. To be asked every interval_s(settings)."""
        seen = self._seen.get(name)
        if seen is None or progress.is_idle or progress.num_done != seen.num_done:
            self._seen[name] = _Seen(progress.num_done, now_s, now_s)
            return None
        seen.still_s += min(now_s - seen.at_s, 2 * interval_s(settings))
        seen.at_s = now_s
        key = "compile_deadline_s" if progress.is_compiling else "progress_timeout_s"
        bound_s = seen.bound_s = getattr(settings, key)
        seen.doing, seen.limit = progress.doing, f"serve.{key}={bound_s:g}"
        if seen.still_s < bound_s:
            return None
        return f"no progress in serve.{key}={bound_s:g} s while {progress.doing}"

    def suspects(self, name: str) -> str | None:
        """Why the server may be dead, as of the last look, or None."""
        seen = self._seen.get(name)
        if seen is None or seen.still_s < SUSPECT * seen.bound_s:
            return None
        return f"no progress for {seen.still_s:.3g} s while {seen.doing} ({seen.limit})"

    def waits(self) -> list[Wait]:
        """Servers that have work and were seen to stand still. Any thread."""
        return [
            Wait(f"progress of {name}", seen.since_s, seen.limit, seen.doing)
            for name, seen in list(self._seen.items())
            if seen.still_s > 0
        ]

    def forget(self, name: str) -> None:
        """It has no work, or was given up."""
        self._seen.pop(name, None)
