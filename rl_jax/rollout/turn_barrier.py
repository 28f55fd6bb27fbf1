"""Batched environment stepping: nobody's next turn begins before everybody's last one is over. A baseline.

Owns: who takes part and who waits. A turn here is a model call and the environment's answer to it; the first wait is
for all environments to be reset. Loop-thread only.
Invariants: whoever joined is waited for until it waits too or leaves, so each one that joins must leave, however it
ends; all who wait go on together; whoever joins later takes its first turn with the others' next one. A wait ends by
the waiter's own deadline (its episode's), and by those of the others' turns, which end these.
Must not: know episodes or groups.
"""

import asyncio


class TurnBarrier:
    """Members are named by any hashable key."""

    def __init__(self):
        self._members: set[object] = set()
        self._waiting: dict[object, asyncio.Future] = {}

    def join(self, member: object) -> None:
        self._members.add(member)

    def leave(self, member: object) -> None:
        """It is not waited for any more. Harmless for who is no member."""
        self._members.discard(member)
        self._advance()

    async def wait(self, member: object) -> None:
        """Return when all members wait."""
        turn = self._waiting[member] = asyncio.get_running_loop().create_future()
        self._advance()
        try:
            await turn
        finally:
            if self._waiting.get(member) is turn:  # cancelled: it does not count as one that waits
                del self._waiting[member]

    def _advance(self) -> None:
        if self._members <= self._waiting.keys():
            waiting, self._waiting = self._waiting, {}
            for turn in waiting.values():
                if not turn.done():
                    turn.set_result(None)
