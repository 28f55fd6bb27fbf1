"""The arithmetic of versions: ages of tokens, and the two gates that bound them. Host, integers.

Admission (admissible) spares work, consumption (is_fresh) is what bounds the age: with admission alone a straggler can
be consumed arbitrarily old. Both take one number, rollout.max_staleness; scheduler and buffer ask here. What an age is
counted from, rollout.age_of, is decided here alone (oldest_counted).
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

AGE_OF = ("oldest", "start")  # rollout.age_of


class Aged(Protocol):
    """A trajectory, or an episode that still runs; None = there is no such version yet."""

    @property
    def start_version(self) -> int | None: ...  # that served when the episode started
    @property
    def oldest_version(self) -> int | None: ...  # of the oldest trained token


def token_ages(versions: np.ndarray, version: int) -> np.ndarray:
    """int64 like versions, of trained tokens: version of the consumer minus the token's."""
    return version - np.asarray(versions, np.int64)


def version_mix(ages: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """int64 by trajectory: the oldest and newest age of its trained tokens, how many there are, and the first token's.

    Args:    ages: one array a trajectory, in the order of the text; an empty one gives zeros.
    """
    return {
        "oldest": np.array([a.max(initial=0) for a in ages], np.int64),
        "newest": np.array([a.min() if len(a) else 0 for a in ages], np.int64),
        "num_versions": np.array([len(np.unique(a)) for a in ages], np.int64),
        "start_age": np.array([a[0] if len(a) else 0 for a in ages], np.int64),
    }


def oldest_counted(episodes: Iterable[Aged], age_of: str, now: int) -> int:
    """The oldest version that the age of any of these is counted from; `now` where none has begun.

    Args:    age_of: oldest = that of its oldest trained token | start = that at which the episode started, which is
             the same or older: what passed while it waited for its first token ages it too.
    Source:  start is RollArt's arXiv:2512.22560, oldest prime-rl's and AReaL's.
    """
    found = (e.start_version if age_of == "start" else e.oldest_version for e in episodes)
    return min((version for version in found if version is not None), default=now)


def is_fresh(version: int, sampled_version: int, max_staleness: int) -> bool:
    """Whether what a version sampled may still be consumed (or go on running)."""
    return version - sampled_version <= max_staleness


def buffer_limit(max_staleness: int, batch: int) -> int:
    """Most samples that may be started and not consumed: (1 + max_staleness) batch."""
    return (1 + max_staleness) * batch


def admissible(num_open: int, max_staleness: int, batch: int) -> int:
    """How many more may start while num_open are started and not consumed.

    Source:  AReaL arXiv:2505.24298, whose (max_staleness + version + 1) batch - started is this, since version batches
             are consumed. Negative after a resume with a smaller bound.
    """
    return buffer_limit(max_staleness, batch) - num_open
