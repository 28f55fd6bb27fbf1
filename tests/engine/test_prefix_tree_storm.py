"""PrefixTree against an account that is too slow to be wrong, through thousands of random requests.

The account knows, for every page listed, its origin and the tokens up to its end; a match is the longest prefix for
which a page is there. The cache is a list of tokens a page: what is read through a match must be what was asked for.
"""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from rl_jax.engine.pages import OutOfPages, PagePool
from rl_jax.engine.prefix_tree import Origin, PrefixTree

NUM_PAGES, MAX_TOKENS, ALPHABET = {1: 60, 4: 40, 16: 14}, 24, b"abc"


@dataclass(eq=False)
class Listed:
    page: int
    used: int


class Account:
    """The slow reference: pages by (origin, tokens up to the page's end)."""

    def __init__(self, page_size):
        self.page_size = page_size
        self.listed: dict[tuple[Origin, bytes], Listed] = {}
        self.present = Counter()  # (origin, prefix) -> pages that have its last token
        self.held = Counter()  # page -> holders beside the tree
        self.tick = 0

    def parent(self, tokens):
        return tokens[: (len(tokens) - 1) // self.page_size * self.page_size]

    def list(self, key, page):
        self.listed[key] = Listed(page, self.tick)
        self.count(key, 1)

    def unlist(self, key):
        self.count(key, -1)
        return self.listed.pop(key).page

    def count(self, key, change):
        origin, tokens = key
        for end in range(len(self.parent(tokens)) + 1, len(tokens) + 1):
            self.present[origin, tokens[:end]] += change

    def match(self, origin, tokens, found):
        """Check a match; where several pages agree as far, which one is the tree's choice."""
        self.tick += 1
        ends = range(len(tokens), 0, -1)
        longest = next((end for end in ends if self.present[origin, tokens[:end]]), 0)
        assert found.num_tokens == longest
        assert len(found.pages) == -(-longest // self.page_size)
        for i, page in enumerate(found.pages):
            end = min((i + 1) * self.page_size, longest)
            key = (origin, tokens[:end])
            if key not in self.listed or self.listed[key].page != page:
                assert i == len(found.pages) - 1
                key = next(k for k, v in self.listed.items() if v.page == page and k[0] == origin)
                assert key[1].startswith(tokens[:end]) and self.parent(key[1]) == self.parent(
                    tokens[:end]
                )
            self.listed[key].used = self.tick

    def insert(self, origin, tokens, pages):
        self.tick += 1
        before = self.pages()
        for i, page in enumerate(pages):
            key = (origin, tokens[: (i + 1) * self.page_size])
            if key in self.listed:
                self.listed[key].used = self.tick
            elif self.present[key]:
                siblings = (k for k in self.siblings(key) if k[1].startswith(key[1]))
                longer = min(siblings, key=lambda k: k[1])  # the tree touches the first in order
                self.listed[longer].used = self.tick
            else:
                for k in [k for k in self.siblings(key) if key[1].startswith(k[1])]:
                    self.unlist(k)
                self.list(key, page)
        return len(set(pages) & self.pages() - before)

    def siblings(self, key):
        parent = self.parent(key[1])
        return [k for k in self.listed if k[0] == key[0] and self.parent(k[1]) == parent]

    def pages(self):
        return {v.page for v in self.listed.values()}

    def blocked(self):
        """Pages that lead to a held one, each with its path."""
        out = set()
        for (origin, tokens), v in self.listed.items():
            while self.held[v.page] and tokens:
                out.add((origin, tokens))
                tokens = self.parent(tokens)
        return out

    def num_evictable(self):
        return len(self.pages() - {self.listed[key].page for key in self.blocked()})

    def evict(self, num):
        freed = 0
        blocked = self.blocked()
        while freed < num:
            parents = {(origin, self.parent(tokens)) for origin, tokens in self.listed}
            leaves = [k for k in self.listed if k not in parents and k not in blocked]
            if not leaves:
                break
            page = self.unlist(min(leaves, key=lambda k: self.listed[k].used))
            freed += page not in self.pages()
        return freed

    def forget(self, origin):
        before = self.pages()
        for key in [k for k in self.listed if k[0] == origin]:
            self.unlist(key)
        return sum(not self.held[page] for page in before - self.pages())


@dataclass(eq=False)
class Request:
    origin: Origin
    tokens: bytes  # whose KV is in its pages
    pages: list[int]


class Storm:
    def __init__(self, seed, page_size):
        self.rng = random.Random(seed)
        self.page_size = page_size
        self.pool = PagePool(NUM_PAGES[page_size])
        self.tree = PrefixTree(self.pool, page_size)
        self.account = Account(page_size)
        self.cache = [bytearray(page_size) for _ in range(self.pool.num_pages)]
        self.requests: list[Request] = []
        self.version = 0
        self.seen = Counter()

    def run(self, num_operations):
        operations = [
            (self.start, 8), (self.write, 8), (self.publish, 4), (self.finish, 5), (self.abandon, 1),
            (self.fork, 2), (self.evict, 2), (self.forget, 0.4), (self.swap, 0.2),
        ]  # fmt: skip
        chosen = self.rng.choices(*zip(*operations), k=num_operations)
        for done, operation in enumerate(chosen):
            if self.requests or operation in (self.start, self.evict, self.forget, self.swap):
                self.seen[operation.__name__] += 1
                operation()
            if done % 100 == 0:
                self.check()
        while self.requests:
            self.finish()
        self.check()

    def start(self):
        """A prompt that others may have begun; what is known of it is matched, the rest written."""
        rng = self.rng
        origin = self.origin()
        known = [t for o, t in self.account.listed if o == origin] + [b""]
        tokens = rng.choice(known)
        tokens = tokens[: rng.randint(0, len(tokens)) if rng.random() < 0.5 else len(tokens)]
        tokens = (tokens + self.text(6))[:MAX_TOKENS]
        found = self.tree.match(origin, np.array(list(tokens)))
        self.account.match(origin, tokens, found)
        self.seen["partial"] += found.num_tokens % self.page_size > 0
        self.hold(found.pages)
        for i, page in enumerate(found.pages):
            wanted = tokens[i * self.page_size : min((i + 1) * self.page_size, found.num_tokens)]
            assert self.cache[page].startswith(wanted)
        request = Request(origin, tokens[: found.num_tokens], list(found.pages))
        self.requests.append(request)
        self.own_the_last(request)
        self.append(request, tokens[len(request.tokens) :])

    def write(self):
        self.append(self.rng.choice(self.requests), self.text(5))

    def publish(self, origin=None):
        """List what a running request has, for its siblings."""
        request = self.rng.choice(self.requests)
        origin = origin or request.origin
        tokens, pages = np.array(list(request.tokens)), request.pages
        taken = self.account.insert(origin, request.tokens, pages)
        assert self.tree.insert(origin, tokens, pages) == taken
        return request

    def finish(self):
        """A turn ends, or is preempted: list and drop. Some saw a swap and end as their owner's."""
        mixed = Origin(self.version, owner=self.rng.choice("st"))
        request = self.publish(mixed if self.rng.random() < 0.15 else None)
        self.end(request)

    def abandon(self):
        self.end(self.rng.choice(self.requests))

    def fork(self):
        """A second sample of the same context, beside the tree."""
        request = self.rng.choice(self.requests)
        self.hold(request.pages)
        twin = Request(request.origin, request.tokens, list(request.pages))
        self.requests.append(twin)
        self.own_the_last(twin)

    def evict(self):
        num = self.rng.randint(1, 6)
        assert self.tree.num_evictable == self.account.num_evictable()
        assert self.tree.evict(num) == self.account.evict(num)

    def forget(self):
        origin = self.origin()
        assert self.tree.forget(origin) == self.account.forget(origin)

    def swap(self):
        self.version += 1
        old = [o for o in {o for o, _ in self.account.listed} if o.version < self.version]
        for origin in old:
            assert self.tree.forget(origin) == self.account.forget(origin)

    # --- what a server does -----------------------------------------------------------------

    def origin(self):
        return self.rng.choice([
            Origin(self.version), Origin(self.version), Origin(self.version + 1),
            Origin(self.version, adapter="a"), Origin(self.version, owner="s"), Origin(self.version, owner="t"),
        ])  # fmt: skip

    def text(self, most):
        return bytes(self.rng.choices(ALPHABET, k=self.rng.randint(0, most)))

    def hold(self, pages):
        self.pool.hold(pages)
        self.account.held.update(pages)

    def drop(self, pages):
        self.pool.drop(pages)
        self.account.held.subtract(pages)

    def take(self, num):
        """Free pages, evicted ones if there are too few; None if there are none."""
        missing = num - self.pool.num_free
        if missing > 0:
            assert self.tree.evict(missing) == self.account.evict(missing)
        try:
            pages = self.pool.take(num)
        except OutOfPages:
            assert self.pool.num_free < num and self.tree.num_evictable == 0
            self.seen["out of pages"] += 1
            return None
        listed = self.account.pages()
        for page in pages:
            assert not self.account.held[page] and page not in listed
        self.account.held.update(pages)
        return pages

    def end(self, request):
        self.requests.remove(request)
        self.drop(request.pages)

    def own_the_last(self, request):
        """Copy on write of a page that others read."""
        used = len(request.tokens) % self.page_size
        if used == 0:
            return
        copy = self.take(1)
        if copy is None:
            self.end(request)
            return
        self.cache[copy[0]][:used] = self.cache[request.pages[-1]][:used]
        self.drop([request.pages[-1]])
        request.pages[-1] = copy[0]

    def append(self, request, tokens):
        """Write behind a request's tokens; without pages it ends."""
        if request not in self.requests:
            return
        tokens = tokens[: MAX_TOKENS - len(request.tokens)]
        num_pages = -(-(len(request.tokens) + len(tokens)) // self.page_size)
        pages = self.take(num_pages - len(request.pages))
        if pages is None:
            self.end(request)
            return
        request.pages += pages
        for token in tokens:
            at, offset = divmod(len(request.tokens), self.page_size)
            self.cache[request.pages[at]][offset] = token
            request.tokens += bytes([token])

    # --- what must hold ---------------------------------------------------------------------

    def check(self):
        tree, pool, account = self.tree, self.pool, self.account
        tree.check()
        assert set(tree.origins) == {origin for origin, _ in account.listed}
        assert tree.num_pages == len(account.pages())
        assert tree.num_evictable == account.num_evictable()
        held = Counter(page for request in self.requests for page in request.pages)
        listed = account.pages()
        counts = [pool.count(page) for page in range(pool.num_pages)]
        assert counts == [held[page] + (page in listed) for page in range(pool.num_pages)]
        assert pool.num_free == counts.count(0)
        for (_, tokens), v in account.listed.items():
            assert self.cache[v.page].startswith(tokens[len(account.parent(tokens)) :])
        for request in self.requests:
            kv = b"".join(bytes(self.cache[page]) for page in request.pages)
            assert kv.startswith(request.tokens)


@pytest.mark.parametrize("page_size, num_operations", [(1, 3000), (4, 4000), (16, 3000)])
def test_a_storm_of_requests_finds_what_a_slow_account_finds(page_size, num_operations):
    storm = Storm(page_size, page_size)
    storm.run(num_operations)
    assert all(storm.seen[what] > 5 for what in ("fork", "evict", "forget", "swap", "out of pages"))
    assert (storm.seen["partial"] > 100) == (page_size > 1)
    for origin in storm.tree.origins:
        storm.tree.forget(origin)
    assert storm.pool.num_free == storm.pool.num_pages
