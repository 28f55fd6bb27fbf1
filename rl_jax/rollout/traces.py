"""Trajectories on disk: what a step trained (or an evaluation played), and the reader that rebuilds it exactly.

Owns: `traces.jsonl`, one trajectory a line, and `index.npz` beside it, in rollouts/step_N/{train,eval}.
Invariants: read(write(x)) equals x field for field (arrays, dtypes, NaN, turns), so train_only trains what the run
trained; text is added for people and never read back; JSON has no NaN (a missing turn reward is null); both files
appear by rename, the index last: a directory without an index is not complete.
A line holds the fields of Trajectory, arrays as lists, versions as [[start, end, version], ...] over the trajectory
(only sampled tokens have one), support as the ids of each sampled token, and per turn what cannot be derived from those
arrays, and its text.
index.npz: offset i64 (byte of the line), reward f32 (NaN = unscored), length i32, tag i16 (index into `tags`), outcome
i8 (index into `outcomes`), group i32 (index of the group in order of first appearance).
advantages.npy, where the step was trained: f32[sum of lengths], the trajectories' tokens one after the other, NaN where
a token was not trained. Whoever reads trajectories does without it; it is there before the index.
Must not: import jax, or use pickle.
"""

import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_jax.disk import naming
from rl_jax.types import (
    Failure,
    FinishReason,
    Group,
    Outcome,
    Reward,
    Trajectory,
    Turn,
    VersionSpan,
)

TRACES, INDEX, ADVANTAGES = "traces.jsonl", "index.npz", "advantages.npy"
OUTCOMES = tuple(Outcome)
_ARRAYS = {  # versions and turn_rewards have a form of their own
    "tokens": np.int32,
    "loss_mask": bool,
    "logprobs": np.float32,
    "context_mixed": bool,
    "turn_ids": np.int16,
}
_PLAIN = ("uid", "attempt", "group", "task_id", "epoch", "index", "sample", "tag", "truncated_by")
_PLAIN += ("start_version", "agent", "parent")


class TraceError(ValueError):
    """A file of saved trajectories that cannot be read back."""


def trajectory_sha256(trajectory: Trajectory) -> str:
    """Over the little-endian bytes of tokens, loss_mask u8, logprobs, versions, reward f64 (NaN = unscored).

    And of support, where there is one, and of sample_starts, where there are several.
    """
    value = trajectory.reward.value
    digest = hashlib.sha256()
    digest.update(np.ascontiguousarray(trajectory.tokens, "<i4"))
    digest.update(np.ascontiguousarray(trajectory.loss_mask, "u1"))
    digest.update(np.ascontiguousarray(trajectory.logprobs, "<f4"))
    digest.update(np.ascontiguousarray(trajectory.versions, "<i4"))
    digest.update(np.array(math.nan if value is None else value, "<f8"))
    if trajectory.support is not None:
        digest.update(np.ascontiguousarray(trajectory.support, "<i4"))
    if len(trajectory.sample_starts) > 1:
        digest.update(np.array(trajectory.sample_starts, "<i4"))
    return digest.hexdigest()


def sampled_by(group: Group, version: int) -> Group:
    """The group as sampled by the weights of `version` alone, whatever they were published as meanwhile."""

    def turn_by(turn: Turn) -> Turn:
        num = len(turn.tokens)
        spans = (VersionSpan(0, num, version),) if num else ()
        return replace(turn, spans=spans, context_mixed=np.zeros(num, bool))

    def trajectory_by(t: Trajectory) -> Trajectory:
        return replace(
            t,
            versions=np.where(t.versions >= 0, np.int32(version), t.versions),
            context_mixed=np.zeros_like(t.context_mixed),
            turns=tuple(map(turn_by, t.turns)),
            start_version=version,
        )

    return replace(group, trajectories=tuple(map(trajectory_by, group.trajectories)))


