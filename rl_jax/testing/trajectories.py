"""Trajectories made of thin air, valid in every field, for tests of packing, advantages and the learner."""

import numpy as np

from rl_jax.testing.tiny_model import TINY_VOCAB
from rl_jax.types import Group, Outcome, Reward, Trajectory

PROMPT = 3  # tokens before the first sampled one


def fake_trajectory(
    group: int = 0,
    sample: int = 0,
    length: int = 12,
    reward: float | None = 0.0,
    *,
    seed: int = 0,
    version: int = 0,
    outcome: Outcome = Outcome.OK,
) -> Trajectory:
    """`length` random tokens, sampled in turns of two between observations of two; reward None = unscored.

    The same (seed, group, sample, length) gives the same tokens and log-probs. A length of PROMPT samples nothing.
    """
    rng = np.random.default_rng([seed, group, sample, length])
    step = np.arange(length) - PROMPT
    mask = (step >= 0) & (step % 4 < 2)
    logprobs = np.where(mask, rng.normal(-np.log(TINY_VOCAB), 0.1, length), 0.0)
    uid = f"r/0/{group}"
    num_turns = (max(length - PROMPT, 0) + 3) // 4
    last = np.nan if reward is None else reward
    status = "scored" if reward is not None else "error"
    return Trajectory(
        uid=f"{uid}/{sample}",
        attempt=0,
        group=uid,
        task_id=f"task-{group}",
        epoch=0,
        index=group,
        sample=sample,
        tag="fake",
        tokens=rng.integers(8, TINY_VOCAB, length).astype(np.int32),
        loss_mask=mask,
        logprobs=logprobs.astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        context_mixed=np.zeros(length, bool),
        turn_ids=np.where(step >= 0, step // 4, -1).astype(np.int16),
        turn_rewards=np.array([np.nan] * (num_turns - 1) + [last], np.float32)[:num_turns],
        state_keys=tuple(f"state-{turn % 2}" for turn in range(num_turns)),
        turns=(),
        reward=Reward(reward, {}, (reward,), status, "fake"),
        outcome=outcome,
        truncated_by="length" if outcome is Outcome.TRUNCATED else None,
        failure=None,
        start_version=version,
    )


def fake_group(group: int, rewards: list[float | None], lengths: list[int], **kw) -> Group:
    """One member per reward; see fake_trajectory for the rest."""
    members = [
        fake_trajectory(group, i, length, reward, **kw)
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return Group(f"r/0/{group}", f"task-{group}", "fake", 0, group, tuple(members))
