"""What a reward may be, decided in one place. A failure is a status, never a zero.

    what a scorer or an environment gives     becomes
    0.0, -0.0, 1, np.float32(0.5)             scored, that number (a zero is a reward like any other)
    None                                      schema
    NaN, inf, 1e400, "1.0", True, [1.0]       schema
    an exception                              error      (written by who caught it: failed())
    nothing within its deadline               timeout    (likewise)

Only a scored reward has a value. Must not: call a scorer.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

from rl_jax.types import Reward

ENV_SCORER = "env"  # scorer_version of rewards that are the environment's own


def finite(value: Any) -> float | None:
    """The value as a float if it is a finite real number; None for everything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def failed(status: str, detail: str, scorer_version: str = "") -> Reward:
    """A reward that has no value. status: timeout | error | schema."""
    return Reward(None, {}, (), status, scorer_version, detail)


def checked(reward: Any) -> Reward:
    """A scorer's answer, with plain floats; status "schema" and the reason if it is none."""
    if not isinstance(reward, Reward):
        return failed("schema", f"the scorer gave {_show(reward)}, no Reward")
    version = str(reward.scorer_version)
    if reward.status != "scored":
        if reward.status not in ("timeout", "error", "schema") or reward.value is not None:
            return failed(
                "schema", f"status {reward.status!r} with value {_show(reward.value)}", version
            )
        return failed(reward.status, str(reward.detail), version)
    value = finite(reward.value)
    if value is None:
        return failed("schema", f"value is {_show(reward.value)}, no finite number", version)
    parts = {str(name): finite(part) for name, part in reward.parts.items()}
    turn_values = tuple(None if turn is None else finite(turn) for turn in reward.turn_values)
    for name, part in parts.items():
        if part is None:
            return failed(
                "schema", f"part {name!r} is {_show(reward.parts[name])}, no finite number", version
            )
    for i, turn in enumerate(turn_values):
        if turn is None and reward.turn_values[i] is not None:
            return failed(
                "schema", f"turn {i} is {_show(reward.turn_values[i])}, no finite number", version
            )
    return Reward(value, parts, turn_values, "scored", version)


def from_steps(step_rewards: Sequence[float | None]) -> Reward:
    """The reward of a task whose reward is "env": the sum of its step rewards, one a turn.

    One step without a finite reward makes the whole episode unscored; so does an episode without a step.
    """
    values = [finite(step) for step in step_rewards]
    for i, value in enumerate(values):
        if value is None:
            return failed(
                "schema",
                f"reward of step {i} is {_show(step_rewards[i])}, no finite number",
                ENV_SCORER,
            )
    if not values:
        return failed(
            "schema", "the episode has no step, so its environment gave no reward", ENV_SCORER
        )
    total = math.fsum(values)
    return Reward(total, {"env": total}, tuple(values), "scored", ENV_SCORER)


def _show(value: Any) -> str:
    """A short repr; what an environment returns may be huge."""
    return (
        repr(value)[:80]
        if isinstance(value, int | float | str | bool | None)
        else type(value).__name__
    )
