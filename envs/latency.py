"""How long an environment's call takes on purpose: a distribution, drawn from a seed.

A mapping of a task source's config, {"kind": "lognormal", "mean_s": 0.2, "std_s": 0.1}:
    constant    mean_s each time
    gaussian    mean_s and std_s, cut off at 0
    lognormal   of which mean_s and std_s are the mean and the standard deviation: a long tail to the right
{} is no latency. No wait is longer than max_s. The waits of an episode follow from its seed alone. Members of a group
have one seed, so they wait equally.
"""

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envs import read_config

KINDS = ("constant", "gaussian", "lognormal")


@dataclass(frozen=True)
class Latency:
    kind: str = "constant"
    mean_s: float = 0.0
    std_s: float = 0.0
    max_s: float = 60.0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"latency: kind={self.kind!r} is not one of {', '.join(KINDS)}")
        for name in ("mean_s", "std_s", "max_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"latency: {name}={value!r} must be a number of at least 0")
            if not math.isfinite(value):
                raise ValueError(f"latency: {name}={value} must be finite")
        if self.kind == "constant" and self.std_s:
            raise ValueError(
                f"latency: std_s={self.std_s} has no effect with kind=constant; use 0, or another kind"
            )
        if self.kind == "lognormal" and not self.mean_s:
            raise ValueError("latency: mean_s=0 has no lognormal distribution; use more than 0")

    def draw_s(self, rng: random.Random) -> float:
        """Seconds of one wait, 0 to max_s."""
        wait_s = self.mean_s
        if self.kind == "gaussian":
            wait_s = rng.gauss(self.mean_s, self.std_s)
        elif self.kind == "lognormal":
            variance = math.log1p((self.std_s / self.mean_s) ** 2)
            wait_s = rng.lognormvariate(math.log(self.mean_s) - variance / 2, math.sqrt(variance))
        return min(max(wait_s, 0.0), self.max_s)

    def wait(self, rng: random.Random) -> None:
        """Block for a drawn time; not at all where it is 0."""
        if self.mean_s or self.std_s:
            time.sleep(self.draw_s(rng))


def read_latency(cfg: Mapping[str, Any]) -> Latency:
    """Raises: ValueError naming the key, the value and what may stand there."""
    if not isinstance(cfg, Mapping):
        raise ValueError(
            f"latency: {cfg!r:.80} is no mapping; use one such as"
            ' {"kind": "constant", "mean_s": 0.1}, or {} for none'
        )
    return read_config(Latency, cfg)
