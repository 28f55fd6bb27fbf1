"""When a server changes its role: by hand, at random, and in a queue whose best split is known by trying all."""

import heapq
import random
from collections import deque

import pytest

from rl_jax.serve.balance import Balance, Band, Seen

BAND = Band(half_life=0.5, looks=3, rest=4, fade=8.0)  # an average of two looks weighs 15 : 1
SETTLED = Balance(BAND, num_seen=BAND.rest)  # no rollout begins


def played(balance, *seen):
    """What each look says; seen: (prefill_s, decode_s, num_prefill, num_decode)."""
    moves = []
    for one in seen:
        balance, move = balance.look(Seen(*one))
        moves.append(move)
    return balance, moves


def test_one_role_must_wait_longer_by_a_factor_and_for_some_looks():
    waits = (1.0, 0.4, 2, 2)
    _, moves = played(SETTLED, *[waits] * 3)
    assert moves == [None, None, "prefill"]
    _, moves = played(SETTLED, *[(0.4, 1.0, 2, 2)] * 3)
    assert moves == [None, None, "decode"]
    within = (1.0, 0.6, 2, 2)  # less than twice
    assert played(SETTLED, *[within] * 9)[1] == [None] * 9
    assert played(SETTLED, *[(0.09, 0.0, 2, 2)] * 9)[1] == [None] * 9  # noise
    once = [waits, waits, within, within, waits, waits]
    assert played(SETTLED, *once)[1] == [None] * 6


def test_a_role_keeps_a_server_and_gets_one_where_it_has_none():
    assert played(SETTLED, *[(9.0, 0.0, 3, 1)] * 9)[1] == [None] * 9
    assert played(SETTLED, *[(0.0, 9.0, 1, 3)] * 9)[1] == [None] * 9
    assert played(SETTLED, (0.0, 0.0, 0, 3))[1] == ["prefill"]
    assert played(SETTLED, (0.0, 0.0, 2, 0))[1] == ["decode"]
    assert played(SETTLED, *[(9.0, 9.0, *n) for n in ((0, 1), (1, 0), (0, 0))])[1] == [None] * 3


def test_after_a_move_it_rests_and_a_wait_that_drains_moves_nobody():
    balance, moves = played(SETTLED, *[(1.0, 0.0, 1, 5)] * 3)
    assert moves[-1] == "prefill"
    _, moves = played(balance, *[(1.0, 0.0, 2, 4)] * 4)
    assert moves == [None] * 3 + ["prefill"]  # rest=4
    drains = [(0.93**n, 0.0, 2, 4) for n in range(20)]
    assert played(balance, *drains)[1] == [None] * 20
    assert "prefill" in played(balance, *[(0.99**n, 0.0, 2, 4) for n in range(20)])[1]


def test_a_move_back_needs_more_than_what_was_left_and_that_fades():
    balance, moves = played(SETTLED, *[(1.0, 0.0, 2, 2)] * 3)
    assert moves[-1] == "prefill" and balance.left == {2: pytest.approx(1.0, abs=0.02)}
    worse = [(0.0, 3.0, 3, 1)] * 6  # there three times as long is waited for slots
    assert "decode" in played(balance, *worse)[1]
    alike = [(0.0, 1.5, 3, 1)] * 10
    _, moves = played(balance, *alike)
    # Twice 1.0 is above 1.5 for 8 log2(2 / 1.5) = 3.3 looks; four of rest, and three of being over it.
    assert moves.index("decode") == 5
    further, moves = played(balance, *[(1.5, 0.0, 3, 2)] * 5)  # onwards nothing is remembered
    assert "prefill" in moves and 3 in further.left


def test_what_waits_for_prefill_while_a_rollout_begins_moves_nobody():
    burst = [(1.0, 0.0, 2, 2)] * 9
    # rest=4 looks tell nothing; the three that a move needs were among them.
    assert played(Balance(BAND), *burst)[1].index("prefill") == BAND.rest
    assert played(SETTLED, *burst)[1].index("prefill") == BAND.looks - 1
    # What waits to decode is no burst of the begin, and a role without a server gets one at once.
    assert played(Balance(BAND), *[(0.0, 1.0, 2, 2)] * 9)[1].index("decode") == BAND.looks - 1
    assert played(Balance(BAND), (0.0, 0.0, 0, 3))[1] == ["prefill"]


@pytest.mark.parametrize("seed", range(40))
def test_random_waits_never_take_a_roles_last_server(seed):
    rng = random.Random(seed)
    band = Band(looks=rng.randrange(1, 5), rest=rng.randrange(4), fade=rng.choice([1.0, 600.0]))
    balance, total = Balance(band), rng.randrange(1, 7)
    prefill, looks, moves = rng.randrange(total + 1), 600, []
    for look in range(looks):
        if rng.random() < 0.02:  # one is fenced or comes back
            total = max(1, total + rng.choice([-1, 1]))
            prefill = min(prefill, total)
        scale = 10 ** rng.uniform(-3, 2)
        seen = Seen(scale * rng.random(), scale * rng.random(), prefill, total - prefill)
        balance, gains = balance.look(seen)
        if gains is None:
            assert total == 1 or 0 < prefill < total  # nobody is left without a server
            continue
        prefill += 1 if gains == "prefill" else -1
        assert 0 < prefill < total
        starved = not 0 < seen.num_prefill < total
        assert starved or not moves or look - moves[-1] >= max(band.rest, 1)
        moves.append(look)


