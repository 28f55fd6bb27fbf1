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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_jax.types import Reward

MAX_TEXT = 2000  # characters of a text that a service gave
ENV_SCORER = "env"  # scorer_version of rewards that are the environment's own
ROLE_PREFIX = "reward/"  # of a key of StepResult.info that says what a role of the episode got
REMEDY = "give StepResult a reward in every step(), 0.0 for none, or name a scorer as the task source's reward"


class NoReward(float):
    """A NaN that remembers what stood in its place, as show() tells it: for a value that crossed a process border."""

    said: str

    def __new__(cls, said: str) -> "NoReward":
        self = super().__new__(cls, math.nan)
        self.said = said
        return self


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
        return failed("schema", f"the scorer gave {show(reward)}, no Reward")
    version = reward.scorer_version
    if reward.status in ("timeout", "error", "schema") and reward.value is None:
        return failed(reward.status, reward.detail, version)
    if reward.status != "scored":
        return failed(
            "schema", f"status {reward.status!r} with value {show(reward.value)}", version
        )
    said = {"value": reward.value}
    said |= {f"part {name!r}": part for name, part in reward.parts.items()}
    said |= {f"turn {i}": turn for i, turn in enumerate(reward.turn_values) if turn is not None}
    for what, number in said.items():
        if finite(number) is None:
            return failed("schema", f"{what} is {show(number)}, no finite number", version)
    return Reward(
        value=finite(reward.value),
        parts={name: float(part) for name, part in reward.parts.items()},
        turn_values=tuple(None if turn is None else float(turn) for turn in reward.turn_values),
        status="scored",
        scorer_version=version,
    )


def from_steps(step_rewards: Sequence[float | None]) -> Reward:
    """The reward of a task whose reward is "env": the sum of its step rewards, one a turn.

    One step without a finite reward makes the whole episode unscored; so does an episode without a step.
    """
    values: list[float] = []
    for step in step_rewards:
        value = finite(step)
        if value is None:
            detail = f"reward of step {len(values)} is {show(step)}, no finite number; {REMEDY}"
            return failed("schema", detail, ENV_SCORER)
        values.append(value)
    if not values:
        return failed(
            "schema", "the episode has no step, so no reward of its environment", ENV_SCORER
        )
    total = math.fsum(values)
    return Reward(total, {"env": total}, tuple(values), "scored", ENV_SCORER)


def with_roles(reward: Reward, info: Mapping[str, float]) -> Reward:
    """A scored reward with what the environment's info says that each role got, as parts of the roles' names."""
    if reward.status != "scored":
        return reward
    own = {
        name.removeprefix(ROLE_PREFIX): float(value)
        for name, value in info.items()
        if name.startswith(ROLE_PREFIX)
    }
    return replace(reward, parts={**own, **reward.parts})


def show(value: Any) -> str:
    """A value and its type, such as `'1.0' (str)`; cut short, as what an environment returns may be huge."""
    if isinstance(value, NoReward):
        return value.said
    kind = type(value).__name__
    if value is None:
        return "None"
    if not isinstance(value, numbers.Real | str):
        return f"a {kind}"
    try:
        return f"{repr(value[:80] if isinstance(value, str) else value)[:82]} ({kind})"
    except ValueError:  # Python prints no int of more than 4300 digits
        return f"a huge {kind}"


def reward_to_json(reward: Reward) -> dict[str, Any]:
    """Of a reward that went through checked()."""
    return {
        "value": reward.value,
        "parts": dict(reward.parts),
        "turn_values": list(reward.turn_values),
        "status": reward.status,
        "scorer_version": reward.scorer_version,
        "detail": reward.detail,
    }


def reward_of(said: Any, scorer_version: str = "") -> Reward:
    """The reward that a service's JSON tells; status "schema" and the reason if it tells none.

    `value` is needed; `parts`, `turn_values`, `status` ("scored"), `scorer_version` and `detail` may be left out.
    """
    if not isinstance(said, dict):
        return failed("schema", f"the service gave {show(said)}, no object", scorer_version)
    parts, turns = said.get("parts", {}), said.get("turn_values", [])
    texts = {"status": said.get("status", "scored"), "detail": said.get("detail", "")}
    texts["scorer_version"] = said.get("scorer_version", scorer_version)
    kinds = {"parts": (parts, dict), "turn_values": (turns, list)}
    kinds |= {key: (text, str) for key, text in texts.items()}
    for key, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            return failed("schema", f"{key} is {show(value)}, no {kind.__name__}", scorer_version)
    cut = {key: text[:MAX_TEXT] for key, text in texts.items()}
    return checked(Reward(said.get("value"), parts, tuple(turns), **cut))
