"""Turns -> Trajectory, and the checks that keep a malformed turn from ever reaching a device.

Owns: the layout of a trajectory's flat arrays. Invariants: tokens are those the sampler saw and sampled, in order, each
once: prompt 0, sampled 0, prompt 1, sampled 1, ..., sampled last; loss_mask is True exactly on the sampled ones; every
array is read-only, so its sha256 holds from here to the device.
turn_ids: -1 on the initial prompt; i on what was added before turn i (from turn 1 on) and on what turn i sampled.
A turn that began anew (a chat template rewrote what had been seen) added its whole context, which begins a sample.
Must not: tokenise, wait, or decide whether an episode may be trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl_jax.ledger import EpisodeRef
from rl_jax.types import (
    Failure,
    FinishReason,
    Outcome,
    Reward,
    StepResult,
    Trajectory,
    Turn,
    VersionSpan,
)

LOGPROB_SLACK = 1e-6  # log-softmax in float32 may end a rounding error above 0


@dataclass(frozen=True)
class ClosedEpisode:
    """What is left of an episode when nothing of it runs any more."""

    ref: EpisodeRef
    task_id: str
    first_tokens: np.ndarray  # i32[P] the initial prompt, also where no turn was made
    turns: tuple[Turn, ...]
    steps: tuple[StepResult, ...]  # one a turn: the environment's answer to it
    state_keys: tuple[str, ...]  # one a turn: what the agent saw before it
    outcome: Outcome
    truncated_by: str | None
    failure: Failure | None
    start_version: int
    new_samples: tuple[int, ...] = ()  # turns, from 1, whose prompt_tokens are a whole context
    roles: tuple[str, ...] = ()  # one a turn: whom the environment gave it to

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(turn.tokens) for turn in self.turns)


def assemble(
    episode: ClosedEpisode, reward: Reward, turn_values: Sequence[float | None] | None = None
) -> Trajectory:
    """The trajectory of a closed episode. Its turns passed check_turn; FAILED and CANCELLED ones train nothing.

    turn_values: the turns' rewards by a scorer, in place of the environment's.
    """
    turns = episode.turns
    trained = episode.outcome in (Outcome.OK, Outcome.TRUNCATED)
    parts = [(turn.prompt_tokens, turn.tokens) for turn in turns]
    if not parts:
        parts = [(episode.first_tokens, np.zeros(0, np.int32))]
    sizes = [len(array) for pair in parts for array in pair]
    sampled = np.repeat([False, True] * len(parts), sizes)
    tokens = np.concatenate([array for pair in parts for array in pair]).astype(np.int32)
    turn_ids = np.repeat(np.repeat(np.arange(len(parts), dtype=np.int16), 2), sizes)
    turn_ids[: sizes[0]] = -1
    logprobs = np.zeros(len(tokens), np.float32)
    versions = np.full(len(tokens), -1, np.int32)
    mixed = np.zeros(len(tokens), bool)
    if turns:
        logprobs[sampled] = np.concatenate([_behaviour_logprobs(turn) for turn in turns])
        versions[sampled] = np.concatenate([turn.versions for turn in turns])
        mixed[sampled] = np.concatenate([turn.context_mixed for turn in turns])
    turn_starts = np.cumsum([0, *map(sum, zip(sizes[::2], sizes[1::2], strict=True))])
    rewards = [step.reward for step in episode.steps] if turn_values is None else [*turn_values]
    rewards += [None] * (len(turns) - len(rewards))
    support = _support(turns, sampled)
    arrays = {
        "tokens": tokens,
        "loss_mask": sampled if trained else np.zeros(len(tokens), bool),
        "logprobs": logprobs,
        "versions": versions,
        "context_mixed": mixed,
        "turn_ids": turn_ids,
        "turn_rewards": np.array([np.nan if r is None else r for r in rewards], np.float32),
    }
    if support is not None:
        arrays["support"] = support
    for array in arrays.values():
        array.setflags(write=False)
    ref = episode.ref
    return Trajectory(
        uid=ref.uid,
        attempt=ref.attempt,
        group=ref.group,
        task_id=episode.task_id,
        epoch=ref.epoch,
        index=ref.index,
        sample=ref.sample,
        tag=ref.tag,
        **arrays,
        state_keys=episode.state_keys,
        turns=turns,
        reward=reward,
        outcome=episode.outcome,
        truncated_by=episode.truncated_by,
        failure=episode.failure,
        start_version=episode.start_version,
        sample_starts=(0, *turn_starts[list(episode.new_samples)].tolist()),
        roles=() if set(episode.roles) <= {Trajectory.agent} else episode.roles,
    )


def check_turn(turn: Turn, vocab_size: int, max_new_tokens: int) -> str | None:
    """What is wrong with a turn that a server returned, or None. `max_new_tokens` is what was asked for."""
    num = len(turn.tokens)
    if turn.finish is FinishReason.ERROR:
        return "finish is error, which a server must raise as TurnError"
    if num > max_new_tokens:
        return f"{num} tokens of at most {max_new_tokens}"
    if num and not (turn.tokens.min() >= 0 and turn.tokens.max() < vocab_size):
        return f"a token outside 0..{vocab_size - 1}"
    for name in ("logprobs", "sampled_logprobs", "context_mixed"):
        array = getattr(turn, name)
        if array is None and name == "sampled_logprobs":
            continue
        if len(array) != num:
            return f"{len(array)} {name} for {num} tokens"
        if "logprobs" in name and num:
            if not np.isfinite(array).all():
                return f"{name} that are not finite"
            if array.max() > LOGPROB_SLACK:
                return f"{name} above 0: {array.max()}"
    if turn.support is not None:
        ids = turn.support
        if ids.ndim != 2 or len(ids) != num:
            return f"support of shape {ids.shape} for {num} tokens"
        if num and not (ids.min() >= -1 and ids.max() < vocab_size):
            return f"support with a token outside 0..{vocab_size - 1}"
        if not (ids == turn.tokens[:, None]).any(axis=1).all():
            return "support without the token that was sampled from it"
    return _check_spans(turn.spans, num)


def merge_turns(parts: Sequence[Turn], prompt_tokens: np.ndarray, finish: FinishReason) -> Turn:
    """One Turn from the parts of a turn that was aborted and resumed. prompt_tokens: what was added before it."""
    if len(parts) == 1:
        return replace(parts[0], prompt_tokens=prompt_tokens, finish=finish)
    sampled_logprobs = None
    if any(part.sampled_logprobs is not None for part in parts):
        sampled_logprobs = np.concatenate([_behaviour_logprobs(part) for part in parts])
    return replace(
        parts[-1],
        prompt_tokens=prompt_tokens,
        tokens=np.concatenate([part.tokens for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        sampled_logprobs=sampled_logprobs,
        spans=_merge_spans(parts),
        context_mixed=np.concatenate([part.context_mixed for part in parts]),
        finish=finish,
        cached_prompt=parts[0].cached_prompt,
        times_s={
            name: sum(part.times_s.get(name, 0.0) for part in parts)
            for name in {n for part in parts for n in part.times_s}
        },
        routing=_merge_routing(parts, len(prompt_tokens)),
        support=_joined_support(parts),
    )


def _joined_support(turns: Sequence[Turn]) -> np.ndarray | None:
    """i32[N, K] over the turns' sampled tokens; None where a turn that sampled has none."""
    parts = [turn.support for turn in turns if len(turn.tokens)]
    if not parts or any(part is None for part in parts):
        return None
    return np.concatenate([part for part in parts if part is not None])


