"""Packing tokens of several requests into one chunk; the only place where a chunk is padded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl_jax.types import PrefillChunk


@dataclass(frozen=True)
class Piece:
    """Tokens of one request at positions [start, start + len(tokens)) of its context."""

    tokens: np.ndarray  # i32[n], n >= 1
    start: int


def cost_of(pieces: Sequence[Piece]) -> dict[str, int]:
    """What a chunk computes: tokens, and pairs of a token with what stands before it and itself."""
    sizes = [(len(piece.tokens), piece.start) for piece in pieces]
    pairs = sum(n * start + n * (n + 1) // 2 for n, start in sizes)
    return {"tokens": sum(n for n, _ in sizes), "pairs": pairs}


@dataclass
class Chooser:
    """Which requests the next chunk extends, chunk after chunk.

    fresh_apart: a chunk of requests that all start at position 0 is computed faster, so such ones are not mixed with
    others, the first in line decides, and one that a chunk of its own would hold is not cut: it waits for a later chunk
    if what is left of this one is too small, and smaller ones may pass it until it is the first. Others that
    would not fill a chunk are put off while there are fresh ones, so that rests of long contexts share one;
    max_requests times in a row at most.
    """

    max_tokens: int
    max_requests: int
    fresh_apart: bool = False
    num_put_off: int = 0  # in a row

    def choose(self, waiting: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """(index into waiting, tokens of it, at least 1) of each request of the next chunk, in order, the last in part.

        waiting: (position of the first token a request needs, how many it needs, at least 1).
        """
        is_fresh = bool(waiting) and waiting[0][0] == 0
        chosen = self._fill(waiting, is_fresh)
        may_wait = self.fresh_apart and not is_fresh and self.num_put_off < self.max_requests
        is_short = sum(n for _, n in chosen) < self.max_tokens
        fresh = self._fill(waiting, True) if may_wait and is_short else []
        self.num_put_off = self.num_put_off + 1 if fresh else 0
        return fresh or chosen

    def _fill(self, waiting: Sequence[tuple[int, int]], is_fresh: bool) -> list[tuple[int, int]]:
        chosen, left = [], self.max_tokens
        for index, (start, num_tokens) in enumerate(waiting):
            if len(chosen) == self.max_requests or left == 0:
                break
            if self.fresh_apart and (start == 0) != is_fresh:
                continue
            if self.fresh_apart and is_fresh and left < num_tokens <= self.max_tokens:
                continue
            chosen.append((index, min(num_tokens, left)))
            left -= chosen[-1][1]
        return chosen


def pack(pieces: Sequence[Piece], chunk_sizes: Sequence[int]) -> PrefillChunk:
    """One chunk of the smallest size that holds the pieces; request r is pieces[r], padding -1.

    chunk_sizes: ascending. Raises: ValueError if the pieces exceed the largest.
    """
    lengths, starts = np.array([(len(piece.tokens), piece.start) for piece in pieces], np.int32).T
    total = int(lengths.sum())
    size = next((size for size in chunk_sizes if size >= total), 0)
    if size == 0:
        raise ValueError(
            f"{total} tokens exceed the largest chunk of {chunk_sizes[-1]}; take what Chooser.choose gives"
        )
    tokens, position = np.zeros(size, np.int32), np.zeros(size, np.int32)
    segment = np.full(size, -1, np.int32)
    begins = np.cumsum(lengths) - lengths
    np.concatenate([piece.tokens for piece in pieces], out=tokens[:total])
    segment[:total] = np.repeat(np.arange(len(pieces), dtype=np.int32), lengths)
    position[:total] = np.arange(total) + np.repeat(starts - begins, lengths)
    return PrefillChunk(tokens, segment, position, lengths)


def end_positions(chunk: PrefillChunk) -> list[int]:
    """Per request of the chunk: 1 + its highest position, 0 where it has no tokens."""
    ends = np.zeros(len(chunk.lengths), np.int64)
    real = chunk.segment >= 0
    np.maximum.at(ends, chunk.segment[real], chunk.position[real] + 1)
    return ends.tolist()


def is_fresh(chunk: PrefillChunk) -> bool:
    """Whether every request of the chunk starts at position 0."""
    lengths = chunk.lengths[chunk.lengths > 0]
    return not chunk.position[np.cumsum(lengths) - lengths].any()


def fresh_chunk(size: int, num_requests: int, visible: int) -> PrefillChunk:
    """As padding_chunk, of one request that starts at position 0."""
    return _lone(Piece(np.zeros(min(size, visible), np.int32), 0), size, num_requests)


def padding_chunk(size: int, num_requests: int, visible: int) -> PrefillChunk:
    """A chunk that selects the program of `size` and `visible`: one token, at the highest position."""
    return _lone(Piece(np.zeros(1, np.int32), visible - 1), size, num_requests)


def _lone(piece: Piece, size: int, num_requests: int) -> PrefillChunk:
    chunk = pack([piece], (size,))
    return replace(chunk, lengths=np.pad(chunk.lengths, (0, num_requests - 1)))
