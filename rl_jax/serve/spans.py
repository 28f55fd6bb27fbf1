"""What servers tell a timeline of their chunks and blocks; nothing is found out where nobody asked for it.

Must not: keep anything.
"""

from collections.abc import Iterable, Sequence

from rl_jax.clock import now_s
from rl_jax.engine.chunks import Piece, cost_of
from rl_jax.serve.request_table import RequestTable
from rl_jax.timeline import Track
from rl_jax.types import BlockTokens, TurnRequest


def tell_chunk(
    track: Track, start_s: float, pieces: Sequence[Piece], whole: Iterable[TurnRequest]
) -> None:
    """A chunk that ends now. whole: the requests whose context it completed."""
    if track.is_on:
        track.add("chunk", start_s, now_s(), **cost_of(pieces), first=first_sessions(whole))


def tell_block(
    track: Track,
    start_s: float,
    end_s: float,
    block: BlockTokens,
    table: RequestTable,
    version: int,
) -> None:
    """A block that is not delivered yet: context has the tokens of all histories before it."""
    if track.is_on:
        track.add(
            "block", start_s, end_s, running=table.num_running, tokens=int(block.valid.sum()),
            context=int(table.log.num_tokens.sum()), version=version,
        )  # fmt: skip


def first_sessions(requests: Iterable[TurnRequest]) -> list[str]:
    """The live histories that begin with these requests; a prefix job's attempt is its turn's."""
    return [
        f"{r.uid}#{r.attempt if r.attempt >= 0 else -1 - r.attempt}"
        for r in requests
        if r.turn == 0 and r.token_index == 0
    ]
