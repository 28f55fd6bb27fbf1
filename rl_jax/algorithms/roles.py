"""Rewards by role, where the policy plays several in one episode (Trajectory.roles).

A role's reward of an episode is the part of the reward that has the role's name (Reward.parts), else the sum of the
rewards of its own turns; a scorer that names one role of an episode names all. What shaping adds to the episode's
reward stands on its last turn, KL in the reward on the turn of its token. An episode without roles is of one: "policy".
"""

from dataclasses import dataclass

import numpy as np

from rl_jax.algorithms.advantages import Scored, num_turns
from rl_jax.algorithms.agent_advantages import on_turns
from rl_jax.algorithms.algorithm import RewardPartError
from rl_jax.types import Trajectory


@dataclass(frozen=True)
class Played:
    """What one role did and got: all of its turns of an episode, or one of them."""

    member: int
    role: str
    turns: tuple[int, ...]
    reward: float


def roles_of(member: Trajectory) -> list[str]:
    """One a turn."""
    named = list(member.roles[: num_turns(member)])
    return named + [member.agent] * (num_turns(member) - len(named))


def played(scored: Scored) -> list[Played]:
    """Of each scored member its roles, in the order of their first turns.

    Raises: RewardPartError if the parts of a reward name some of the episode's roles and not others.
    """
    out = []
    of_turns, penalties = scored.turn_rewards(), scored.turn_penalties()
    for i in np.flatnonzero(scored.valid).tolist():
        member, own = scored.members[i], of_turns[i] + penalties[i]
        roles = roles_of(member)
        parts = {role: member.reward.parts[role] for role in roles if role in member.reward.parts}
        if parts and (missing := [role for role in roles if role not in parts]):
            raise RewardPartError(
                f"{member.uid}: its reward has a part of role {next(iter(parts))} and none of {missing[0]}; a scorer"
                " must name every role that the episode has, or none"
            )
        shaped = scored.rewards[i] - (member.reward.value or 0.0)
        for role in dict.fromkeys(roles):
            turns = tuple(k for k, of in enumerate(roles) if of == role)
            reward = float(own[list(turns)].sum())
            if parts:
                ends = shaped if turns[-1] == len(roles) - 1 else 0.0
                reward = float(parts[role] + ends + penalties[i][list(turns)].sum())
            out.append(Played(i, role, turns, reward))
    return out


def by_turn(scored: Scored, one: Played) -> list[Played]:
    """The role's turns one by one, each with its own reward."""
    own = scored.turn_rewards()[one.member] + scored.turn_penalties()[one.member]
    return [Played(one.member, one.role, (k,), float(own[k])) for k in one.turns]


def on_tokens(scored: Scored, runs: list[Played], advantages: np.ndarray) -> list[np.ndarray]:
    """One f32[T] a member: on each sampled token the advantage of the run that its turn belongs to."""
    of_turns = [np.zeros(num_turns(member)) for member in scored.members]
    for run, advantage in zip(runs, advantages.tolist(), strict=True):
        of_turns[run.member][list(run.turns)] = advantage
    return [
        on_turns(values, m.turn_ids, m.loss_mask).astype(np.float32)
        for values, m in zip(of_turns, scored.members, strict=True)
    ]
