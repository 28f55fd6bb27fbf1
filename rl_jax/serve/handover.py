"""Handover: pages of complete prefixes on their way from one server's cache to other servers' meshes.

Invariants: what leaves are copies; as few of them as there are targets, and the number of pages of one hold
(engine.move_buckets); each Prefix says what it was computed from.
Must not: know queues; hold pages, which are its caller's until `send` returns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_jax.serve.transfer import move, tokens_sha
from rl_jax.types import Prefix


@dataclass(frozen=True, eq=False)
class Outgoing:
    """One prefix whose KV is complete here."""

    owner: Any  # the sender's own record of the request
    target: Any  # DecodeServer: its engine's prefix_sharding says where the KV goes
    tokens: np.ndarray  # i32[n] the context without its last token
    start: int  # the first token whose KV the target lacks, at a page's begin
    pages: np.ndarray  # i32[k] of tokens [start, n)


def first_missing(held: int, num_tokens: int, page_size: int) -> int:
    """`Outgoing.start` where the target has the first `held` tokens; the last one always goes."""
    return max(0, min(held, num_tokens - 1)) // page_size * page_size


def batches(outgoing: Sequence[Outgoing], most: int) -> list[list[Outgoing]]:
    """Those of one target together, in pieces of at most so many pages; one of more goes alone."""
    made: list[list[Outgoing]] = []
    for one in sorted(outgoing, key=lambda one: one.target.name):
        last = made[-1] if made else []
        num_pages = sum(len(other.pages) for other in last) + len(one.pages)
        if last and last[0].target is one.target and num_pages <= most:
            last.append(one)
        else:
            made.append([one])
    return made


def send(engine: Any, state: Any, batch: Sequence[Outgoing], version: int) -> list[Prefix]:
    """The prefixes of one batch, computed under this version, on their target's mesh."""
    spec, to = engine.spec, batch[0].target.engine.prefix_sharding
    pages = np.concatenate([one.pages for one in batch])
    kv = move(engine.extract(state, pages), engine.prefix_sharding, to)
    counts = [len(one.pages) for one in batch]
    firsts = (np.cumsum(counts) - counts).tolist()
    return [
        Prefix(kv, first, one.start, len(one.tokens), version, None, tokens_sha(one.tokens), spec)
        for one, first in zip(batch, firsts)
    ]
