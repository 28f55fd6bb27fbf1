"""Requests share the KV of common prefixes: hand-worked trees. The storm is in test_prefix_tree_storm.py."""

import time

import numpy as np
import pytest

from rl_jax.engine.pages import PagePool
from rl_jax.engine.prefix_tree import Match, Origin, PrefixTree, common_tokens

A, B = Origin(1), Origin(2)


class Kit:
    """A tree with pages of 4 tokens, and requests that insert and drop at once."""

    def __init__(self, num_pages=32, page_size=4):
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(self.pool, page_size)

    def request(self, tokens, origin=A):
        """KV of tokens computed in pages of its own, inserted and dropped; its pages."""
        pages = self.pool.take(-(-len(tokens) // self.tree.page_size))
        self.tree.insert(origin, np.array(tokens), pages)
        self.pool.drop(pages)
        self.tree.check()
        return pages

    def match(self, tokens, origin=A):
        found = self.tree.match(origin, np.array(tokens, np.int32))
        self.tree.check()
        return found.pages, found.num_tokens


@pytest.fixture
def kit():
    return Kit()


@pytest.mark.parametrize("a, b, common", [
    ([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 2], 2), ([1, 2, 3], [1, 2, 4], 2), ([], [1], 0),
    ([1], [257], 0), ([1 << 24], [1 << 16], 0), ([-1, 5], [-1, 6], 1), ([256, 7], [256, 7], 2),
])  # fmt: skip
def test_common_tokens_counts_whole_tokens(a, b, common):
    as_bytes = lambda tokens: np.array(tokens, np.int32).tobytes()
    assert common_tokens(as_bytes(a), as_bytes(b)) == common
    assert common_tokens(as_bytes(b), as_bytes(a)) == common


def test_an_empty_tree_matches_nothing(kit):
    assert kit.tree.match(A, np.arange(9)) == Match((), 0)
    assert kit.tree.insert(A, np.arange(0), []) == 0
    assert kit.tree.origins == ()
    assert (kit.tree.num_pages, kit.tree.num_evictable, kit.tree.evict(3)) == (0, 0, 0)


def test_full_pages_then_the_partial_leaf_are_matched(kit):
    pages = kit.request(range(10))  # 4 + 4 + 2
    assert pages == [0, 1, 2]
    assert kit.match(range(10)) == ((0, 1, 2), 10)
    assert kit.match([*range(10), 77, 78, 79]) == ((0, 1, 2), 10)
    assert kit.match(range(9)) == ((0, 1, 2), 9)
    assert kit.match(range(8)) == ((0, 1), 8)
    assert kit.match(range(6)) == ((0, 1), 6)
    assert kit.match([0, 1, 2, 3, 4, 9, 6, 7]) == ((0, 1), 5)
    assert kit.match([9, 1, 2, 3]) == ((), 0)
    assert kit.match([]) == ((), 0)


def test_the_child_with_the_longest_common_prefix_is_found_among_many():
    kit = Kit(num_pages=64)
    for second in range(0, 60, 2):
        kit.request([5, second, 7, 7])
    assert kit.match([5, 20, 7, 8]) == ((10,), 3)
    assert kit.match([5, 20, 6, 7]) == ((10,), 2)
    assert kit.match([5, 20]) == ((10,), 2)
    (page,), num_tokens = kit.match([5, 21, 7, 7])
    assert num_tokens == 1 and page in (10, 11)  # which of those does not matter


def test_origins_share_nothing(kit):
    adapter, owner = Origin(1, adapter="a"), Origin(1, owner="s")
    kit.request(range(4))
    for origin in (B, adapter, owner):
        assert kit.match(range(4), origin) == ((), 0)
        kit.request(range(4), origin)
    assert kit.tree.num_pages == 4
    assert kit.tree.origins == (A, B, adapter, owner)


def test_a_duplicate_is_not_adopted(kit):
    kit.request(range(6))
    pages = kit.pool.take(3)
    assert kit.tree.insert(A, np.array([*range(4), 4, 5, 6, 7, 8]), pages) == 2
    # Page 0 stays the tree's; [4, 5, 6, 7] takes the place of [4, 5], whose page is free again.
    assert kit.match([*range(9)]) == ((0, pages[1], pages[2]), 9)
    assert kit.pool.drop(pages) == [pages[0]]
    assert kit.pool.count(1) == 0
    assert kit.tree.num_pages == 3
    kit.tree.check()


def test_a_partial_page_that_a_child_has_already_is_not_added(kit):
    kit.request([1, 2, 3, 4])
    pages = kit.pool.take(1)
    assert kit.tree.insert(A, np.array([1, 2]), pages) == 0
    assert kit.pool.drop(pages) == pages
    assert kit.match([1, 2]) == ((0,), 2)


def test_a_partial_page_beside_others_is_added(kit):
    kit.request([1, 2, 3, 4])
    (page,) = kit.request([1, 2, 9])
    assert kit.match([1, 2, 9, 9]) == ((page,), 3)
    assert kit.match([1, 2, 3, 4]) == ((0,), 4)


def test_a_partial_page_that_is_replaced_stays_with_those_who_hold_it(kit):
    (old,) = kit.request([1, 2])
    kit.pool.hold([old])
    kit.request([1, 2, 3])
    assert kit.pool.count(old) == 1
    assert kit.tree.num_pages == kit.tree.num_evictable == 1
    assert kit.pool.drop([old]) == [old]


def test_a_request_may_list_its_pages_and_go_on_writing_behind(kit):
    """A prompt's pages serve others while it still generates; then its longer page takes the place of its own."""
    pages = kit.pool.take(2)
    assert kit.tree.insert(A, np.arange(6), pages) == 2
    assert kit.match(range(6)) == ((0, 1), 6)
    assert kit.tree.insert(A, np.arange(8), pages) == 0
    assert kit.match(range(8)) == ((0, 1), 8)
    assert kit.tree.num_pages == 2
    assert [kit.pool.count(page) for page in pages] == [2, 2]
    kit.pool.drop(pages)
    kit.tree.check()
    assert kit.tree.evict(5) == 2


def test_a_turns_end_leaves_its_pages_with_the_tree_only(kit):
    prompt = list(range(6))
    kit.request(prompt)
    found = kit.tree.match(A, np.array(prompt))
    kit.pool.hold(found.pages)
    assert (found.pages, found.num_tokens) == ((0, 1), 6)
    (copy,) = kit.pool.take(1)  # page 1 is the tree's: the copy is written behind token 6
    kit.pool.drop([1])
    turn = [*prompt, 50, 51, 52]
    pages = [0, copy, *kit.pool.take(1)]
    assert kit.tree.insert(A, np.array(turn), pages) == 2
    assert kit.pool.drop(pages) == []
    assert kit.match(turn) == (tuple(pages), 9)
    assert kit.pool.count(1) == 0, "the leaf that the turn extended"
    assert [kit.pool.count(page) for page in pages] == [1, 1, 1]
    assert kit.tree.num_evictable == kit.tree.num_pages == 3
    assert kit.tree.evict(3) == 3
    assert kit.pool.num_free == kit.pool.num_pages
    assert kit.tree.origins == ()


def test_the_least_recently_used_leaf_goes_first(kit):
    kit.request([1, 1, 1, 1, 2, 2])  # pages 0, 1
    kit.request([3, 3, 3, 3])  # 2
    kit.request([1, 1, 1, 1, 4, 4])  # 0, and its own
    kit.match([1, 1, 1, 1, 2, 2])
    assert kit.tree.evict(1) == 1
    assert kit.match([3]) == ((), 0)
    assert kit.tree.evict(1) == 1
    assert kit.match([1, 1, 1, 1, 4])[1] == 4
    assert kit.tree.evict(1) == 1
    assert kit.match([1, 1, 1, 1, 2])[1] == 4, "a parent goes after its children"
    assert kit.tree.evict(1) == 1
    assert kit.tree.num_pages == 0


def test_an_older_history_goes_before_the_start_of_one_that_was_read_since(kit):
    start, end = kit.request([1, 2, 3, 4, 5, 6, 7, 8])
    other = kit.request([9, 9, 9, 9])
    kit.match([1, 2, 3, 4])  # the start alone
    assert kit.tree.evict(2) == 2
    assert kit.match([1, 2, 3, 4, 5, 6, 7, 8]) == ((start,), 4)
    assert kit.match([9, 9, 9, 9]) == ((), 0)
    assert {end, *other} == set(kit.pool.take(2)), "they are free"


def test_pages_that_others_hold_are_not_evicted_nor_what_leads_to_them(kit):
    kit.request(range(12))
    kit.request([0, 1, 2, 3, 9])
    kit.pool.hold([2])  # the end of the first path only
    assert kit.tree.num_evictable == 1
    assert kit.tree.evict(9) == 1
    assert kit.match(range(12)) == ((0, 1, 2), 12)
    assert (kit.tree.num_evictable, kit.tree.evict(9)) == (0, 0)
    kit.pool.drop([2])
    assert kit.tree.num_evictable == 3
    kit.pool.hold([0])
    assert kit.tree.num_evictable == 2
    assert kit.tree.evict(9) == 2
    assert kit.match(range(12)) == ((0,), 4)


def test_forgotten_pages_stay_with_those_who_hold_them(kit):
    kit.request(range(8))
    kit.request(range(8), B)
    kit.pool.hold([1])
    assert kit.tree.forget(A) == 1
    assert kit.tree.origins == (B,)
    assert kit.tree.forget(A) == 0
    assert kit.pool.count(1) == 1
    assert kit.pool.drop([1]) == [1]
    assert kit.match(range(8), B)[1] == 8


def test_a_page_under_two_origins_is_held_once_and_free_after_both(kit):
    """A turn that saw a swap lists the old version's shared pages again, under its own origin."""
    mixed = Origin(2, owner="s")
    kit.request(range(6))  # pages 0, 1
    kit.pool.hold([0, 1])
    pages = [0, 1, *kit.pool.take(1)]
    assert kit.tree.insert(mixed, np.arange(9), pages) == 1
    kit.pool.drop(pages)
    kit.tree.check()
    assert [kit.pool.count(page) for page in pages] == [1, 1, 1]
    assert kit.tree.num_pages == kit.tree.num_evictable == 3
    kit.pool.hold([2])
    assert kit.tree.num_evictable == 0, "pages 0 and 1 lead to page 2"
    kit.pool.drop([2])
    assert kit.tree.forget(A) == 0
    assert kit.match(range(9), mixed) == ((0, 1, 2), 9)
    assert kit.tree.evict(3) == 3


def test_a_page_that_was_written_over_is_refused(kit):
    pages = kit.pool.take(1)
    kit.tree.insert(A, np.array([1, 2, 3]), pages)
    with pytest.raises(ValueError, match="page 0 is listed for other tokens of Origin"):
        kit.tree.insert(A, np.array([1, 9]), pages)
    with pytest.raises(ValueError, match="a page comes twice among \\[1, 1\\]"):
        kit.tree.insert(B, np.arange(8), kit.pool.take(1) * 2)
    kit.tree.check()


def test_pages_and_tokens_must_fit(kit):
    with pytest.raises(ValueError, match="1 pages for 5 tokens; pages of 4 tokens take 2"):
        kit.tree.insert(A, np.arange(5), [0])
    with pytest.raises(ValueError, match="page 0 is free; insert pages before dropping them"):
        kit.tree.insert(A, np.arange(4), [0])
    assert kit.tree.origins == ()
    with pytest.raises(ValueError, match="page_size=0"):
        PrefixTree(kit.pool, 0)


def test_stale_entries_do_not_pile_up():
    kit = Kit(num_pages=4)
    for version in range(2000):
        kit.request(range(8), Origin(version))
        kit.tree.forget(Origin(version - 1))
    assert len(kit.tree._heap) < 100


def test_speed_in_a_large_tree():
    """Printed (pytest -s), not asserted: 20,000 pages of 64 tokens, 10,000 of them children of one node."""
    rng = np.random.default_rng(0)
    pool = PagePool(32_000)
    tree = PrefixTree(pool, 64)
    contexts = rng.integers(0, 150_000, (400, 4096), dtype=np.int32)
    leaves = np.tile(contexts[0, :128], (10_000, 1))
    leaves[:, 100:] = rng.integers(0, 150_000, (10_000, 28))
    fill = [*contexts[:157], *leaves]
    for tokens in fill:
        pages = pool.take(-(-len(tokens) // 64))
        tree.insert(A, tokens, pages)
        pool.drop(pages)
    assert tree.num_pages == 157 * 64 + 10_000

    def timed(what, work, inputs):
        times = []
        for x in inputs:
            start = time.perf_counter()
            work(x)
            times.append(time.perf_counter() - start)
        print(f"  {what}: {np.median(times) * 1e6:.1f} us")

    near = leaves[:300].copy()
    near[:, 110] += 1
    taken = [pool.take(64) for _ in range(100)]
    timed("match of 4,096 tokens", lambda tokens: tree.match(A, tokens), contexts[:157])
    timed("match of 128 among 10,000", lambda tokens: tree.match(A, tokens), near)
    insert = lambda i: tree.insert(A, contexts[200 + i], taken[i])
    timed("insert of 64 new pages", insert, range(100))
    timed("insert of 64 known pages", insert, range(100))
    timed("num_evictable, first asked", lambda _: tree.num_evictable, [0])
    timed("drop of 64", pool.drop, taken[50:])
    timed("drop of 64 and num_evictable", lambda i: (pool.drop(i), tree.num_evictable), taken[:50])
    timed("hold of 64", pool.hold, taken[:50])
    timed("evict of 64", tree.evict, [64] * 50)
    timed("evict of 1", tree.evict, [1] * 200)
    timed("forget of the rest", tree.forget, [A])
    tree.check()
