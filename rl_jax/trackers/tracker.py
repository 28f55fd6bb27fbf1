"""Tracker: what every place for figures offers, and what it is given.

A tracker may be slow, raise or hang: each has a thread of its own (feed.py), which alone calls it, its constructor
included. A plugin is any class with these methods: "package.module:Class".
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rl_jax.types import Trajectory


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told of the run that it is of."""

    run_id: str
    directory: Path  # its own, for its files; it is there
    attempt: int  # 0: the run is new
    resume_step: int  # the step that this attempt goes on from


@dataclass(frozen=True)
class Sample:
    """One episode of a step, for people to read."""

    uid: str
    tag: str
    reward: float | None
    outcome: str
    num_turns: int
    num_tokens: int
    text: str  # what was said, cut to the limit in bytes; valid UTF-8


class Tracker(Protocol):
    def __init__(self, run: RunInfo, **options: Any): ...

    def log_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Once, first: dotted key -> number, text, bool or None."""
        ...

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A row of metrics.jsonl. Steps of one name rise; rows of one step may be several."""
        ...

    def log_rollouts(self, step: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None:
        """Everything is where it belongs when this returns."""
        ...


def choose(trajectories: Sequence[Trajectory], num: int) -> list[Trajectory]:
    """At most `num`, spread over the rewards from the lowest to the highest; unscored ones first."""
    by_reward = sorted(
        trajectories, key=lambda t: (-np.inf if t.reward.value is None else t.reward.value, t.uid)
    )
    num = min(num, len(by_reward))
    if num <= 1:
        return by_reward[:num]
    return [by_reward[round(i * (len(by_reward) - 1) / (num - 1))] for i in range(num)]


def sample_of(
    trajectory: Trajectory, render: Callable[[np.ndarray], str], max_bytes: int
) -> Sample:
    """Its text is rendered from at most as many tokens as the limit could hold."""
    text = render(trajectory.tokens[: max(1, max_bytes)])
    return Sample(
        trajectory.uid,
        trajectory.tag,
        trajectory.reward.value,
        trajectory.outcome.value,
        len(trajectory.turns),
        trajectory.num_sampled,
        cut(text, max_bytes),
    )


def cut(text: str, max_bytes: int) -> str:
    """At most so many bytes of UTF-8, marked where something is missing; lone surrogates become question marks."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode("utf-8")
    mark = f" [... {len(data) - max_bytes} bytes more]".encode()
    return data[: max(0, max_bytes - len(mark))].decode("utf-8", "ignore") + mark.decode()


class FlatNames:
    """Names with exactly one slash and few other characters, one for each of ours: no name is the beginning of another
    one, which a store of files and directories (a/b beside a/b/c) cannot hold."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()

    def of(self, name: str) -> str:
        if name not in self._names:
            area, slash, rest = name.partition("/")
            area, rest = (area, rest) if slash else ("run", name)
            flat = "/".join(re.sub(r"[^\w. -]", "_", part) or "_" for part in (area, rest))
            while flat in self._taken:
                flat += "_"
            self._taken.add(flat)
            self._names[name] = flat
        return self._names[name]