@pytest.mark.parametrize("seed", range(10))
def test_a_constant_load_moves_little(seed):
    """Waits that depend on the split alone, with noise of half, where each split but one keeps somebody waiting."""
    rng, total = random.Random(seed), 6
    best, steep = rng.randrange(1, total), rng.uniform(0.5, 20)
    balance, prefill, moves, there = Balance(), rng.randrange(1, total), 0, 0
    for look in range(6000):
        noise = rng.uniform(0.5, 1.5)
        lacks = best + 0.5 * (seed % 2) - prefill  # odd seeds: the best split lies between two
        seen = Seen(
            max(0, lacks * steep * noise), max(0, -lacks * steep * noise), prefill, total - prefill
        )
        balance, gains = balance.look(seen)
        prefill += {"prefill": 1, "decode": -1, None: 0}[gains]
        moves += gains is not None
        there += look >= 300 and abs(best + 0.5 * (seed % 2) - prefill) <= 0.5
    assert there > 0.95 * 5700
    # At most all the way, then one forth and back in each time in which what is remembered fades.
    assert moves <= (total - 1) + 2 * 6000 / balance.band.fade


class Queue:
    """Sessions that go round: a prefix on one of the prefill servers, then tokens in one of the slots of the decode
    servers. A virtual clock; services are exact, so all of it is deterministic. A move takes effect at once, and who
    is being served is served to the end.
    """

    SLOTS = 4

    def __init__(self, prefill_s, decode_s, num_prefill, total=4):
        self.service_s = {"prefill": prefill_s, "decode": decode_s}
        self.num_prefill, self.total, self.now_s, self.done = num_prefill, total, 0.0, 0
        self.lines = {role: deque() for role in self.service_s}
        self.busy = dict.fromkeys(self.service_s, 0)
        self.events: list[tuple[float, int, str]] = []
        self.num = 0
        for _ in range(total * self.SLOTS):
            self.lines["prefill"].append(0.0)
        self.serve()

    def room(self, role):
        n = self.num_prefill if role == "prefill" else (self.total - self.num_prefill) * self.SLOTS
        return n - self.busy[role]

    def serve(self):
        for role, line in self.lines.items():
            while line and self.room(role) > 0:
                line.popleft()
                self.busy[role] += 1
                # Lengths of a turn differ, the same in each run.
                scale = 0.5 + (self.num * 7 % 11) / 10
                self.num += 1
                heapq.heappush(
                    self.events, (self.now_s + self.service_s[role] * scale, self.num, role)
                )

    def run(self, until_s):
        while self.events and self.events[0][0] <= until_s:
            self.now_s, _, role = heapq.heappop(self.events)
            self.busy[role] -= 1
            self.lines["decode" if role == "prefill" else "prefill"].append(self.now_s)
            self.done += role == "decode"
            self.serve()
        self.now_s = until_s

    def seen(self):
        waits = [self.now_s - line[0] if line else 0.0 for line in self.lines.values()]
        return Seen(*waits, self.num_prefill, self.total - self.num_prefill)


def turns_a_second(queue, seconds, balance=None, rest_s=300):
    """Over `seconds` after the first rest_s, and the splits of that time."""
    before, splits, start = 0, [], int(queue.now_s)
    for second in range(start, start + seconds + rest_s):
        queue.run(float(second + 1))
        if second == start + rest_s - 1:
            before = queue.done
        if balance is not None:
            balance, gains = balance.look(queue.seen())
            queue.num_prefill += {"prefill": 1, "decode": -1, None: 0}[gains]
            queue.serve()
        splits.append(queue.num_prefill)
    return (queue.done - before) / seconds, splits[rest_s:], balance


LOADS = {
    "prefill-heavy": (
        3.0,
        3.0,
        3,
    ),  # a second of it each: 1 s of prefill servers against 1/4 s of decode servers
    "even": (1.0, 4.0, 2),
    "decode-heavy": (0.5, 8.0, 1),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("start", [1, 2, 3])
def test_it_finds_the_split_that_trying_all_finds(load, start):
    prefill_s, decode_s, best = LOADS[load]
    by_split = {n: turns_a_second(Queue(prefill_s, decode_s, n), 2000)[0] for n in (1, 2, 3)}
    assert max(by_split, key=lambda n: by_split[n]) == best, by_split
    rate, splits, _ = turns_a_second(Queue(prefill_s, decode_s, start), 2000, Balance())
    assert rate >= 0.95 * by_split[best], (rate, by_split, splits[::50])
    moves = sum(a != b for a, b in zip(splits, splits[1:]))
    assert moves <= 2 * 2000 / Band().fade and splits.count(best) > 0.9 * len(splits)


def test_it_follows_a_load_that_changes_and_comes_back():
    queue, balance = Queue(*LOADS["prefill-heavy"][:2], 2), Balance()
    for load in ("prefill-heavy", "decode-heavy", "prefill-heavy", "decode-heavy"):
        prefill_s, decode_s, best = LOADS[load]
        queue.service_s = {"prefill": prefill_s, "decode": decode_s}
        _, splits, balance = turns_a_second(queue, 900, balance)
        assert splits.count(best) > 0.8 * len(splits), (load, splits[::30])
