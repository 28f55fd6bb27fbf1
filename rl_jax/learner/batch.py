"""Groups of trajectories to one Batch: what the learner trains on, as host arrays [B, T].

Invariants: a trajectory lies whole in one row, in its own segment, each of its contexts with positions
from 0; it is never cut, and one that does not fit is an error that names it. What is trained is decided here and
nowhere else: targets_mask[b, t] says that the token AT t is trained, and its log-prob comes from
the logits at t - 1 of the same segment. loss_weights are the aggregation, from counts over the
whole batch, so the loss is `sum(loss_weights * token_loss)` however rows are cut into microbatches.
Values travel by trajectory index, never by order of arrival: permuting groups or members changes no
pairing.

Life: 1 `pack` lays the trajectories that may train into rows (packing.py; same input, same rows).
2 The learner scores the rows if the algorithm needs it. 3 `with_advantages` drops what the algorithm
does not train and adds advantages and weights. 4 The learner cuts rows into microbatches
(microbatches.py).

Must not: import jax, read text or an environment, or average.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl_jax.algorithms import contract
from rl_jax.algorithms.advantages import is_closed
from rl_jax.algorithms.aggregate import sequence_weights
from rl_jax.algorithms.algorithm import Algorithm
from rl_jax.algorithms.options import IN_STEP, resolved
from rl_jax.learner.packing import Balance, balanced_rows, first_fit
from rl_jax.settings import AlgorithmSettings, LearnerSettings
from rl_jax.types import Group, Trajectory


class BatchError(ValueError):
    """Trajectories that this learner cannot train; where they were saved by another run, its settings differ."""


@dataclass(frozen=True)
class Batch:
    """B rows of T positions holding S trajectories. Arrays [B, T] are 0 (False) on padding unless said otherwise."""

    tokens: np.ndarray  # i32[B, T]
    targets_mask: np.ndarray  # bool[B, T] the token AT t is trained
    segment_ids: np.ndarray  # i32[B, T] of trajectories: 0 padding, from 1 in each row
    sample_ids: np.ndarray  # i32[B, T] as segment_ids, of the contexts: what attends to each other
    positions: np.ndarray  # i32[B, T] from 0 in each sample
    turn_ids: np.ndarray  # i16[B, T] -1 padding and before the first turn
    behaviour_logprobs: np.ndarray  # f32[B, T] of the policy that sampled
    versions: (
        np.ndarray
    )  # i32[B, T] that sampled the token; -1 where none did (prompts, scripts, padding)
    context_mixed: np.ndarray  # bool[B, T] KV behind the token came partly from another version
    advantages: np.ndarray  # f32[B, T]
    loss_weights: np.ndarray  # f32[B, T] the aggregation; 0 where not trained
    trajectory_ids: np.ndarray  # i32[S] index into the members of all groups, in order
    seq_len: np.ndarray  # i32[S] tokens of the trajectory
    rows: np.ndarray  # i32[S] the row it lies in
    starts: np.ndarray  # i32[S] its first column
    extras: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # f32[B, T] each, e.g. old_logprobs
    # i32[B, T, K] ids that each token was sampled from, -1 padding; None = from the whole vocabulary
    support: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def row_tokens(self) -> int:
        return self.tokens.shape[1]

    @property
    def sample_lengths(self) -> list[int]:
        """Tokens of each context, row by row."""
        return [n for row in self.sample_ids for n in np.bincount(row)[1:].tolist()]

    def place(
        self, values: Sequence[np.ndarray | float], dtype: Any, padding: Any = 0
    ) -> np.ndarray:
        """[B, T] from one array (or scalar) per member of the groups; members that are not packed are passed over."""
        out = np.full(self.tokens.shape, padding, dtype)
        for member, row, start, length in self.spans():
            out[row, start : start + length] = values[member]
        return out

    def gather(self, array: np.ndarray, num_members: int) -> list[np.ndarray]:
        """The inverse of place: one array per member of the groups, empty for those that are not packed."""
        out = [np.zeros(0, array.dtype) for _ in range(num_members)]
        for member, row, start, length in self.spans():
            out[member] = array[row, start : start + length]
        return out

    def trained(self, array: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """(member, values at its trained tokens) of each trajectory that trains."""
        out = []
        for member, row, start, length in self.spans():
            own = slice(start, start + length)
            if (mask := self.targets_mask[row, own]).any():
                out.append((member, array[row, own][mask]))
        return out

    def spans(self):
        """(member, row, start, length) of each packed trajectory."""
        columns = (self.trajectory_ids, self.rows, self.starts, self.seq_len)
        return zip(*(column.tolist() for column in columns), strict=True)


def pack(
    groups: Sequence[Group], settings: LearnerSettings, balance: Balance | None = None
) -> Batch:
    """Rows of settings.row_tokens positions from the trajectories that closed and have something to train.

    balance: the mesh's shards, which then get equal work (packing.py); None = the fewest rows.

    Failed and cancelled trajectories and those without a trained token take no row. Advantages and loss_weights are 0
    until with_advantages.

    Raises: BatchError naming the trajectory if it is longer than a row, trains a context's first token (no logits
            precede it), has a behaviour log-prob that is not finite, or is there twice.
    """
    members = [trajectory for group in groups for trajectory in group.trajectories]
    packed = [i for i, member in enumerate(members) if is_closed(member) and member.loss_mask.any()]
    seen: set[str] = set()
    for i in packed:
        _check(members[i], settings.row_tokens, seen)
    lengths = [len(m.tokens) for m in members]
    if balance is not None and balance.shards > 1:
        per_microbatch = settings.microbatch_rows
        rows = balanced_rows(packed, lengths, settings.row_tokens, per_microbatch, balance)
    else:
        rows = first_fit(packed, lengths, settings.row_tokens)
        # Much to train first: a microbatch then holds rows alike, and its shorter ones cost no empty head chunks.
        rows.sort(key=lambda row: (-sum(members[i].num_trained for i in row), row[0]))
    batch = _layout(members, rows, settings.row_tokens)
    return replace(
        batch,
        tokens=batch.place([m.tokens for m in members], np.int32),
        targets_mask=batch.place([m.loss_mask for m in members], bool, False),
        positions=batch.place([_positions(m) for m in members], np.int32),
        turn_ids=batch.place([m.turn_ids for m in members], np.int16, -1),
        behaviour_logprobs=batch.place(
            [np.where(m.loss_mask, m.logprobs, 0.0) for m in members], np.float32
        ),
        versions=batch.place([m.versions for m in members], np.int32, -1),
        context_mixed=batch.place([m.context_mixed for m in members], bool, False),
        support=_support(batch, members, packed),
    )


def token_advantages(batch: Batch, groups: Sequence[Group]) -> list[np.ndarray]:
    """f32[T] a member of the groups, NaN where a token was not trained; empty for those that took no row."""
    num_members = sum(len(group.trajectories) for group in groups)
    shown = np.where(batch.targets_mask, batch.advantages, np.float32(np.nan))
    return batch.gather(shown, num_members)


def empty_batch(settings: LearnerSettings, needs: Iterable[str], support: int = 0) -> Batch:
    """A batch without a row that has the extras which with_advantages leaves under these needs (names of token_inputs
    among them), and the support of `support` ids a token: from it programs are lowered."""
    batch = pack([], settings)
    shape = batch.tokens.shape  # [0, T]
    names = {*needs, *({"returns"} if "values" in needs else ())} - IN_STEP
    extras = {name: np.zeros(shape, np.float32) for name in sorted(names)}
    ids = np.zeros((*shape, support), np.int32) if support else None
    return replace(batch, extras=extras, support=ids)


def with_advantages(
    batch: Batch,
    groups: Sequence[Group],
    extras: Mapping[str, np.ndarray],
    algorithm: Algorithm,
    state: Any,
    settings: AlgorithmSettings,
) -> tuple[Batch, Any]:
    """The batch with advantages, loss weights and extras, and the algorithm's next state.

    Trajectories that `algorithm.trains` refuses (unscored, overlong under the filter) leave
    targets_mask before anything is counted. extras are what learner.score returned, f32[B, T] each;
    the algorithm sees them per trajectory. Where they hold a critic's values, its "returns" join them, and so does what
    else the algorithm's token_loss reads of the host.

    Raises: ContractError for what the algorithm gave that does not pair with the trajectories, or is not finite where
    trained.
    """
    settings = resolved(settings)
    members = [trajectory for group in groups for trajectory in group.trajectories]
    per_member = {name: batch.gather(array, len(members)) for name, array in extras.items()}
    extras = dict(extras)
    if "values" in algorithm.needs:
        targets = algorithm.targets(groups, per_member, state)
        targets = contract.check_arrays(algorithm, "targets", targets, members)
        extras["returns"] = batch.place(targets, np.float32)
    want = "(one f32[T] a trajectory, the next state)"
    given = algorithm.advantages(groups, per_member, state)
    advantages, state = contract.check_pair(algorithm, "advantages", given, want)
    trains = contract.check_trains(algorithm, [algorithm.trains(member) for member in members])
    advantages = contract.check_arrays(algorithm, "advantages", advantages, members, trains)
    contract.check_state(algorithm, "advantages", state)
    inputs = algorithm.token_inputs(groups, advantages, per_member, state)
    inputs = contract.check_named_arrays(algorithm, "token_inputs", inputs, members)
    extras |= {name: batch.place(arrays, np.float32) for name, arrays in inputs.items()}

    group_of = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    counted = algorithm.counted(groups, advantages, per_member)
    if counted is None:
        counted = [member.loss_mask for member in members]
    counted = contract.check_arrays(algorithm, "counted", counted, members)
    counts = np.array([counted[i].sum() * trains[i] for i in batch.trajectory_ids], np.int64)
    weights = np.zeros(len(members), np.float64)
    weights[batch.trajectory_ids] = sequence_weights(
        counts,
        group_of[batch.trajectory_ids],
        settings.aggregation,
        settings.max_response_tokens,
    )
    targets_mask = batch.targets_mask & batch.place(trains, bool, False)
    return (
        replace(
            batch,
            targets_mask=targets_mask,
            advantages=np.where(targets_mask, batch.place(advantages, np.float32), np.float32(0)),
            loss_weights=np.where(
                targets_mask, batch.place(list(weights), np.float32), np.float32(0)
            ),
            extras=extras,
        ),
        state,
    )


def _layout(members: Sequence[Trajectory], rows: list[list[int]], size: int) -> Batch:
    """Where each trajectory lies, and its segment ids; every other array is empty padding."""
    placed = [(i, b) for b, row in enumerate(rows) for i in row]
    ids = np.array([i for i, _ in placed], np.int32)
    lengths = np.array([len(members[i].tokens) for i, _ in placed], np.int32)
    starts = np.zeros(len(placed), np.int32)
    segments, samples = (np.zeros((len(rows), size), np.int32) for _ in range(2))
    used, count = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    for s, (i, b) in enumerate(placed):
        starts[s] = used[b]
        used[b] += lengths[s]
        count[b] += 1
        own = slice(starts[s], used[b])
        segments[b, own] = count[b]
        samples[b, own] = samples[b].max() + _sample_of(members[i])
    shape = (len(rows), size)
    empty = {
        "tokens": np.zeros(shape, np.int32),
        "targets_mask": np.zeros(shape, bool),
        "positions": np.zeros(shape, np.int32),
        "turn_ids": np.full(shape, -1, np.int16),
        "behaviour_logprobs": np.zeros(shape, np.float32),
        "versions": np.full(shape, -1, np.int32),
        "context_mixed": np.zeros(shape, bool),
        "advantages": np.zeros(shape, np.float32),
        "loss_weights": np.zeros(shape, np.float32),
    }
    rows_of = np.array([b for _, b in placed], np.int32)
    return Batch(
        segment_ids=segments,
        sample_ids=samples,
        trajectory_ids=ids,
        seq_len=lengths,
        rows=rows_of,
        starts=starts,
        **empty,
    )


def _sample_of(trajectory: Trajectory) -> np.ndarray:
    """i64[T] the context each token lies in, from 1."""
    starts, columns = np.array(trajectory.sample_starts), np.arange(len(trajectory.tokens))
    return np.searchsorted(starts, columns, side="right")


def _positions(trajectory: Trajectory) -> np.ndarray:
    """i64[T] from 0 in each context."""
    starts = np.array(trajectory.sample_starts)
    return np.arange(len(trajectory.tokens)) - starts[_sample_of(trajectory) - 1]


def _support(
    batch: Batch, members: Sequence[Trajectory], packed: Sequence[int]
) -> np.ndarray | None:
    """i32[B, T, K] of the packed members. Raises BatchError where only some of them have one."""
    kept = {i: ids for i in packed if (ids := members[i].support) is not None}
    if not kept:
        return None
    if without := [members[i].uid for i in packed if i not in kept]:
        raise BatchError(
            f"trajectory {without[0]} does not say which tokens it was sampled from, others of the batch do; train on"
            " episodes that were sampled with one rollout.top_k"
        )
    width = max(ids.shape[1] for ids in kept.values())
    out = np.full((*batch.tokens.shape, width), -1, np.int32)
    for member, row, start, length in batch.spans():
        ids = kept[member]
        out[row, start : start + length, : ids.shape[1]] = ids
    return out


def _check(trajectory: Trajectory, row_tokens: int, seen: set[str]) -> None:
    """`seen` holds the uids checked so far; this one is added."""
    uid, length = trajectory.uid, len(trajectory.tokens)
    if length > row_tokens:
        raise BatchError(
            f"trajectory {uid} has {length} tokens, more than learner.row_tokens={row_tokens}; "
            f"raise learner.row_tokens to at least {length} or lower engine.context to {row_tokens}"
        )
    if trajectory.loss_mask[list(trajectory.sample_starts)].any():
        raise BatchError(
            f"trajectory {uid} trains the first token of a context, which no logits precede; "
            "a context starts with a prompt of at least one token"
        )
    if uid in seen:
        raise BatchError(
            f"trajectory {uid} is twice in the batch; each sampled token is trained at most once"
        )
    seen.add(uid)
    bad = np.flatnonzero(trajectory.loss_mask & ~np.isfinite(trajectory.logprobs))
    if len(bad):
        raise BatchError(
            f"trajectory {uid}: behaviour log-prob {trajectory.logprobs[bad[0]]} at token {bad[0]} is not finite; "
            "the server that sampled it must fail such a turn"
        )
