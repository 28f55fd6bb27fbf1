"""Clients of a Router, and what they see of it: closed loop, open loop, and the numbers of a run.

Closed: N clients, each of which begins a conversation when its last one ended. Open: conversations begin when they are
due, however many are under way; what is late at the client counts against the server. In both, a conversation's next
turn is due the moment the last one was answered.
TTFT, time to first token: from when a turn was due until the block with its first token reached the server's host.
TPOT, time per output token: from there to the answer, by the tokens that came after that block; a turn of one block has
none. Tokens come to the host in blocks, so both are as a client that reads blocks would see them.
A turn that fails ends its conversation and is counted by kind; its times are not among the percentiles.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.serve_traffic import Conversation
from rl_jax.types import TurnError, TurnRequest

POLL_S = 0.01  # between two looks at the pages
TURN_DEADLINE_S = 120.0
QUANTILES = (50, 90, 99)
COUNTED = (
    "preempted",
    "blocks",
    "chunks",
    "host_s",
    "block_s",
    "chunk_s",
)  # of the decode servers' stats


@dataclass(frozen=True)
class Answered:
    """One turn. Times in seconds on one clock."""

    due_s: float
    first_s: float  # its first token was on the host
    end_s: float
    num_tokens: int
    late_tokens: int  # that came after the first block
    needed: int  # tokens of the context whose KV it needed
    found: int  # of them, those that were cached

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """None where all came at once."""
        return (self.end_s - self.first_s) / self.late_tokens if self.late_tokens else None


@dataclass
class Run:
    """What the clients of one run saw. Written by its event loop only."""

    turns: list[Answered] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)  # by the kind of TurnError
    seconds: float = 0.0
    most_under_way: int = 0  # conversations at once
    used: list[float] = field(
        default_factory=list
    )  # share of the pages in use or listed, at each look
    listed: list[float] = field(default_factory=list)  # of them, in the prefix trees
    counted: dict[str, float] = field(default_factory=dict)  # by the decode servers meanwhile
    under_way: int = 0

    block: int = 1  # tokens that come at once

    def notes(self) -> dict[str, Any]:
        """For a row of a Report. Raises: ValueError where no turn was answered."""
        if not self.turns:
            raise ValueError(f"no turn was answered; failed: {dict(self.failed)}")
        tokens = sum(turn.num_tokens for turn in self.turns)
        needed = sum(turn.needed for turn in self.turns)
        late = [turn.tpot_s for turn in self.turns if turn.tpot_s is not None]
        return {
            "turns": len(self.turns),
            "failed": dict(self.failed),
            "tokens_per_s": round(tokens / self.seconds, 1),
            "turns_per_s": round(len(self.turns) / self.seconds, 2),
            **quantiles_ms("ttft", [turn.ttft_s for turn in self.turns]),
            **quantiles_ms("tpot", late),
            "hit_rate": round(sum(turn.found for turn in self.turns) / max(needed, 1), 4),
            "pages_used_mean": round(float(np.mean(self.used)), 4),
            "pages_used_peak": round(max(self.used), 4),
            "pages_listed_mean": round(float(np.mean(self.listed)), 4),
            "most_under_way": self.most_under_way,
            **{name: round(value, 3) for name, value in self.counted.items()},
        }


def quantiles_ms(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """{name_p50_ms, ...}; None where there is nothing to say."""
    if not seconds:
        return {f"{name}_p{q}_ms": None for q in QUANTILES}
    values = np.percentile(np.array(seconds) * 1e3, QUANTILES)
    return {f"{name}_p{q}_ms": round(float(v), 3) for q, v in zip(QUANTILES, values)}


def closed(router: Any, decode: Sequence[Any], talks: Iterable[Conversation], clients: int) -> Run:
    """So many clients until the conversations are used up. router: a Router over the decode servers."""

    async def play(run: Run) -> None:
        left = iter(talks)

        async def client() -> None:
            for talk in left:
                await _converse(router, talk, time.monotonic(), run)

        await asyncio.gather(*(client() for _ in range(clients)))

    return _timed(decode, play)


def opened(
    router: Any, decode: Sequence[Any], talks: Sequence[Conversation], arrivals_s: np.ndarray
) -> Run:
    """Conversation i begins arrivals_s[i] seconds after the start."""

    async def play(run: Run) -> None:
        start, tasks = time.monotonic(), []
        for talk, at in zip(talks, arrivals_s.tolist(), strict=True):
            await asyncio.sleep(max(0.0, start + at - time.monotonic()))
            tasks.append(asyncio.create_task(_converse(router, talk, start + at, run)))
        await asyncio.gather(*tasks)

    return _timed(decode, play)


def _timed(decode: Sequence[Any], play: Any) -> Run:
    run = Run(block=decode[0].engine.settings.steps_per_block)
    before = _counters(decode)

    async def main() -> None:
        looking = asyncio.create_task(_look(decode, run))
        start = time.monotonic()
        await play(run)
        run.seconds = time.monotonic() - start
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking

    asyncio.run(main())
    after = _counters(decode)
    run.counted = {name: after[name] - before[name] for name in COUNTED}
    return run


async def _converse(router: Any, talk: Conversation, due_s: float, run: Run) -> None:
    run.under_way += 1
    run.most_under_way = max(run.most_under_way, run.under_way)
    context = talk.opening
    session = ""
    for i, max_new_tokens in enumerate(talk.max_new_tokens):
        request = TurnRequest(
            uid=talk.name, attempt=0, turn=i, tokens=context, temperature=1.0, top_p=1.0, top_k=0,
            max_new_tokens=max_new_tokens, stop_token_ids=(), stop=(), seed=talk.seed + i, tag="",
            deadline_s=TURN_DEADLINE_S,
        )  # fmt: skip
        session = request.session
        try:
            turn = await router.generate(request)
        except TurnError as error:
            run.failed[error.kind] += 1
            break
        end_s = time.monotonic()
        run.turns.append(_answered(turn, len(context) - 1, run.block, (due_s, end_s)))
        due_s = end_s
        if i < len(talk.says):
            context = np.concatenate([context, turn.tokens, talk.says[i]])
    router.release(session)
    run.under_way -= 1


def _answered(turn: Any, needed: int, block: int, due_end_s: tuple[float, float]) -> Answered:
    (due_s, end_s), times = due_end_s, turn.times_s
    first_s = end_s - (times["decode"] - times["first_token"])
    num = len(turn.tokens)
    late = max(0, num - block)  # nothing stops a turn but its length
    return Answered(due_s, first_s, end_s, num, late, needed, min(turn.cached_prompt, needed))


async def _look(decode: Sequence[Any], run: Run) -> None:
    """Pages of all decode servers, again and again."""
    while True:
        stats = [server.stats() for server in decode]
        pages = sum(s["pages"] for s in stats)
        run.used.append(1 - sum(s["free_pages"] for s in stats) / pages)
        run.listed.append(sum(s["listed_pages"] for s in stats) / pages)
        await asyncio.sleep(POLL_S)


def _counters(decode: Sequence[Any]) -> dict[str, float]:
    stats = [server.stats() for server in decode]
    return {name: sum(s[name] for s in stats) for name in COUNTED}
