"""Code: 1.0 if the last turn's code passes every hidden test, else 0.0; or the share it passes.

The task's payload holds `tests` (rl_jax/sandbox/grade.py says their forms), `function`, the name that tests with `args`
call (default "f"), and `reward_by`: "all" (the default) or "fraction". The code is the last fenced block of the last
turn, or all of it. It runs in a sandbox and nowhere else; a machine without one is refused when the scorer is made.
"""

from rl_jax.sandbox.grade import answered_code, open_grader
from rl_jax.types import EpisodeView, Reward, Task


class Code:
    """For another backend or other limits, name a subclass as the task source's reward."""

    version = "code/1"
    backend, python, wall_s, memory_mb = "bubblewrap", "python3", 5.0, 256

    def __init__(self):
        """Raises SandboxMissing."""
        self._grader = open_grader(self.backend, self.python, self.wall_s, self.memory_mb)

    def score(self, task: Task, episode: EpisodeView) -> Reward:
        """Raises: ValueError for a task without tests, SandboxError if the sandbox failed: neither is a zero."""
        reward_by = task.payload.get("reward_by", "all")
        if reward_by not in ("all", "fraction"):
            raise ValueError(
                f"task {task.id}: payload['reward_by']={reward_by!r} is not one of all, fraction"
            )
        try:
            code = answered_code(episode.turn_texts[-1]) if episode.turn_texts else ""
            grade = self._grader.grade(
                code, task.payload.get("tests"), task.payload.get("function", "f")
            )
        except ValueError as error:
            raise ValueError(f"task {task.id}: payload['tests']: {error}") from None
        value = grade.fraction if reward_by == "fraction" else float(grade.is_right)
        parts = {"code": value, "tests_passed": grade.fraction}
        return Reward(value, parts, (), "scored", self.version, grade.said)
