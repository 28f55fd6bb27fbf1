"""Bound: how many versions old a batch may be now, under rollout.staleness_policy.

Owns: the decision alone. `fixed`: rollout.max_staleness, for good. `adaptive`: 1 up to max_staleness, whichever gives
the most worth a second, where a batch's worth is the effective sample size of its importance weights (is/ess) times its
samples: so the time to a given sum of them is least. A pure value: `saw` takes what one step saw and returns the next
value; all of it is JSON (to_tree, from_tree), and the driver's checkpoint holds it.
Life, adaptive:
1. It begins in the middle, where the way to every other bound is short.
2. After a change as many steps pass as batches may be under way; then `window` steps are measured. Their sums join
   those of the bound, which count half after `half_life` steps.
3. The bounds beside it are judged by what they brought when they were tried, as long as that counts; else by the most
   that they could bring. One more: the learner waits no more, or no slot is free, whichever gains less. One less: no
   step takes longer, and every token is one version fresher, which is worth what is measured at that lag (fresher).
   What was tried is doubted by `doubt` standard errors of its steps' times: more, the fewer steps or the longer ago.
4. The better one is taken where it promises `margin` more than this one has brought. What is clearly worse is tried
   again when what it brought has faded; what is much the same costs little to try.
Invariants: 1 <= bound <= most under adaptive; one version at a time.
Source: none; RollArt (arXiv:2512.22560) fixes its bound by hand and finds 2 faster a step and slower to a score than 1.
Must not: read a clock, or do what it decides (driver.py does).
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from rl_jax.metrics import Metric

POLICIES = ("fixed", "adaptive")
ADAPTIVE = "adaptive"
MOST_ESS = 1 + 1e-6  # of float32 sums
SHARE = re.compile(r"staleness/share_lag(\d+)")


@dataclass(frozen=True)
class Limits:
    """Of one run. Counted in steps but for margin."""

    most: int  # rollout.max_staleness
    window: int = 3
    half_life: float = 64.0
    margin: float = 0.03  # share
    doubt: float = 1.0  # standard errors


@dataclass(frozen=True)
class Seen:
    """One step. wait_s: of step_s the learner waited for its batch. idle_s: the step's seconds times the share of the
    slots for episodes that the bound kept free. ess: is/ess of the batch; fresher_ess: of `fresher`."""

    step_s: float
    wait_s: float
    idle_s: float
    ess: float
    fresher_ess: float

    @classmethod
    def of(cls, metrics: Mapping[str, Metric], idle_s: float) -> "Seen | None":
        """From a step's metrics; None where the weights of its batch were not finite, or nothing was trained."""
        ess = _mean(metrics.get("is/ess"))
        if not 0 < ess <= MOST_ESS:
            return None
        by_lag = {}
        for name, share in metrics.items():
            if found := SHARE.fullmatch(name):
                lag = int(found[1])
                at_lag = _mean(metrics.get(f"is/ess_lag{lag}"))
                by_lag[lag] = (_mean(share), at_lag if 0 < at_lag <= MOST_ESS else ess)
        step_s, wait_s = (_mean(metrics.get(f"time/{n}_s")) for n in ("step", "wait_for_batch"))
        return cls(step_s, wait_s, min(idle_s, step_s), ess, fresher(by_lag))


@dataclass(frozen=True)
class Sums:
    """Over steps; a count may have faded."""

    count: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    idle_s: float = 0.0
    ess: float = 0.0
    fresher_ess: float = 0.0
    square: float = 0.0  # of step_s

    def plus(self, seen: Seen) -> "Sums":
        s = seen
        one = Sums(1, s.step_s, s.wait_s, s.idle_s, s.ess, s.fresher_ess, s.step_s**2)
        return self.merged(one)

    def merged(self, other: "Sums") -> "Sums":
        return Sums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def faded(self, keep: float) -> "Sums":
        return Sums(*(keep * value for value in astuple(self)))

    @property
    def error(self) -> float:
        """Standard error of the mean step, over the mean."""
        mean_s = self.step_s / self.count
        variance = max(0.0, self.square / self.count - mean_s**2)
        return (variance / max(self.count - 1, 0.5)) ** 0.5 / mean_s

    @property
    def rate(self) -> float:
        """Batches' worth a second."""
        return self.ess / self.step_s


