"""Packing tokens of several requests into one chunk; the only place where a chunk is padded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_jax.types import PrefillChunk


@dataclass(frozen=True)
class Piece:
    """Tokens of one request at positions [start, start + len(tokens)) of its context."""

    tokens: np.ndarray  # i32[n], n >= 1
    start: int


def cut(wanted: Sequence[int], max_tokens: int, max_requests: int) -> list[int]:
    """How many tokens of each request the next chunk takes, in order, the last one perhaps in part.

    wanted: tokens each request still needs, at least 1. The result is as long or shorter, all at least 1.
    """
    taken, left = [], max_tokens
    for num_tokens in wanted[:max_requests]:
        if left == 0:
            break
        taken.append(min(num_tokens, left))
        left -= taken[-1]
    return taken


def pack(pieces: Sequence[Piece], chunk_sizes: Sequence[int]) -> PrefillChunk:
    """One chunk of the smallest size that holds the pieces; request r is pieces[r], padding -1.

    chunk_sizes: ascending. Raises: ValueError if the pieces exceed the largest.
    """
    lengths = np.array([len(piece.tokens) for piece in pieces], np.int32)
    total = int(lengths.sum())
    size = next((size for size in chunk_sizes if size >= total), 0)
    if size == 0:
        raise ValueError(
            f"{total} tokens exceed the largest chunk of {chunk_sizes[-1]}; cut them with chunks.cut"
        )
    tokens, position = np.zeros(size, np.int32), np.zeros(size, np.int32)
    segment = np.full(size, -1, np.int32)
    end = 0
    for index, piece in enumerate(pieces):
        begin, end = end, end + len(piece.tokens)
        tokens[begin:end] = piece.tokens
        segment[begin:end] = index
        position[begin:end] = np.arange(piece.start, piece.start + len(piece.tokens))
    return PrefillChunk(tokens, segment, position, lengths)


def end_positions(chunk: PrefillChunk) -> list[int]:
    """Per request of the chunk: 1 + its highest position, 0 where it has no tokens."""
    ends = np.zeros(len(chunk.lengths), np.int64)
    real = chunk.segment >= 0
    np.maximum.at(ends, chunk.segment[real], chunk.position[real] + 1)
    return ends.tolist()


def padding_chunk(size: int, num_requests: int, visible: int) -> PrefillChunk:
    """A chunk that selects the program of `size` and `visible`: one token, at the highest position."""
    segment = np.full(size, -1, np.int32)
    segment[0] = 0
    position = np.zeros(size, np.int32)
    position[0] = visible - 1
    lengths = np.zeros(num_requests, np.int32)
    lengths[0] = 1
    return PrefillChunk(np.zeros(size, np.int32), segment, position, lengths)
