"""Which prefill server computes a context, and whether any does: what is done first, as far as the router can tell.

Owns: PrefillLine, the router's account of one prefill server: how many tokens it is still to compute, and which pages
of contexts it was sent under its version, so that nothing is read from the server's thread.
Invariants: a page is known by paging.chain's hash, so of it and all before it; as many are remembered as the server's
cache has pages, the latest; an account that is wrong (the server evicted a page) costs time, never tokens.
Must not: wait, call JAX, or be used off the router's thread.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_jax.serve.paging import chain

UNMEASURED_LIMIT = 256  # in place of engine.append_limit=0 until both ways were measured


@dataclass(frozen=True)
class Context:
    """Tokens whose KV is wanted, as lines know them."""

    num_tokens: int
    pages: tuple[int, ...]  # paging.chain
    page_size: int

    @classmethod
    def of(cls, tokens: np.ndarray, page_size: int, salt: str = "") -> "Context":
        return cls(len(tokens), tuple(chain(tokens, page_size, salt)), page_size)


class PrefillLine:
    """Of one server; `server` is a PrefillServer."""

    def __init__(self, server: Any):
        self.server = server
        self.tokens = 0  # asked for and not answered yet, without those that it had
        self._version = server.version
        self._pages: OrderedDict[int, None] = OrderedDict()  # that it was sent, the latest last

    def missing(self, context: Context) -> int:
        """Tokens of the context that the server lacks; those asked for before are counted as there."""
        if self.server.version != self._version:
            self._version = self.server.version
            self._pages.clear()
        known = 0
        while known < len(context.pages) and context.pages[known] in self._pages:
            known += 1
        return max(0, context.num_tokens - known * context.page_size)

    def send(self, context: Context) -> int:
        """The server is asked for the context. Returns: what to tell `answered`."""
        missing = self.missing(context)
        self.tokens += missing
        for page in reversed(context.pages):  # without its first pages the rest is of no use
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self.server.engine.spec.num_pages:
            self._pages.popitem(last=False)
        return missing

    def answered(self, context: Context, missing: int, is_computed: bool) -> None:
        """missing: of `send`."""
        self.tokens -= missing
        if not is_computed:
            for page in context.pages[(context.num_tokens - missing) // context.page_size :]:
                self._pages.pop(page, None)


@dataclass(frozen=True)
class Costs:
    """Averages that the servers measured."""

    append_token_s: float  # of a token on the decode server
    num_running: int  # turns there that wait while it appends
    compute_token_s: float  # of a token on the prefill server
    move_token_s: float  # of a token between them


def appends(limit: int, suffix: int, line_tokens: int, costs: Costs | None) -> bool:
    """Whether a decode server appends a suffix to a live history itself.

    limit: engine.append_limit; with 0 the costs decide, the seconds that turns wait for it: there this one alone, here
    all that generate too. line_tokens: what the prefill server computes until the suffix is there. costs: None where
    not everything was measured yet.
    """
    if suffix <= 0:
        return True
    if limit > 0 or costs is None:
        return suffix <= (limit or UNMEASURED_LIMIT)
    here_s = suffix * costs.append_token_s * (1 + costs.num_running)
    there_s = line_tokens * costs.compute_token_s + suffix * costs.move_token_s
    return here_s <= there_s


def choose_line(lines: Sequence[PrefillLine], context: Context) -> PrefillLine:
    """The one with the fewest tokens to compute until the context is there; of equals the first."""
    return min(lines, key=lambda line: line.tokens + line.missing(context))
