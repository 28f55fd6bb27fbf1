"""Exact match: 1.0 if the last turn's text is the task's answer, else 0.0."""

from rl_jax.types import EpisodeView, Reward, Task


class ExactMatch:
    """Compares with payload["answer"], both stripped of surrounding white space."""

    version = "exact_match/1"

    def score(self, task: Task, episode: EpisodeView) -> Reward:
        """Raises ValueError for a task without an answer: there is nothing to compare with."""
        answer = task.payload.get("answer")
        if not isinstance(answer, str):
            raise ValueError(
                f"task {task.id} has no text in payload['answer']; use another reward than exact_match"
            )
        said = episode.turn_texts[-1].strip() if episode.turn_texts else ""
        value = float(said == answer.strip())
        return Reward(value, {"exact_match": value}, (), "scored", self.version)
