"""Between trajectories and the estimators' arrays: what counts, what trains, and values back onto tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_jax.algorithms.token_advantages import on_last_token
from rl_jax.types import Group, Outcome, Trajectory


def is_closed(trajectory: Trajectory) -> bool:
    """Whether the episode ended by itself or by a limit; failed and cancelled ones never train."""
    return trajectory.outcome in (Outcome.OK, Outcome.TRUNCATED)


def is_scored(trajectory: Trajectory) -> bool:
    """Whether the reward counts in its group's statistics.

    Raises: ValueError if the status says "scored" and the value is missing or not finite: a status upstream lies.
    """
    if trajectory.reward.status != "scored":
        return False
    value = trajectory.reward.value
    if value is None or not np.isfinite(value):
        raise ValueError(
            f"trajectory {trajectory.uid}: reward.status is scored and reward.value is {value}; "
            "the scorer must report a status other than scored for a missing or non-finite reward"
        )
    return is_closed(trajectory)


def trains_scored(trajectory: Trajectory, overlong_filter: bool) -> bool:
    """Rule of the reward algorithms: scored, and not truncated where the overlong filter is on.

    A truncated trajectory still counts in its group's mean and std: only its tokens leave the loss.
    """
    if overlong_filter and trajectory.outcome is Outcome.TRUNCATED:
        return False
    return is_scored(trajectory)


def group_rewards(groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rewards f64[S], group index i64[S], valid bool[S]) of all members in order; invalid rewards are 0.0."""
    rewards, group_ids, valid = [], [], []
    for index, group in enumerate(groups):
        for trajectory in group.trajectories:
            scored, value = is_scored(trajectory), trajectory.reward.value
            rewards.append(value if scored and value is not None else 0.0)
            group_ids.append(index)
            valid.append(scored)
    return np.array(rewards, np.float64), np.array(group_ids, np.int64), np.array(valid, bool)


def spread(groups: Sequence[Group], advantages: np.ndarray) -> list[np.ndarray]:
    """The sequence's advantage on each of its sampled tokens: one f32[T] per trajectory."""
    members = [trajectory for group in groups for trajectory in group.trajectories]
    return [
        np.where(member.loss_mask, advantage, 0.0).astype(np.float32)
        for member, advantage in zip(members, advantages, strict=True)
    ]


def at_end(member: Trajectory, values: np.ndarray) -> float:
    """The value at the member's last sampled token; 0 where nothing is sampled or no values are there."""
    return float(values[member.loss_mask][-1]) if len(values) and member.loss_mask.any() else 0.0


@dataclass(frozen=True)
class Scored:
    """What an estimator sees: the members of all groups, in order, with their shaped rewards."""

    members: Sequence[Trajectory]
    rewards: np.ndarray  # f64[S] task reward and length penalty; 0 where not valid
    groups: np.ndarray  # i64[S] index of the group
    valid: np.ndarray  # bool[S] counts in its group's statistics
    trained: np.ndarray  # bool[S] its tokens enter the loss
    # f64[T] each, by token: KL in the reward, and what a reward model gives for turns; None = neither
    penalties: Sequence[np.ndarray] | None
    extras: Mapping[str, Sequence[np.ndarray]]  # f32[T] each, by name

    @property
    def totals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rewards with the penalties of their tokens, groups, valid): what a group estimator takes."""
        if self.penalties is None:
            return self.rewards, self.groups, self.valid
        sums = np.array([penalty.sum() for penalty in self.penalties])
        return np.where(self.valid, self.rewards + sums, 0.0), self.groups, self.valid

    @property
    def mask(self) -> np.ndarray:
        """bool[S, T] the trained tokens, padded to the longest member."""
        return self.padded([m.loss_mask & t for m, t in zip(self.members, self.trained)]) != 0

    def token_rewards(self, mask: np.ndarray | None = None) -> np.ndarray:
        """f64[S, T]: the reward on the last token of the mask (None = trained), and the penalties."""
        scores = on_last_token(self.rewards, self.mask if mask is None else mask)
        return scores if self.penalties is None else scores + self.padded(self.penalties)

    def at_end(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """f64[S]: of one array a member its value at the last sampled token, 0 where nothing is sampled."""
        ends = [at_end(member, array) for member, array in zip(self.members, arrays, strict=True)]
        return np.array(ends, np.float64)

    def at_turn_ends(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """f64[T] a member: of one array each, what stands at the last sampled token of each turn, else 0."""
        out = []
        for member, array in zip(self.members, arrays, strict=True):
            out.append(np.zeros(len(member.tokens), np.float64))
            if len(array):  # not packed: nothing of it is trained
                ends = turn_ends(member)
                out[-1][ends] = array[ends]
        return out

    def padded(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """[S, T] of one array a member, zeros behind each."""
        width = max((len(m.tokens) for m in self.members), default=0)
        rows = [np.pad(a, (0, width - len(a))) for a in arrays]
        return np.array(rows).reshape(len(self.members), width)

    def unpadded(self, values: np.ndarray) -> list[np.ndarray]:
        """One f32[T] a member, 0 where nothing is sampled."""
        rows = zip(self.members, values, strict=True)
        return [np.where(m.loss_mask, v[: len(m.tokens)], 0.0).astype(np.float32) for m, v in rows]

    def spread(self, advantages: np.ndarray) -> list[np.ndarray]:
        """One f32[T] a member: its advantage on each of its sampled tokens."""
        return [
            np.where(m.loss_mask, a, 0.0).astype(np.float32)
            for m, a in zip(self.members, advantages, strict=True)
        ]

    def turn_rewards(self) -> list[np.ndarray]:
        """f64[num_turns] a member: the environment's rewards of its turns; if it gave none, the reward at the end.

        What shaping added to the episode's reward stands on the last turn.
        """
        return [
            turn_rewards(member, reward if ok else 0.0)
            for member, reward, ok in zip(self.members, self.rewards.tolist(), self.valid)
        ]

    def turn_penalties(self) -> list[np.ndarray]:
        """f64[num_turns] a member: the penalties of each turn's own tokens; zeros where there are none."""
        if self.penalties is None:
            return [np.zeros(num_turns(member)) for member in self.members]
        return [
            np.bincount(m.turn_ids[m.loss_mask], p[m.loss_mask], minlength=num_turns(m))
            for m, p in zip(self.members, self.penalties, strict=True)
        ]


def num_sampled(member: Trajectory) -> int:
    """Tokens that the policy (or a script) made, whether or not they train."""
    return max(int((member.versions >= 0).sum()), member.num_trained)


def turn_ends(member: Trajectory) -> np.ndarray:
    """i64[n] indices of the last trained token of each turn that has any."""
    tokens = np.flatnonzero(member.loss_mask)
    turns = member.turn_ids[tokens]
    return tokens[np.append(turns[1:] != turns[:-1], True)] if len(tokens) else tokens


def num_turns(member: Trajectory) -> int:
    return int(member.turn_ids.max(initial=-1)) + 1


def turn_rewards(member: Trajectory, reward: float) -> np.ndarray:
    """f64[num_turns] that sum to the reward, the rest of which the environment did not give falls to the last turn."""
    out = np.zeros(num_turns(member), np.float64)
    given = np.nan_to_num(np.asarray(member.turn_rewards, np.float64)[: len(out)], nan=0.0)
    out[: len(given)] = given
    rest = reward - out.sum()
    if len(out) and abs(rest) > 1e-6 * max(
        1.0, abs(reward)
    ):  # less is float32 rounding of the record
        out[-1] += rest
    return out