@dataclass(frozen=True)
class Bound:
    """`now` is the bound."""

    now: int
    skip: int = 0  # steps until the window begins
    window: Sums = Sums()
    brought: Mapping[int, Sums] = field(default_factory=dict)  # bound -> what it brought

    @classmethod
    def first(cls, limits: Limits) -> "Bound":
        now = (1 + limits.most) // 2
        return cls(now, skip=1 + now)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], limits: Limits) -> "Bound":
        """Of to_tree, perhaps of a run with other limits."""
        brought = {int(key): Sums(**sums) for key, sums in tree["brought"].items()}
        bound = cls(tree["now"], tree["skip"], Sums(**tree["window"]), brought)
        if bound.now > limits.most:
            bound = replace(bound, now=limits.most, skip=bound.now, window=Sums())
        return bound

    def to_tree(self) -> dict[str, Any]:
        """JSON."""
        brought = {str(key): asdict(sums) for key, sums in self.brought.items()}
        return {
            "now": self.now, "skip": self.skip, "window": asdict(self.window), "brought": brought,
        }  # fmt: skip

    def saw(self, seen: Seen, limits: Limits) -> "Bound":
        """The next value, after one step."""
        keep = 0.5 ** (1 / limits.half_life)
        brought = {key: sums.faded(keep) for key, sums in self.brought.items()}
        new = replace(self, brought=brought)
        if new.skip > 0:
            return replace(new, skip=new.skip - 1)
        new = replace(new, window=new.window.plus(seen))
        if new.window.count < limits.window:
            return new
        here = new.brought.get(new.now, Sums()).merged(new.window)
        new = replace(new, window=Sums(), brought={**new.brought, new.now: here})
        promised = {to: new.promise(to, limits) for to in (new.now - 1, new.now + 1)}
        to = max(promised, key=lambda key: promised[key])
        if promised[to] <= (1 + limits.margin) * here.rate:
            return new
        # Batches begun under the wider of the two bounds are still to come.
        return replace(new, now=to, skip=max(to, new.now))

    def promise(self, to: int, limits: Limits) -> float:
        """Worth a second of a neighbour: what it brought, or the most that it could."""
        if not 1 <= to <= limits.most:
            return 0.0
        here = self.brought[self.now]
        if to > self.now:
            shortest_s = max(here.step_s - here.wait_s, here.step_s - here.idle_s)
            most = here.ess / max(shortest_s, 1e-9)
        else:
            most = here.fresher_ess / here.step_s
        known = self.brought.get(to)
        if known is None:
            return most
        return min(most, known.rate * (1 + limits.doubt * known.error))


def fresher(by_lag: Mapping[int, tuple[float, float]]) -> float:
    """The effective sample size of a batch of which every token is one version fresher.

    by_lag: lag -> (share of the tokens, effective sample size of the weights at that lag), of the batch as it is. With
    weights of mean 1 at each lag, 1 / size is the mean of their squares. A lag that the batch lacks is read off the one
    above by log size ~ lag squared, the least that log-ratios which drift leave it; a random walk leaves it less.
    """
    squares = 0.0
    for lag, (share, ess) in by_lag.items():
        if lag > 0:
            drift = ess ** ((lag - 1) / lag) ** 2
            ess = by_lag[lag - 1][1] if lag - 1 in by_lag else drift
        squares += share / ess
    return sum(share for share, _ in by_lag.values()) / squares if squares else 1.0


def _mean(metric: Metric | None) -> float:
    """0 where there is none."""
    mean = None if metric is None else metric.mean
    return 0.0 if mean is None else mean
