"""What the settings of rewards may not be together.

Must not: reach a service, or read a token file (preflight does, by EnvPool.prepare()).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from rl_jax.rewards import REWARDS
from rl_jax.settings import RewardSettings, Settings, TaskSource

JUDGE_S = 30.0  # Judge's own timeout_s
CheckName = Callable[[str, str, Mapping[str, Any]], list[str]]
OF_SERVICE = ("token_file",)  # settings that are read with a url alone
RESERVED = ("env", "composite")  # names that no scorer has


def reward_errors(s: Settings, check_name: CheckName) -> Iterator[str]:
    """One line for each thing that is wrong."""
    for i, source in enumerate(s.tasks.sources):
        yield from _source_errors(f"tasks.sources[{i}]", source, check_name)
    yield from _place_errors(s.rewards)
    known = frozenset().union(*(source.scorers for source in s.tasks.sources))
    for name, options in s.rewards.options.items():
        if name not in known:
            has = ", ".join(sorted(known)) or "none"
            yield f"rewards.options.{name}: no task source names this scorer; they name {has}"
        if not isinstance(options, Mapping):
            yield f"rewards.options.{name}={options!r} must be a mapping of keyword arguments"
    if "judge" in known and not s.rewards.url:
        yield from _judge_errors(s.rewards)


def _judge_errors(r: RewardSettings) -> Iterator[str]:
    options = r.options.get("judge", {})
    own = options if isinstance(options, Mapping) else {}
    if missing := [name for name in ("url", "model") if not own.get(name)]:
        yield f"rewards.options.judge needs {' and '.join(missing)}: the endpoint, and the model to ask there"
    judge_s = own.get("timeout_s", JUDGE_S)
    if isinstance(judge_s, int | float) and judge_s >= r.timeout_s:
        yield (
            f"rewards.timeout_s={r.timeout_s:g} ends the judge's process before its own timeout_s={judge_s:g}; raise"
            " it, or lower rewards.options.judge.timeout_s"
        )


def _source_errors(where: str, source: TaskSource, check_name: CheckName) -> Iterator[str]:
    yield from check_name(f"{where}.reward", source.reward, {**dict.fromkeys(RESERVED), **REWARDS})
    if (source.reward == "composite") != bool(source.parts):
        yield (
            f"{where}.parts={dict(source.parts)} with reward={source.reward}: parts are what the reward composite is"
            " the weighted sum of; set both, or neither"
        )
    for key in ("parts", "shaping"):
        for name, weight in getattr(source, key).items():
            yield from check_name(f"{where}.{key}", name, {"env": "", **REWARDS})
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not math.isfinite(weight):
                yield f"{where}.{key}.{name}={weight!r} is a weight; use a finite number"
    if source.turn_reward:
        yield from check_name(f"{where}.turn_reward", source.turn_reward, REWARDS)
    if not math.isfinite(source.turn_weight):
        yield f"{where}.turn_weight={source.turn_weight} must be a finite number"


def _place_errors(r: RewardSettings) -> Iterator[str]:
    if not r.url:
        for name in OF_SERVICE:
            if getattr(r, name):
                yield f"rewards.{name}={getattr(r, name)} is of a service, and rewards.url names none"
        return
    try:
        parts = urlsplit(r.url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url, parts = False, None
    if not is_url:
        yield f"rewards.url={r.url} is no URL of a service; use http://HOST:PORT or https://HOST"
    elif parts is not None and parts.password:
        yield "rewards.url holds a password, which would stand in config.json; use rewards.token_file"
    if r.options:
        yield "rewards.options is not read with a rewards.url: give them to the service (--options=FILE)"
    if r.total_timeout_s < r.timeout_s:
        yield (
            f"rewards.total_timeout_s={r.total_timeout_s:g} is less than the rewards.timeout_s={r.timeout_s:g} that one"
            " call of a scorer may take; raise it"
        )
