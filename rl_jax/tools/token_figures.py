"""What each trained token of a batch contributed: trainer against sampler, ratio, advantage, clip; by age and singly.

All arrays are over the trained tokens of the batch, in the order of Batch.trained; N of them, of E episodes.
Must not: import jax, or change a batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_jax.learner.batch import Batch
from rl_jax.settings import AlgorithmSettings
from rl_jax.types import Trajectory

AROUND = 12  # tokens of the text before and after one that is shown
EXPONENT = 20.0  # as the learner clamps log-ratios


@dataclass(frozen=True)
class TokenFigures:
    episodes: tuple[Trajectory, ...]  # E, those that train
    episode: np.ndarray  # i32[N] index into episodes
    position: np.ndarray  # i32[N] in the trajectory
    version: np.ndarray  # i32[N] that sampled it; -1 = none did
    lag: np.ndarray  # i32[N] versions between that and the one that trains; -1 = not sampled
    sampler: np.ndarray  # f32[N] log-prob
    trainer: np.ndarray  # f32[N] log-prob at the step's start
    advantage: np.ndarray  # f32[N]
    weight: np.ndarray  # f32[N] of the token in the loss
    clipped: np.ndarray  # bool[N] beyond the clip range on the side that its advantage pulls to

    @property
    def difference(self) -> np.ndarray:
        """f32[N] trainer - sampler."""
        return self.trainer - self.sampler

    @property
    def ratio(self) -> np.ndarray:
        """f32[N] trainer over sampler."""
        return np.exp(np.clip(self.difference, -EXPONENT, EXPONENT))


def token_figures(
    batch: Batch,
    members: Sequence[Trajectory],
    logprobs: np.ndarray,
    version: int,
    settings: AlgorithmSettings,
) -> TokenFigures:
    """members: of all groups, in order. logprobs: f32[B, T] of the trainer. version: that consumes the batch."""
    positions = batch.place([np.arange(len(m.tokens)) for m in members], np.int32)
    columns = {
        "position": positions,
        "version": batch.versions,
        "sampler": batch.behaviour_logprobs,
        "trainer": logprobs,
        "advantage": batch.advantages,
        "weight": batch.loss_weights,
    }
    found = {name: batch.trained(array) for name, array in columns.items()}
    order = [member for member, _ in found["position"]]
    lengths = [len(values) for _, values in found["position"]]
    flat = {
        name: np.concatenate([values for _, values in parts] or [np.zeros(0, np.float32)])
        for name, parts in found.items()
    }
    lag = np.where(flat["version"] >= 0, version - flat["version"], -1).astype(np.int32)
    ratio = np.exp(np.clip(flat["trainer"] - flat["sampler"], -EXPONENT, EXPONENT))
    return TokenFigures(
        tuple(members[i] for i in order),
        np.repeat(np.arange(len(order)), lengths).astype(np.int32),
        **flat,
        lag=lag,
        clipped=_clipped(ratio, flat["advantage"], settings),
    )


def _clipped(ratio: np.ndarray, advantage: np.ndarray, settings: AlgorithmSettings) -> np.ndarray:
    """Where a clipped surrogate with these bounds would give no gradient, were the sampler its old policy."""
    out = np.zeros(len(ratio), bool)
    if settings.clip_high is not None:
        out |= (advantage > 0) & (ratio > 1 + settings.clip_high)
    if settings.clip_low is not None:
        out |= (advantage < 0) & (ratio < 1 - settings.clip_low)
    return out


def by_lag(figures: TokenFigures) -> list[dict[str, float]]:
    """One row an age, ascending; -1 holds what nobody sampled (scripts)."""
    rows = []
    for lag in np.unique(figures.lag).tolist():
        own = figures.lag == lag
        d, ratio = figures.difference[own].astype(np.float64), figures.ratio[own]
        rows.append(
            {
                "lag": lag,
                "tokens": int(own.sum()),
                "abs_mean": float(np.abs(d).mean()),
                "abs_max": float(np.abs(d).max()),
                "k3": float((np.expm1(d) - d).mean()),
                "ratio_min": float(ratio.min()),
                "ratio_mean": float(ratio.mean()),
                "ratio_max": float(ratio.max()),
                "clipped": float(figures.clipped[own].mean()),
            }
        )
    return rows


def worst(
    figures: TokenFigures, num: int, decode: Callable[[np.ndarray], str]
) -> Iterator[dict[str, Any]]:
    """The tokens that trainer and sampler differ in most, with the text around them. decode: tokens i32[n] -> text."""
    for n in np.argsort(-np.abs(figures.difference), kind="stable")[:num].tolist():
        t = figures.episodes[figures.episode[n]]
        at = int(figures.position[n])
        yield {
            "uid": t.uid,
            "position": at,
            "turn": int(t.turn_ids[at]),
            "before": decode(t.tokens[max(at - AROUND, 0) : at]),
            "text": decode(t.tokens[at : at + 1]),
            "after": decode(t.tokens[at + 1 : at + 1 + AROUND]),
            **_one(figures, n),
        }


def per_episode(figures: TokenFigures) -> Iterator[dict[str, Any]]:
    """All trained tokens, episode by episode."""
    for i, t in enumerate(figures.episodes):
        own = figures.episode == i
        yield {
            "uid": t.uid,
            "reward": t.reward.value,
            "position": figures.position[own].tolist(),
            "token": t.tokens[figures.position[own]].tolist(),
            "version": figures.version[own].tolist(),
            "sampler": figures.sampler[own].tolist(),
            "trainer": figures.trainer[own].tolist(),
            "ratio": figures.ratio[own].tolist(),
            "advantage": figures.advantage[own].tolist(),
            "weight": figures.weight[own].tolist(),
            "clipped": figures.clipped[own].tolist(),
        }


def summary(values: np.ndarray) -> Mapping[str, float]:
    """Of one column; {} of none."""
    if not len(values):
        return {}
    low, middle, high = np.percentile(values, [10, 50, 90])
    found = {"min": values.min(), "p10": low, "p50": middle, "p90": high, "max": values.max()}
    return {name: float(value) for name, value in found.items()}


def _one(figures: TokenFigures, n: int) -> dict[str, Any]:
    return {
        "version": int(figures.version[n]),
        "lag": int(figures.lag[n]),
        "sampler": float(figures.sampler[n]),
        "trainer": float(figures.trainer[n]),
        "ratio": float(figures.ratio[n]),
        "advantage": float(figures.advantage[n]),
        "clipped": bool(figures.clipped[n]),
    }
