"""Regex match: 1.0 if the last turn's text is what the task's pattern describes, as a whole, else 0.0.

A pattern may take longer than the universe for a text that was made for it (nested repetitions): such a call ends by
its deadline, with its worker, and is a timeout.
"""

import re

from rl_jax.rewards.answers import last_text, needed
from rl_jax.types import EpisodeView, Reward, Task


class RegexMatch:
    """payload["pattern"], of the module re; `.` also matches a line's end."""

    version = "regex_match/1"

    def score(self, task: Task, episode: EpisodeView) -> Reward:
        """Raises ValueError for a task without a pattern, re.error for one that is none."""
        pattern = needed(task, "pattern", str, "regex_match")
        value = float(re.fullmatch(pattern, last_text(episode), re.DOTALL) is not None)
        return Reward(value, {"regex_match": value}, (), "scored", self.version)
