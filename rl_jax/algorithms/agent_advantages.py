"""Advantages of agents that act in turns, with others, or along shared histories. Host, numpy, float64.

A turn is what the record says it is (turn_ids), never a run of the mask: a token filter must not split a turn, and two
turns without an observation between them stay two.
"""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from rl_jax.algorithms.group_advantages import group_normalised


def turn_returns(turn_rewards: Sequence[float], gamma: float = 1.0) -> np.ndarray:
    """G_k = r_k + gamma G_{k+1}, float64[num_turns]; a reward of NaN counts as 0."""
    returns = np.nan_to_num(np.asarray(turn_rewards, np.float64), nan=0.0)
    for k in range(len(returns) - 2, -1, -1):
        returns[k] += gamma * returns[k + 1]
    return returns


def on_turns(turn_values: np.ndarray, turn_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float64[T]: each trained token's value of its turn; 0 off the mask."""
    mask, turn_ids = np.asarray(mask) != 0, np.asarray(turn_ids)
    out = np.zeros(mask.shape, np.float64)
    out[mask] = np.asarray(turn_values, np.float64)[turn_ids[mask]]
    return out


def dense_ids(keys: Sequence[Hashable]) -> np.ndarray:
    """int[S] from 0, equal for equal keys, in order of first appearance."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


def step_returns(
    trajectories: np.ndarray, step_index: np.ndarray, rewards: np.ndarray, gamma: float
) -> np.ndarray:
    """turn_returns of rows that are steps: rows of one trajectory are ordered by step_index."""
    returns = np.zeros(len(rewards), np.float64)
    for trajectory in np.unique(trajectories):
        rows = np.flatnonzero(trajectories == trajectory)
        rows = rows[np.argsort(np.asarray(step_index)[rows], kind="stable")]
        returns[rows] = turn_returns(np.asarray(rewards, np.float64)[rows], gamma)
    return returns


def group_in_group(
    trajectories: np.ndarray,
    groups: np.ndarray,
    states: Sequence[Hashable],
    returns: np.ndarray,
    episode_returns: np.ndarray,
    *,
    omega: float = 1.0,
    std_scope: str = "group",
    eps: float = 1e-6,
    valid: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(A, episode term, step term), a row a step: A = A_episode + omega A_step.

    The episode term normalises episode returns in the group, each trajectory counted once however many steps it has.
    The step term normalises step returns among the group's steps that began in the same state; a state met once is 0.

    Args:    trajectories, groups: int[R].  states: what the agent saw, equal keys only.  returns: step_returns.
             episode_returns: float[R], repeated on the trajectory's rows.  std_scope: as group_normalised.
    Source:  GiGPO arXiv:2505.10978. Differs: its first code counted an episode once per step.
    """
    trajectories, groups = np.asarray(trajectories), np.asarray(groups)
    valid = np.ones(len(groups), bool) if valid is None else np.asarray(valid) != 0
    _, first, of_row = np.unique(trajectories, return_index=True, return_inverse=True)
    episode = group_normalised(
        np.asarray(episode_returns)[first],
        groups[first],
        valid[first],
        std_scope=std_scope,
        eps=eps,
    )[of_row]
    peers = dense_ids(list(zip(groups.tolist(), states, strict=True)))
    step = group_normalised(returns, peers, valid, std_scope=std_scope, eps=eps)
    return episode + omega * step, episode, step


def role_centred(
    rewards: np.ndarray,
    roles: Sequence[str],
    episodes: Sequence[Hashable],
    groups: np.ndarray,
    *,
    episode_roles: Sequence[str],
) -> np.ndarray:
    """reward - mean over peers: roles of episode_roles among their own episode, the others across the group.

    A peer set of one, or of equal rewards: 0. No std.
    Source:  prime-rl's hierarchical GRPO.
    """
    keys = [
        (group, role, episode if role in episode_roles else None)
        for group, role, episode in zip(np.asarray(groups).tolist(), roles, episodes, strict=True)
    ]
    return group_normalised(rewards, dense_ids(keys), std_scope="none")


def role_baselined(
    rewards: np.ndarray,
    roles: Sequence[str],
    baselines: Mapping[str, float],
    *,
    decay: float = 0.95,
) -> tuple[np.ndarray, dict[str, float]]:
    """(reward - the role's running baseline before this reward, the baselines after): b = decay b + (1 - decay) r.

    For zero-sum games, where a group's mean says nothing. A new role starts at 0; order matters; the baselines are
    state that a checkpoint must keep.
    Source:  RAE, SPIRAL arXiv:2506.24119.
    """
    after = dict(baselines)
    advantages = np.zeros(len(roles), np.float64)
    for i, (role, reward) in enumerate(zip(roles, np.asarray(rewards, np.float64), strict=True)):
        before = after.get(role, 0.0)
        advantages[i] = reward - before
        after[role] = decay * before + (1.0 - decay) * float(reward)
    return advantages, after


def graph_credit(
    paths: Sequence[Sequence[Hashable]], values: Sequence[float], *, mode: str = "mean"
) -> dict[Hashable, float]:
    """Credit of each node of an episode graph, from the trajectories (paths from the root) that go through it.

    mean: mean of the trajectories' advantages. delta: V(node) - V(parent), V = mean return of the trajectories through
    it; a first node is compared with the mean of all. A shared node is stored and trained once.
    Source:  own formulation; the idea is SALT arXiv:2510.20022.
    """
    through: dict[Hashable, list[float]] = {}
    parent: dict[Hashable, Hashable] = {}
    for path, value in zip(paths, values, strict=True):
        for before, node in zip([None, *path], path):
            through.setdefault(node, []).append(float(value))
            if parent.setdefault(node, before) != before:
                raise ValueError(
                    f"node {node!r} has two parents; paths that differ share no later node"
                )
    mean = {node: float(np.mean(own)) for node, own in through.items()}
    if mode == "mean":
        return mean
    if mode != "delta":
        raise ValueError(f"mode={mode!r} is unknown; one of mean, delta")
    whole = float(np.mean(values)) if len(values) else 0.0
    return {
        node: own - (whole if parent[node] is None else mean[parent[node]])
        for node, own in mean.items()
    }