def _support(turns: Sequence[Turn], sampled: np.ndarray) -> np.ndarray | None:
    """i32[T, K] of a trajectory."""
    ids = _joined_support(turns)
    if ids is None:
        return None
    out = np.full((len(sampled), ids.shape[1]), -1, np.int32)
    out[sampled] = ids
    return out


def _behaviour_logprobs(turn: Turn) -> np.ndarray:
    return turn.logprobs if turn.sampled_logprobs is None else turn.sampled_logprobs


def _check_spans(spans: Sequence[VersionSpan], num: int) -> str | None:
    """V2: contiguous from 0, cover the tokens, neighbours differ, no unknown version."""
    at, last = 0, None
    for span in spans:
        if span.start != at or span.end <= span.start or span.version < 0 or span.version == last:
            return f"version spans that are not contiguous: {spans}"
        at, last = span.end, span.version
    return None if at == num else f"version spans that cover {at} of {num} tokens"


def _merge_spans(parts: Sequence[Turn]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.spans:
            if spans and spans[-1].version == span.version:
                spans[-1] = replace(spans[-1], end=offset + span.end)
            else:
                spans.append(VersionSpan(offset + span.start, offset + span.end, span.version))
        offset += len(part.tokens)
    return tuple(spans)


def _merge_routing(parts: Sequence[Turn], num_prompt: int) -> np.ndarray | None:
    """i16[P + N, layers, k]: the prompt's rows of the first part, then each part's sampled rows."""
    rows: list[np.ndarray] = []
    for part in parts:
        if part.routing is None:
            return None
        if not rows:
            rows.append(part.routing[:num_prompt])
        rows.append(part.routing[len(part.routing) - len(part.tokens) :])
    return np.concatenate(rows)
