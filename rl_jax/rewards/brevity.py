"""Brevity: 0.0 for a text within its limit, down to -1.0 at twice the limit and beyond. For `shaping`.

It counts characters of all turns. algorithm.overlong punishes tokens of a whole trajectory; this one can be had for one
task source, whatever the algorithm, and is part of a reward's record.
"""

from rl_jax.types import EpisodeView, Reward, Task


class Brevity:
    version = "brevity/1"

    def __init__(self, max_chars: int = 1000):
        """Raises: ValueError below 1."""
        if isinstance(max_chars, bool) or not isinstance(max_chars, int) or max_chars < 1:
            raise ValueError(f"brevity: max_chars={max_chars!r} must be an int of at least 1")
        self._max = max_chars

    def score(self, task: Task, episode: EpisodeView) -> Reward:
        over = sum(map(len, episode.turn_texts)) - self._max
        value = -min(1.0, max(0.0, over / self._max))
        return Reward(value, {"brevity": value}, (), "scored", self.version)