def write_traces(
    directory: str | Path,
    trajectories: Sequence[Trajectory],
    render: Callable[[np.ndarray], str],
    append: bool = False,
    advantages: Sequence[np.ndarray] | None = None,
) -> None:
    """Write the files. render: tokens i32[n] -> text.  append: after what the directory holds already.

    advantages: f32[T] a trajectory, NaN where a token was not trained; empty for one that was not in the batch.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    old = (directory / TRACES).read_bytes() if append and (directory / INDEX).exists() else b""
    lines = [encode_trajectory(t, render) for t in trajectories]
    _replace(directory / TRACES, old + b"".join(lines))
    everything = [decode_trajectory(line) for line in old.splitlines()] + list(trajectories)
    sizes = [len(line) + 1 for line in old.splitlines()] + [len(line) for line in lines]
    tags = sorted({t.tag for t in everything})
    groups = list(dict.fromkeys(t.group for t in everything))
    (directory / ADVANTAGES).unlink(missing_ok=True)  # of what this replaces
    if advantages is not None:
        _write_advantages(directory / ADVANTAGES, trajectories, advantages)
    temporary = directory / f"{INDEX}.tmp.npz"
    with naming(directory / INDEX):
        np.savez(
            temporary,
            offset=np.cumsum([0, *sizes[:-1]] if sizes else [], dtype=np.int64),
            reward=np.array(
                [math.nan if t.reward.value is None else t.reward.value for t in everything],
                np.float32,
            ),
            length=np.array([len(t.tokens) for t in everything], np.int32),
            tag=np.array([tags.index(t.tag) for t in everything], np.int16),
            outcome=np.array([OUTCOMES.index(t.outcome) for t in everything], np.int8),
            group=np.array([groups.index(t.group) for t in everything], np.int32),
            tags=np.array(tags, np.str_),
            outcomes=np.array([outcome.value for outcome in OUTCOMES], np.str_),
        )
    os.replace(temporary, directory / INDEX)


def read_traces(directory: str | Path) -> list[Trajectory]:
    """In the order written. Raises FileNotFoundError if the directory is not complete, TraceError if a line is not."""
    directory = Path(directory)
    if not (directory / INDEX).exists():
        raise FileNotFoundError(
            f"{directory} holds no complete traces ({INDEX} is missing); a run writes them to"
            " rollouts/step_N/train where metrics.rollouts_every is above 0"
        )
    trajectories = []
    with open(directory / TRACES, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                trajectories.append(decode_trajectory(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise TraceError(
                    f"{directory / TRACES}:{number} is no trajectory ({type(error).__name__}: {error}); the file is"
                    " damaged, or of another version of rl_jax"
                ) from error
    return trajectories


def read_groups(directory: str | Path) -> list[Group]:
    """The groups a step trained, in its order."""
    return group_trajectories(read_traces(directory))


def group_trajectories(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Groups in order of first appearance."""
    by_group: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_group.setdefault(trajectory.group, []).append(trajectory)
    return [
        Group(uid, ts[0].task_id, ts[0].tag, ts[0].epoch, ts[0].index, tuple(ts))
        for uid, ts in by_group.items()
    ]


def encode_trajectory(trajectory: Trajectory, render: Callable[[np.ndarray], str]) -> bytes:
    """One line of JSON."""
    t = trajectory
    record: dict[str, Any] = {name: getattr(t, name) for name in _PLAIN}
    record.update({name: getattr(t, name).tolist() for name in _ARRAYS})
    record["versions"] = [list(run) for run in _runs(t.versions)]
    record["turn_rewards"] = [None if math.isnan(r) else r for r in t.turn_rewards.tolist()]
    record["state_keys"] = list(t.state_keys)
    record["roles"] = list(t.roles)
    record["outcome"] = t.outcome.value
    record["reward"] = {**vars(t.reward), "parts": dict(t.reward.parts)}
    record["failure"] = vars(t.failure) if t.failure else None
    record["sample_starts"] = list(t.sample_starts)
    record["support"] = None
    if t.support is not None:
        kept = [row[row >= 0].tolist() for row in t.support[t.versions >= 0]]
        record["support"] = {"size": t.support.shape[1], "ids": kept}
    record["turns"] = [_encode_turn(turn, render) for turn in t.turns]
    line = json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return line.encode("ascii") + b"\n"


