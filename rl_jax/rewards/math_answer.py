r"""Math answer: 1.0 if the policy's answer equals the task's, as mathematics, else 0.0. Extra: math-verify.

The answer is what the task's answer_pattern finds, else what stands in the last \boxed{...}, else the last turn's whole
text where that is short; without one the value is 0.0. Both sides are read as LaTeX by math-verify's grammar and
compared by SymPy. Nothing the policy said is evaluated as code: math-verify's other reader, for expressions without
LaTeX, goes through SymPy's parse_expr and so through eval, and is not used.
SymPy has no bound of its own (9^{9^{9^9}}). math-verify's timeouts are signals, which this process needs for itself, so
they are off: a call that takes too long ends by the scorer's deadline, with its worker.
"""

import logging
from typing import Any

from rl_jax.rewards.answers import boxed, by_pattern, last_text, needed
from rl_jax.types import EpisodeView, Reward, Task

MAX_PLAIN = 200  # characters of a text that is taken for an answer as a whole
MAX_ANSWER = 2000  # a longer one is wrong: nobody's answer is so long, and its grammar is slow


class MathAnswer:
    """payload["answer"]: LaTeX or plain, such as "12", "\\frac{1}{2}", "x^2+1", "\\{1,2\\}"."""

    version = "math/1"

    def __init__(self):
        """Raises: ImportError where the extra is missing."""
        import math_verify

        self._library = math_verify
        self._how = [math_verify.LatexExtractionConfig()]
        logging.getLogger("math_verify").setLevel(
            logging.CRITICAL
        )  # it warns of each call without a timeout

    def score(self, task: Task, episode: EpisodeView) -> Reward:
        """Raises ValueError for a task without an answer that can be read."""
        wanted = self._read(needed(task, "answer", str, "math"))
        if not wanted:
            raise ValueError(
                f"task {task.id}: payload['answer']={task.payload['answer']!r} cannot be read as LaTeX"
            )
        text = last_text(episode)
        answer = by_pattern(task, text)
        if answer is not None and not task.payload.get("answer_pattern"):
            answer = boxed(text) or (text if len(text) <= MAX_PLAIN else None)
        value = 0.0
        if answer and len(answer) <= MAX_ANSWER and (said := self._read(answer)):
            value = float(self._library.verify(wanted, said, timeout_seconds=None))
        return Reward(value, {"math": value}, (), "scored", self.version)

    def _read(self, answer: str) -> list[Any]:
        """What the answer may mean; [] if it cannot be read."""
        plain = boxed(answer) or answer.strip().strip("$").strip()
        return self._library.parse(
            f"${plain}$", self._how, parsing_timeout=None, fallback_mode="no_fallback"
        )
