"""Scorers whose time and answer a task's payload says, for tests and benchmarks of where scorers run."""

import time

from rl_jax.types import EpisodeView, Reward, Task


class SleepingScorer:
    """Takes payload["seconds"] (0), then says payload["value"] (1.0); of a turn, the number in its text."""

    version = "sleeping/1"

    def score(self, task: Task, episode: EpisodeView) -> Reward:
        time.sleep(task.payload.get("seconds", 0.0))
        return Reward(task.payload.get("value", 1.0), {}, (), "scored", self.version)

    def score_turn(self, task: Task, episode: EpisodeView, turn: int) -> Reward:
        time.sleep(task.payload.get("seconds", 0.0))
        return Reward(float(episode.turn_texts[turn]), {}, (), "scored", self.version)