def decode_trajectory(line: bytes | str) -> Trajectory:
    """The exact inverse of encode_trajectory."""
    record = json.loads(line)
    arrays = {name: np.array(record[name], dtype) for name, dtype in _ARRAYS.items()}
    versions = np.full(len(arrays["tokens"]), -1, np.int32)
    for start, end, version in record["versions"]:
        versions[start:end] = version
    arrays["versions"] = versions
    if record.get("support"):  # older traces have none
        arrays["support"] = _decode_support(record["support"], versions)
    rewards = [math.nan if r is None else r for r in record["turn_rewards"]]
    arrays["turn_rewards"] = np.array(rewards, np.float32)
    for array in arrays.values():
        array.setflags(write=False)
    reward = record["reward"]
    return Trajectory(
        **{name: record[name] for name in _PLAIN},
        **arrays,
        sample_starts=tuple(record.get("sample_starts", (0,))),  # older traces have none
        state_keys=tuple(record["state_keys"]),
        roles=tuple(record.get("roles", ())),  # older traces have none
        turns=_decode_turns(record["turns"], arrays),
        reward=Reward(**{**reward, "turn_values": tuple(reward["turn_values"])}),
        outcome=Outcome(record["outcome"]),
        failure=Failure(**record["failure"]) if record["failure"] else None,
    )


def _encode_turn(turn: Turn, render: Callable[[np.ndarray], str]) -> dict[str, Any]:
    """The turn's own token arrays are slices of the trajectory's."""
    record: dict[str, Any] = {
        "num_prompt": len(turn.prompt_tokens),
        "num_tokens": len(turn.tokens),
        "finish": turn.finish.value,
        "cached_prompt": turn.cached_prompt,
        "server": turn.server,
        "pool": turn.pool,
        "times_s": dict(turn.times_s),
        "prompt_text": render(turn.prompt_tokens),
        "text": render(turn.tokens),
    }
    if turn.sampled_logprobs is not None:  # the trajectory holds those; keep the others here
        record["logprobs"] = turn.logprobs.tolist()
    if turn.routing is not None:
        record["routing"] = turn.routing.tolist()
    return record


def _decode_turns(
    records: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]
) -> tuple[Turn, ...]:
    turns, at = [], 0
    for record in records:
        start = at + record["num_prompt"]
        end = start + record["num_tokens"]
        behaviour = arrays["logprobs"][start:end]
        has_own = "logprobs" in record
        spans = tuple(
            VersionSpan(first, last, version)
            for first, last, version in _runs(arrays["versions"][start:end])
        )
        turns.append(
            Turn(
                prompt_tokens=arrays["tokens"][at:start],
                tokens=arrays["tokens"][start:end],
                logprobs=np.array(record["logprobs"], np.float32) if has_own else behaviour,
                sampled_logprobs=behaviour if has_own else None,
                spans=spans,
                context_mixed=arrays["context_mixed"][start:end],
                finish=FinishReason(record["finish"]),
                cached_prompt=record["cached_prompt"],
                server=record["server"],
                pool=record["pool"],
                times_s=record["times_s"],
                routing=np.array(record["routing"], np.int16) if "routing" in record else None,
                support=arrays["support"][start:end]
                if "support" in arrays and end > start
                else None,
            )
        )
        at = end
    return tuple(turns)


def _decode_support(record: Mapping[str, Any], versions: np.ndarray) -> np.ndarray:
    """i32[T, K], -1 where not sampled and behind the ids of a token."""
    out = np.full((len(versions), record["size"]), -1, np.int32)
    for position, ids in zip(np.flatnonzero(versions >= 0), record["ids"], strict=True):
        out[position, : len(ids)] = ids
    return out


def _runs(versions: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, end, version) of each run of equal versions; what was not sampled (-1) has none."""
    if not len(versions):
        return []
    cuts = np.flatnonzero(np.diff(versions)) + 1
    starts = [0, *cuts.tolist()]
    ends = [*cuts.tolist(), len(versions)]
    runs = [(start, end, int(versions[start])) for start, end in zip(starts, ends)]
    return [run for run in runs if run[2] >= 0]


def _write_advantages(
    path: Path, trajectories: Sequence[Trajectory], advantages: Sequence[np.ndarray]
) -> None:
    flat = [
        array if len(array) else np.full(len(t.tokens), np.nan, np.float32)
        for t, array in zip(trajectories, advantages, strict=True)
    ]
    out = io.BytesIO()
    np.save(out, np.concatenate([np.zeros(0, np.float32), *flat]).astype(np.float32))
    _replace(path, out.getvalue())


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with naming(path):
        temporary.write_bytes(data)
    os.replace(temporary, path)
