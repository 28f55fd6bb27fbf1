"""Preference losses on pairs: the loss of a pair (DPO, IPO), what it makes of one token, and what dpo and rm share.

A pair's loss reads two sequences, which may lie in different rows or microbatches. Its gradient needs no such layout:
d loss / d log p_t = +-loss'(x) for every token of the chosen (+) and the rejected (-) sequence, and x, the difference
of the two log-ratios, is known on the host from the log-probs at step start. There is one update a step, so these are
the log-probs at which the gradient is taken: -A log p with A = -+loss'(x) has exactly the pair's gradient (dpo.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rl_jax.algorithms import options
from rl_jax.algorithms.advantages import group_rewards
from rl_jax.algorithms.algorithm import Base, LossInputs, Sums
from rl_jax.algorithms.token_losses import reinforce
from rl_jax.metrics import Metric
from rl_jax.settings import AlgorithmSettings
from rl_jax.types import Group, Trajectory

PREFERENCES = ("sigmoid", "ipo")


class Side(NamedTuple):
    """One side of P pairs."""

    logprobs: Float[Array, "P T"]
    reference: Float[Array, "P T"]
    mask: Bool[Array, "P T"]

    def sums(self) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
        """(sum of log-ratios to the reference, trained tokens) of each sequence."""
        ratio = jnp.where(self.mask, self.logprobs, 0.0) - jnp.where(self.mask, self.reference, 0.0)
        return ratio.sum(axis=1), self.mask.sum(axis=1).astype(ratio.dtype)


class PairLoss(NamedTuple):
    loss: Float[Array, " P"]
    margin: Float[Array, " P"]  # beta * (sum of the chosen's log-ratios - the rejected's)
    live: Bool[Array, " P"]  # False: an empty pair, which counts nowhere


def pair_loss(
    chosen: Side,
    rejected: Side,
    *,
    beta: float = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Unreduced; the caller takes the mean over live pairs.

    sigmoid: -(1 - ls) log sigmoid(beta x) - ls log sigmoid(-beta x), x from sums. ipo: (x - 1 / (2 beta))^2, x from
    means over tokens.
    Source:  DPO arXiv:2305.18290, IPO arXiv:2310.12036 (log-ratios averaged over tokens, as its authors advise).
    """
    (up, num_up), (down, num_down) = chosen.sums(), rejected.sums()
    live = (num_up > 0) & (num_down > 0)
    if kind == "sigmoid":
        z = beta * (up - down)
        loss = -(1 - label_smoothing) * jax.nn.log_sigmoid(
            z
        ) - label_smoothing * jax.nn.log_sigmoid(-z)
    elif kind == "ipo":
        x = up / jnp.maximum(num_up, 1) - down / jnp.maximum(num_down, 1)
        loss = jnp.square(x - 1.0 / (2.0 * beta))
    else:
        raise ValueError(
            f"algorithm.preference={kind!r} is unknown; one of {', '.join(PREFERENCES)}"
        )
    return PairLoss(jnp.where(live, loss, 0.0), beta * (up - down), live)


def pair_slope(
    x: np.ndarray, *, beta: float, kind: str = "sigmoid", label_smoothing: float = 0.0
) -> np.ndarray:
    """Host: -d loss / dx of pair_loss, float64[P]; x from sums (sigmoid) or means (ipo)."""
    x = np.asarray(x, np.float64)
    if kind == "ipo":
        return -2.0 * (x - 1.0 / (2.0 * beta))
    if kind != "sigmoid":
        raise ValueError(
            f"algorithm.preference={kind!r} is unknown; one of {', '.join(PREFERENCES)}"
        )
    wrong = np.exp(-np.logaddexp(0.0, beta * x))  # sigmoid(-beta x)
    return beta * ((1 - label_smoothing) * wrong - label_smoothing * (1.0 - wrong))


def pair_value(
    x: np.ndarray, *, beta: float, kind: str = "sigmoid", label_smoothing: float = 0.0
) -> np.ndarray:
    """Host: pair_loss as a function of x, float64[P]; x as pair_slope's."""
    x = np.asarray(x, np.float64)
    if kind == "ipo":
        return np.square(x - 1.0 / (2.0 * beta))
    right, wrong = np.logaddexp(0.0, -beta * x), np.logaddexp(0.0, beta * x)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def pair_figures(loss: np.ndarray, up: np.ndarray, down: np.ndarray) -> dict[str, Metric]:
    """What is said of P pairs: their losses f64[P], and the rewards f64[P] of the chosen and the rejected."""
    return {
        "preference/loss": Metric.of(loss),
        "preference/margin": Metric.of(up - down),
        "preference/accuracy": Metric.of(up > down),
        "preference/chosen": Metric.of(up),
        "preference/rejected": Metric.of(down),
    }


def pairs_of(
    groups: Sequence[Group], trains: Callable[[Trajectory], bool]
) -> list[tuple[int, int]]:
    """(best, worst) by reward of each group's members that train, as indices into the members of all groups in order.

    A group whose members are equal has none; ties are broken by uid.
    """
    pairs, first = [], 0
    for group in groups:
        rewards, _, valid = group_rewards([group])
        open_ = [
            i
            for i, m in enumerate(group.trajectories)
            if valid[i] and trains(m) and m.loss_mask.any()
        ]
        order = sorted(open_, key=lambda i: (rewards[i], group.trajectories[i].uid))
        if order and rewards[order[-1]] > rewards[order[0]]:
            pairs.append((first + order[-1], first + order[0]))
        first += len(group.trajectories)
    return pairs


class PairAlgorithm(Base):
    """Base of dpo and rm: in each group the best-rewarded trajectory is preferred to the worst.

    The pair's slope stands on its members' trained tokens as advantages. The other members get 0, and the factor
    S / pairs undoes what they add to the count of sequences, so the loss is the mean over pairs.
    """

    samples = False  # a pair need not come from the policy
    loss_name = "preference/loss"

    def __init__(self, settings: AlgorithmSettings):
        self.settings = options.resolved(settings)
        self.needs = self.needs | options.needs(settings)

    def pair_advantages(
        self, pair: tuple[int, int], members: Sequence[Trajectory], extras: Mapping[str, Any]
    ) -> tuple[float, float]:
        """-d loss / d each trained token's log-prob (or reward) of the chosen and of the rejected. pair: of members."""
        raise TypeError(f"{type(self).__name__} has no pair_advantages()")

    def select(self, groups: Sequence[Group]):
        kept = [group for group in groups if pairs_of([group], self.trains)]
        uids = {group.uid for group in kept}
        return kept, [(group.uid, "no_pair") for group in groups if group.uid not in uids]

    def advantages(self, groups: Sequence[Group], extras, state):
        members = [trajectory for group in groups for trajectory in group.trajectories]
        out = [np.zeros(len(member.tokens), np.float32) for member in members]
        pairs = pairs_of(groups, self.trains)
        num_trained = sum(bool(self.trains(m) and m.loss_mask.any()) for m in members)
        scale = num_trained / len(pairs) if pairs else 0.0
        for pair in pairs:
            for i, value in zip(pair, self.pair_advantages(pair, members, extras), strict=True):
                out[i] = np.where(members[i].loss_mask, scale * value, 0.0).astype(np.float32)
        return out, state

    def token_loss(self, x: LossInputs):
        sums: Sums = {}
        return reinforce(x).loss, sums
