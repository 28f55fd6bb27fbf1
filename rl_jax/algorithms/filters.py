"""Which groups, and which members of a group, are worth training on. Host; raw task rewards, before any shaping.

A group filter drops whole groups before anything is counted; the buffer replaces them, so a batch never gets short.
Rejection sampling drops members: they train nothing, but their rewards stay in their group's mean and std.
`select_groups` is what settings.filter does: first the group filters, then the members.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rl_jax.algorithms.advantages import group_rewards
from rl_jax.algorithms.group_advantages import checked, informative
from rl_jax.settings import FilterSettings
from rl_jax.types import Group


def informative_groups(
    rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray | None = None
) -> np.ndarray:
    """Ids of the groups with at least two valid members and unequal rewards, ascending.

    Source:  dynamic sampling, DAPO arXiv:2503.14476. Differs: a group of one is dropped, it has no advantage.
    """
    rewards, valid = checked(rewards, groups, valid)
    groups = np.asarray(groups)
    return np.array(
        [groups[members[0]] for members in informative(rewards, groups, valid)], groups.dtype
    )


def groups_in_band(
    rewards: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray | None = None,
    *,
    low: float,
    high: float,
) -> np.ndarray:
    """Ids of the groups with low < mean reward < high, both exclusive, ascending."""
    rewards, valid = checked(rewards, groups, valid)
    groups = np.asarray(groups)
    means = {g: rewards[(groups == g) & valid].mean() for g in np.unique(groups[valid])}
    return np.array([g for g, mean in means.items() if low < mean < high], groups.dtype)


def rejected_members(group: Group, *, min_reward: float | None, best_of: int) -> dict[str, str]:
    """uid -> reason of each member that rejection sampling leaves out; unscored ones are not its business.

    Args:    min_reward: members below it go.  best_of: of the others, all but so many best ones go (0 = none); ties
             stay by uid.
    Source:  best-of-n and success-only training, RAFT arXiv:2304.06767, STaR arXiv:2203.14465.
    """
    rewards, _, valid = group_rewards([group])
    reasons: dict[str, str] = {}
    scored = [i for i in range(len(rewards)) if valid[i]]
    if min_reward is not None:
        reasons = {
            group.trajectories[i].uid: "min_reward" for i in scored if rewards[i] < min_reward
        }
    if best_of:
        left = [i for i in scored if group.trajectories[i].uid not in reasons]
        left.sort(key=lambda i: (-rewards[i], group.trajectories[i].uid))
        reasons |= {group.trajectories[i].uid: "best_of" for i in left[best_of:]}
    return reasons


def select_groups(
    groups: Sequence[Group], settings: FilterSettings
) -> tuple[list[Group], list[tuple[str, str]]]:
    """Algorithm.select by the settings: the groups that stay, and (uid, reason) of each group or member that goes.

    Reasons: equal_rewards, mean_reward, min_reward (a group: no member reaches it), best_of.
    """
    f = settings
    rewards, ids, valid = group_rewards(groups)
    reasons: dict[int, str] = {}
    if f.mean_above is not None or f.mean_below is not None:
        low = -np.inf if f.mean_above is None else f.mean_above
        high = np.inf if f.mean_below is None else f.mean_below
        kept = set(groups_in_band(rewards, ids, valid, low=low, high=high).tolist())
        reasons = {i: "mean_reward" for i in range(len(groups)) if i not in kept}
    if f.equal_rewards:
        kept = set(informative_groups(rewards, ids, valid).tolist())
        reasons |= {i: "equal_rewards" for i in range(len(groups)) if i not in kept}
    chosen: list[Group] = []
    dropped: list[tuple[str, str]] = []
    for i, group in enumerate(groups):
        members = rejected_members(group, min_reward=f.min_reward, best_of=f.best_of)
        if i in reasons:
            dropped.append((group.uid, reasons[i]))
        elif members and len(members) >= valid[ids == i].sum():
            dropped.append((group.uid, "min_reward"))
        else:
            chosen.append(_without_tokens(group, members))
            dropped += members.items()
    return chosen, dropped


def _without_tokens(group: Group, uids: dict[str, str]) -> Group:
    """The group in which the members named train nothing."""
    if not uids:
        return group
    members = [
        replace(t, loss_mask=np.zeros_like(t.loss_mask)) if t.uid in uids else t
        for t in group.trajectories
    ]
    return replace(group, trajectories=tuple(members))
