"""Roles: which servers prefill and which decode, and under serve.pd_balance=auto the moves between the two.

A role is the router's choice and nothing that a server knows. Under `fixed` a server has the role of its pool for good:
prefill pools are PrefillServers, which compile no decode programs. Under `auto` every server is a DecodeServer, which
can compute prefixes for others too: so any split of the servers is in reach, not only those with more that prefill than
the mesh says, at the cost of decode programs everywhere.
Under `auto`:
- A server that gets the prefill role gets no new session; its live ones stay and end by themselves, with their KV. It
  gets prefix jobs. What it was asked for in its last role it still answers, so a move loses and repeats nothing.
- For prefill moves the server with the fewest live sessions, for decode the one with the fewest tokens to compute; of
  equals one whose pool is of that role.
- Both roles have a server as long as two are live (balance.py); a fenced server counts for nothing and keeps its role.
- A server that decodes holds up to AHEAD times its slots in live sessions, all together as many as the slots of all
  servers: who waits for a slot then waits where it is seen. More would keep more prefixes on a device than slots twice.
Must not: call a server's thread, wait, or be used off the router's thread.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from rl_jax.serve.balance import Balance, Seen

log = logging.getLogger(__name__)

AHEAD = 2.0


class Roles:
    """`prefill` and `decode` are the servers of each role now."""

    def __init__(self, decode: Sequence[Any], prefill: Sequence[Any], balance: Balance | None):
        """Who begins in which role. balance: None = fixed.

        Raises: ValueError where servers cannot change their roles or read one another's pages.
        """
        self.decode, self.prefill = tuple(decode), tuple(prefill)
        self.balance, self.moves = balance, 0
        self.holders = self.decode  # may hold sessions
        if balance is None:
            return
        self.holders = (*self.decode, *self.prefill)
        self._homes = {s.name: "decode" for s in decode} | {s.name: "prefill" for s in prefill}
        first = self.holders[0]
        for server in self.holders:
            if server.kind != "decode":
                raise ValueError(
                    f"serve.pd_balance=auto: {server.name} is a PrefillServer, which cannot decode; start a"
                    " DecodeServer in its place"
                )
            if not first.engine.spec.same_pages(server.engine.spec):
                raise ValueError(
                    f"serve.pd_balance=auto: {server.name} has pages of {server.engine.spec}, {first.name} of"
                    f" {first.engine.spec}; all servers must serve one model in pages of one size"
                )

    def capacity(self) -> dict[str, int]:
        """Live sessions that fit on the live servers of each pool."""
        slots = dict.fromkeys((server.pool for server in self.holders), 0)
        live = [server for server in self.holders if server.fenced is None]
        decode = [server for server in self.decode if server.fenced is None]
        share = 1.0
        if self.balance is not None:
            decode = decode or live  # as the router places them
            share = min(AHEAD, len(live) / len(decode)) if decode else 1.0
        for server in decode:
            slots[server.pool] += int(server.engine.settings.slots * share)
        return slots

    def look(self, sessions: Callable[[Any], int], tokens: Callable[[Any], int]) -> None:
        """One look at the waits; at most one server moves. sessions: live ones of a server. tokens: that it is still to
        compute for others.
        """
        if self.balance is None:
            return
        prefill = [server for server in self.prefill if server.fenced is None]
        decode = [server for server in self.decode if server.fenced is None]
        mean = lambda role, servers: sum(s.queue_s(role) for s in servers) / max(1, len(servers))
        seen = Seen(mean("prefill", prefill), mean("decode", decode), len(prefill), len(decode))
        self.balance, gains = self.balance.look(seen)
        if gains == "prefill":
            server = min(decode, key=lambda s: (sessions(s), self._homes[s.name] != gains))
        elif gains == "decode":
            server = min(prefill, key=lambda s: (tokens(s), self._homes[s.name] != gains))
        else:
            return
        self._move(server, gains)
        log.info(
            "%s goes over to %s: prefixes wait %.2f s, turns %.2f s; before, %d server(s) prefilled and %d decoded",
            server.name, gains, self.balance.prefill_s, self.balance.decode_s, seen.num_prefill, seen.num_decode,
        )  # fmt: skip

    def _move(self, server: Any, gains: str) -> None:
        self.moves += 1
        without = lambda servers: tuple(other for other in servers if other is not server)
        self.prefill, self.decode = without(self.prefill), without(self.decode)
        if gains == "prefill":
            self.prefill = (*self.prefill, server)
        else:
            self.decode = (*self.decode, server)
