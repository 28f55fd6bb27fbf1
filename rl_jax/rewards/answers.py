"""Which part of what the policy said is its answer. Pure text: nothing here evaluates it.

The last turn's text counts. Of it, a task's payload["answer_pattern"] (a regular expression; the last match's group 1)
is the answer, where a task has one; else each verifier says what it takes.
Must not: give an answer of an earlier turn, or of the task.
"""

import re
from typing import Any

from rl_jax.types import EpisodeView, Task


def last_text(episode: EpisodeView) -> str:
    """Stripped; "" for an episode without a turn."""
    return episode.turn_texts[-1].strip() if episode.turn_texts else ""


def needed(task: Task, key: str, kind: type, scorer: str) -> Any:
    """payload[key]. Raises: ValueError, for a task that this scorer cannot score."""
    value = task.payload.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(
            f"task {task.id} has no {kind.__name__} in payload[{key!r}]; use another reward than {scorer}"
        )
    return value


def by_pattern(task: Task, text: str) -> str | None:
    """What the task's answer_pattern finds in the text: None for nothing, the whole text without a pattern."""
    pattern = task.payload.get("answer_pattern")
    if not pattern:
        return text
    found = list(re.finditer(pattern, text))
    return found[-1].group(1).strip() if found else None


def boxed(text: str) -> str | None:
    r"""What stands in the text's last \boxed{...}, by its braces; None for none, or for one that is not closed."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, first = 1, start + len(r"\boxed{")
    for i in range(first, len(text)):
        if text[i] == "\\":
            continue
        depth += (text[i] == "{") - (text[i] == "}") if text[i - 1] != "\\" else 0
        if depth == 0:
            return text[first:i].strip()
    return None
