"""Answer format: 1.0 if the last turn has the form that its prompt asked for, else 0.0. For `shaping`.

The form is thoughts and an answer, each in its tags, once, in this order, and nothing else; what stands inside is not
looked at. Whether the answer is right is another scorer's matter.
"""

import re

from rl_jax.rewards.answers import last_text
from rl_jax.types import EpisodeView, Reward, Task


class AnswerFormat:
    version = "answer_format/1"

    def __init__(self, think: str = "think", answer: str = "answer"):
        """Names of the tags; think="" for an answer alone. Raises: ValueError for what is no name of a tag."""
        for name in filter(None, (think, answer or "-")):
            if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
                raise ValueError(f"answer_format: {name!r} is no name of a tag")
        self._tags = [name for name in (think, answer) if name]

    def score(self, task: Task, episode: EpisodeView) -> Reward:
        value = float(self._fits(last_text(episode)))
        return Reward(value, {"answer_format": value}, (), "scored", self.version)

    def _fits(self, text: str) -> bool:
        for i, name in enumerate(self._tags):
            opening, closing = f"<{name}>", f"</{name}>"
            if text.count(opening) != 1 or text.count(closing) != 1 or not text.startswith(opening):
                return False
            inside, _, text = text.removeprefix(opening).partition(closing)
            text = text.lstrip() if i + 1 < len(self._tags) else text
            if any(f"<{other}>" in inside or f"</{other}>" in inside for other in self._tags):
                return False
        return not text
