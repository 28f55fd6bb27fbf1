"""The device form of a Batch: rows cut into microbatches of a fixed capacity, and trained tokens gathered to the left.

Invariants: shapes depend on the capacity only, so one program serves every batch; how many
microbatches, and how many chunks of trained tokens in each, are data. `targets` arrays hold trained
tokens only, K slots a row: the head then runs on what is trained and not on prompts and
observations, and whatever stood at other positions (NaN included) is not here. Empty slots are
zeros with target_mask False.
"""

from math import ceil

import numpy as np

from rl_jax.learner.batch import Batch, BatchError

Arrays = dict[str, np.ndarray]


def target_slots(row_tokens: int, chunk: int) -> int:
    """K: slots for trained tokens in a row, a multiple of chunk that holds all of a row's tokens."""
    return ceil(row_tokens / chunk) * chunk


def microbatches(
    batch: Batch, version: int, *, capacity: int, microbatch_rows: int, chunk: int
) -> Arrays:
    """Cut and pad a batch.

    Args:    version: the policy version that consumes the batch.  capacity: M, microbatches of the program.
             microbatch_rows: R.  chunk: trained tokens of a row whose logits are live at once.
    Returns: i32[M, R, T] tokens, positions, sample_ids; [M, R, K] target_index (column of the k-th trained token),
             target_tokens, target_mask, target_segments, target_turns, behaviour_logprobs, advantages, loss_weights,
             lag (version minus the token's), context_mixed and each extra; i32[M, R, K, *] support if there is one;
             i32[M] num_chunks that hold a trained token, and i32[] num_microbatches that hold a row.
    Raises:  BatchError if the batch has more rows than the capacity, or a token is newer than its consumer.
    """
    num_rows = capacity * microbatch_rows
    if batch.num_rows > num_rows:
        raise BatchError(
            f"the batch has {batch.num_rows} rows of {batch.row_tokens} tokens, the learner was built for "
            f"max_rows={num_rows}; raise max_rows (at worst one trajectory a row)"
        )
    newest = int(batch.versions.max(initial=-1))
    if newest > version:
        raise BatchError(
            f"a token of version {newest} is in a batch that version {version} consumes; "
            "a token cannot be newer than the policy it trains"
        )

    # Trained columns of each row first, in order: argsort of a bool is stable only if asked for.
    order = np.argsort(~batch.targets_mask, axis=1, kind="stable")
    counts = batch.targets_mask.sum(axis=1)
    slots = target_slots(batch.row_tokens, chunk)
    taken = np.arange(batch.row_tokens) < counts[:, None]  # [B, T]

    def rows(array: np.ndarray) -> np.ndarray:
        out = np.zeros((num_rows, *array.shape[1:]), array.dtype)
        out[: batch.num_rows] = array
        return out.reshape(capacity, microbatch_rows, *array.shape[1:])

    def targets(array: np.ndarray) -> np.ndarray:
        trailing = (1,) * (array.ndim - 2)
        gathered = np.take_along_axis(array, order.reshape(*order.shape, *trailing), axis=1)
        gathered = np.where(taken.reshape(*taken.shape, *trailing), gathered, 0)
        out = np.zeros((batch.num_rows, slots, *array.shape[2:]), array.dtype)
        out[:, : batch.row_tokens] = gathered
        return rows(out)

    columns = np.broadcast_to(np.arange(batch.row_tokens, dtype=np.int32), batch.tokens.shape)
    most = rows(counts).max(axis=1)
    return {
        "tokens": rows(batch.tokens),
        "positions": rows(batch.positions),
        "sample_ids": rows(batch.sample_ids),
        "target_index": targets(columns),
        "target_tokens": targets(batch.tokens),
        "target_mask": targets(batch.targets_mask),
        "target_segments": targets(batch.segment_ids),
        "target_turns": targets(batch.turn_ids.astype(np.int32)),
        "behaviour_logprobs": targets(batch.behaviour_logprobs),
        "advantages": targets(batch.advantages),
        "loss_weights": targets(batch.loss_weights),
        "lag": targets(version - batch.versions),
        "context_mixed": targets(batch.context_mixed),
        **{name: targets(array) for name, array in batch.extras.items()},
        **({} if batch.support is None else {"support": targets(batch.support)}),
        "num_chunks": np.ceil(most / chunk).astype(np.int32),
        "num_microbatches": np.asarray(ceil(batch.num_rows / microbatch_rows), np.int32),
    }


def to_rows(batch: Batch, targets: np.ndarray) -> np.ndarray:
    """[M, R, K] values of trained tokens back to [B, T], 0 elsewhere."""
    order = np.argsort(~batch.targets_mask, axis=1, kind="stable")
    flat = targets.reshape(-1, targets.shape[-1])[: batch.num_rows, : batch.row_tokens]
    out = np.zeros(batch.tokens.shape, targets.dtype)
    np.put_along_axis(out, order, flat, axis=1)
    return np.where(batch.targets_mask, out, 0)
