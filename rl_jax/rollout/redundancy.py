"""What redundant episodes cost, and how they differ from those that were kept.

The first to finish are kept, so what is trained is quicker than what was sampled: shorter, and of another mean reward
where the two go together. The figures here let that be seen. An episode that was cancelled has no reward, and of its
length only the part that was played; so lengths of what was dropped are lower bounds, and rewards are of the members of
redundant groups that had been scored.
Owns: these figures since they were asked for last. The rollout's loop writes, the driver's thread asks.
Must not: decide anything, or be asked about a run without redundancy.
"""

import threading
from collections.abc import Iterable, Sequence

from rl_jax.metrics import Metric
from rl_jax.rollout.episode import Episode
from rl_jax.types import Trajectory


class Redundancy:
    def __init__(self):
        self._lock = threading.Lock()
        self._values: dict[str, list[float]] = {}

    def keep(self, trajectories: Iterable[Trajectory]) -> None:
        """A group is complete, with these."""
        self._saw("kept", [*trajectories])

    def drop(self, scored: Iterable[Trajectory], live: Iterable[Episode]) -> None:
        """These are not needed any more."""
        self._saw("dropped", [*scored], [*live])

    def metrics(self) -> dict[str, Metric]:
        """Since it was asked before; {} where nothing ended."""
        with self._lock:
            values, self._values = self._values, {}
        if not values:
            return {}
        tokens = values.get("length_dropped", [])
        return {
            "redundant/episodes": Metric(float(len(tokens)), 1),
            "redundant/tokens": Metric(sum(tokens), 1),
            **{f"redundant/{name}": Metric.of(found) for name, found in sorted(values.items())},
        }

    def _saw(self, kind: str, scored: list[Trajectory], live: Sequence[Episode] = ()) -> None:
        found = {
            f"length_{kind}": [t.num_sampled for t in scored] + [e.num_tokens for e in live],
            f"turns_{kind}": [len(t.turns) for t in scored] + [len(e.turns) for e in live],
            f"reward_{kind}": [t.reward.value for t in scored if t.reward.value is not None],
        }
        with self._lock:
            for name, values in found.items():
                if values:
                    self._values.setdefault(name, []).extend(map(float, values))
