"""Loss aggregation: how much one token's loss counts, as a weight per sequence, from the whole step's counts.

`loss = sum(weight * token_loss)` over every microbatch and device, so the result cannot depend on
how a step is cut into rows, microbatches or devices: the weights are computed once, on the host, in
float64, before anything is cut. Empty sequences (no trained token) count in no numerator and in no
denominator. With nothing trained every weight is 0.
"""

import numpy as np

from rl_jax.algorithms.options import CHOICES

AGGREGATIONS = CHOICES["aggregation"]


def sequence_weights(
    num_tokens: np.ndarray, groups: np.ndarray, aggregation: str, norm_length: int = 0
) -> np.ndarray:
    """Weight of each trained token of a sequence.

    N = trained tokens of the step, S = its non-empty sequences, n_i = tokens of sequence i, L = norm_length:
    token-mean 1/N; token-sum 1; seq-mean-token-mean 1/(S n_i); seq-mean-token-sum 1/S; seq-mean-token-sum-norm 1/(S L);
    group-mean-token-mean 1/(number of non-empty groups * tokens of the group).

    Args:    num_tokens: int[S], trained tokens of each sequence.  groups: int[S], any ids, read by the group mean only.
    Returns: float64[S], 0 for empty sequences.
    Raises:  ValueError for an unknown name, or -norm without a positive norm_length.
    Source:  algorithms.md 1.10; the Dr.GRPO divisor is arXiv:2503.20783.
    """
    num_tokens = np.asarray(num_tokens, np.int64)
    live = num_tokens > 0
    num_sequences = int(live.sum())
    weights = np.zeros(len(num_tokens), np.float64)
    if num_sequences == 0:
        return weights
    if aggregation == "token-mean":
        weights[live] = 1.0 / num_tokens.sum()
    elif aggregation == "token-sum":
        weights[live] = 1.0
    elif aggregation == "seq-mean-token-mean":
        weights[live] = 1.0 / (num_sequences * num_tokens[live])
    elif aggregation == "seq-mean-token-sum":
        weights[live] = 1.0 / num_sequences
    elif aggregation == "seq-mean-token-sum-norm":
        if norm_length <= 0:
            raise ValueError(
                f"aggregation seq-mean-token-sum-norm needs algorithm.max_response_tokens > 0, got {norm_length}; "
                "set it to the longest response (for example engine.context)"
            )
        weights[live] = 1.0 / (num_sequences * norm_length)
    elif aggregation == "group-mean-token-mean":
        _, member_of = np.unique(np.asarray(groups), return_inverse=True)
        group_tokens = np.bincount(member_of, weights=num_tokens)
        weights[live] = 1.0 / ((group_tokens > 0).sum() * group_tokens[member_of[live]])
    else:
        raise ValueError(
            f"algorithm.aggregation={aggregation!r} is unknown; one of {', '.join(AGGREGATIONS)}"
        )
    return weights


def token_weights(
    mask: np.ndarray, aggregation: str, groups: np.ndarray | None = None, norm_length: int = 0
) -> np.ndarray:
    """float64[B, T] weights for unpacked rows, one sequence a row; 0 where mask[B, T] is 0."""
    mask = np.asarray(mask) != 0
    if groups is None:
        groups = np.arange(len(mask))
    weights = sequence_weights(mask.sum(axis=1), groups, aggregation, norm_length)
    return np.where(mask, weights[:, None], 0.0)
