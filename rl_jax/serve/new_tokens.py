"""What is told of a turn while it runs (types.NewTokens): a block's tokens, and the log-probs of the request's own.

Life of scores (TurnRequest.scores): 1 The turn is admitted with nothing of its history, as there are log-probs only
where there are hidden states. 2 Its chunks, apart from others', are extended by Engine.score. 3 With the last one they
are told in one piece, before the first sampled token. Whoever loses its slot before that begins again, so scores are of
one version.
Must not: know slots of others, or wait for more than the device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_jax.engine.chunks import Piece, pack
from rl_jax.serve.events import Tokens
from rl_jax.serve.sessions import ActiveTurn
from rl_jax.types import NewTokens


def of_block(turn: ActiveTurn, event: Tokens) -> NewTokens | None:
    """The turn's tokens of a block; None where it has none there, whoever had its slot before."""
    slot, block = turn.session.slot, event.block
    assert slot is not None and block is not None
    n = int(event.counts[slot]) if event.epochs[slot] == turn.epoch else 0
    if not n:
        return None
    return NewTokens(
        block.tokens[slot, :n],
        block.logprobs[slot, :n],
        block.sampled_logprobs[slot, :n],
        event.version,
        None if block.likely is None else tuple(x[slot, :n] for x in block.likely),
    )


def score(
    engine: Any,
    params: Any,
    state: Any,
    tables: np.ndarray,
    work: Sequence[tuple[ActiveTurn, Piece]],
    version: int,
) -> tuple[Any, list[ActiveTurn]]:
    """Extend each turn's history by its piece, and keep what is found in `scored` of each.

    Returns: the new state, and those whose logits are no numbers.
    """
    chunk = pack([piece for _, piece in work], engine.settings.chunk_sizes[-1:])
    told = [turn.session.tokens[p.start + 1 :][: len(p.tokens)] for turn, p in work]
    targets = np.zeros_like(chunk.tokens)
    num = sum(map(len, told))
    targets[:num] = np.concatenate(told)
    state, scores = engine.score(params, state, tables, chunk, targets)
    logprobs, ranks, nan, ids, likely = map(np.asarray, scores)
    bad, at = [], 0
    for (turn, _), tokens in zip(work, told):
        rows = slice(at, at := at + len(tokens))
        best = (ids[rows], likely[rows]) if turn.request.likely else None
        values = logprobs[rows]
        turn.scored.append(NewTokens(tokens.copy(), values, values, version, best, ranks[rows]))
        if nan[rows].any():
            bad.append(turn)
    return state, bad


def of_scores(turn: ActiveTurn) -> NewTokens:
    """All that was scored of the turn, which is at least one piece."""
    parts = turn.scored
    whole = lambda arrays: np.concatenate(list(arrays))
    values, best = whole(p.logprobs for p in parts), None
    if turn.request.likely:
        best = tuple(whole(p.likely[i] for p in parts if p.likely is not None) for i in (0, 1))
    tokens, ranks = whole(p.tokens for p in parts), whole(p.ranks for p in parts)
    return NewTokens(tokens, values, values, parts[-1].version, best, ranks)
