"""Split: how many of a number of equal servers shall prefill, from tables that were measured before they start.

Owns: the tables' form, and the arithmetic. A turn passes three stations, and the slowest one decides how many turns a
second there are:
1. prefill servers, that compute `prompt` tokens a turn, at the table's rate for that length;
2. decode servers, that generate for as many requests at once as there are, at most their slots, at the table's rate for
   that many;
3. the requests themselves: no more are under way at once than `at_once`, and each takes its prompt and its answer.
Invariants: pure; between two measured points a table is linear in seconds, beyond the last it is proportional.
What it leaves out: waits of environments, spread of lengths, and the tail of a batch. serve.pd_balance=auto sees these.
Must not: know servers, or read a clock (balance.py moves servers while they run; this is for the start).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_jax.serve.balance import ROLES

Points = tuple[tuple[float, float], ...]  # (size, seconds), ascending by size, at least one


@dataclass(frozen=True)
class Table:
    """What one server takes. Sizes are above 0."""

    prefill: Points  # (tokens of a prompt, seconds)
    # (requests that generate at once, seconds of a token for each of them), at the histories of the traffic
    decode: Points
    slots: int

    def __post_init__(self):
        for role, points in zip(ROLES, (self.prefill, self.decode), strict=True):
            sizes = [size for size, _ in points]
            if not sizes or sizes != sorted(set(sizes)) or min(min(p) for p in points) <= 0:
                raise ValueError(
                    f"the {role} table is {list(points)}; give (size, seconds) above 0, ascending by size, at least one"
                )
        if self.slots < 1:
            raise ValueError(f"slots={self.slots} of a decode server; use at least 1")


@dataclass(frozen=True)
class Traffic:
    """Means, of a turn that a prefill server has; at_once: requests under way together, over all servers."""

    prompt: float
    answer: float
    at_once: int


@dataclass(frozen=True)
class Split:
    num_prefill: int
    num_decode: int
    turns_per_s: float  # predicted
    bound: str  # what limits it: prefill | decode | requests


def rate(table: Table, traffic: Traffic, num_prefill: int, num_decode: int) -> Split:
    """The predicted rate of one split; both numbers at least 1."""
    prompt_s = seconds(table.prefill, traffic.prompt)
    running = min(table.slots, max(1.0, traffic.at_once / num_decode))
    token_s = seconds(table.decode, running)
    rates = {
        "prefill": num_prefill / prompt_s,
        "decode": num_decode * running / (traffic.answer * token_s),
        "requests": traffic.at_once / (prompt_s + traffic.answer * token_s),
    }
    bound = min(rates, key=lambda name: rates[name])
    return Split(num_prefill, num_decode, rates[bound], bound)


def choose_split(table: Table, traffic: Traffic, num_servers: int) -> Split:
    """The split of the highest predicted rate; of equals the one with more decode servers, which hold more histories.

    Raises: ValueError for fewer than two servers.
    """
    if num_servers < 2:
        raise ValueError(f"num_servers={num_servers}: one prefills and one decodes; use at least 2")
    splits = [rate(table, traffic, n, num_servers - n) for n in range(1, num_servers)]
    return max(splits, key=lambda split: split.turns_per_s)


def seconds(points: Sequence[tuple[float, float]], size: float) -> float:
    """Of a size, by the points around it."""
    below = [p for p in points if p[0] <= size]
    above = [p for p in points if p[0] > size]
    if not below:  # less than was measured costs as much: a chunk or a step is padded
        return above[0][1]
    if not above:
        return below[-1][1] * size / below[-1][0]
    (x0, y0), (x1, y1) = below[-1], above[0]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
