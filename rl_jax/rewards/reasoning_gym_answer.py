"""Reasoning-gym's own score of an answer, for tasks of the environment reasoning_gym whose reward is not "env".

The task's payload says which item it is of; the item is made again where the scorer runs, so its metadata reaches
the dataset's score_answer as the dataset made it. Some of these parse the answer with SymPy, which evaluates it: here,
as in the environment, that happens in a worker process, which has no secrets in its environment and can be killed.
"""

from envs.reasoning_gym import scored
from rl_jax.rewards.answers import last_text, needed
from rl_jax.types import EpisodeView, Reward, Task


class ReasoningGymAnswer:
    """Of 0..1; many datasets give part of it to an answer that holds the right one."""

    version = "reasoning_gym/1"

    def score(self, task: Task, episode: EpisodeView) -> Reward:
        """Raises ValueError for a task of another environment."""
        needed(task, "dataset", str, "reasoning_gym")
        value, _ = scored(task.payload, last_text(episode))
        return Reward(value, {"reasoning_gym": value}, (), "scored", self.version)
