"""Pages of a cache are counted: none is handed out twice, none is lost."""

import random

import pytest

from rl_jax.engine.pages import OutOfPages, PagePool


def test_a_new_pool_hands_out_its_pages_in_order():
    pool = PagePool(4)
    assert pool.take(3) == [0, 1, 2]
    assert (pool.num_free, pool.num_pages) == (1, 4)
    assert [pool.count(page) for page in range(4)] == [1, 1, 1, 0]
    assert pool.take(0) == []


def test_the_page_freed_last_is_handed_out_first():
    pool = PagePool(4)
    pool.take(4)
    assert pool.drop([2, 0]) == [2, 0]
    assert pool.take(2) == [0, 2]


def test_taking_too_many_takes_nothing():
    pool = PagePool(3)
    pool.take(1)
    with pytest.raises(OutOfPages, match="3 pages are wanted and 2 are free") as caught:
        pool.take(3)
    assert (caught.value.wanted, caught.value.free) == (3, 2)
    assert pool.num_free == 2
    assert pool.take(2) == [1, 2]


def test_a_page_is_free_after_its_last_holder():
    pool = PagePool(2)
    pages = pool.take(2)
    pool.hold(pages)
    pool.hold([1])
    assert [pool.count(page) for page in pages] == [2, 3]
    assert pool.drop(pages) == []
    assert pool.drop(pages) == [0]
    assert pool.drop([1]) == [1]
    assert pool.num_free == 2


def test_a_free_page_is_neither_dropped_nor_held():
    pool = PagePool(3)
    pool.take(2)
    for page in (2, 3, -1):
        with pytest.raises(ValueError, match=f"page {page} is not in use"):
            pool.drop([0, page, 1])
        with pytest.raises(ValueError, match=f"page {page} is not in use"):
            pool.hold([0, page, 1])
    with pytest.raises(ValueError, match="page 0 is not in use"):
        pool.drop([1, 0, 0])
    assert [pool.count(page) for page in range(3)] == [1, 1, 0], "what failed changed nothing"
    with pytest.raises(ValueError, match="page 3 is not one of 3"):
        pool.count(3)


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="num_pages=0"):
        PagePool(0)


def test_pages_that_came_to_have_one_holder_or_more_are_told_once():
    pool = PagePool(4)
    pool.take(3)
    assert pool.take_changed() == set()
    pool.hold([0, 1])
    pool.hold([0])
    assert pool.take_changed() == {0, 1}
    assert pool.take_changed() == set()
    pool.drop([0, 1, 2])
    assert pool.take_changed() == {1}


def test_counts_are_those_of_a_plain_account_through_a_storm():
    rng = random.Random(0)
    pool, held = PagePool(16), []
    for _ in range(2000):
        some = rng.sample(held, min(len(held), rng.randrange(4)))
        match rng.randrange(3):
            case 0 if (num := rng.randrange(4)) <= pool.num_free:
                pages = pool.take(num)
                assert not set(pages) & set(held)
                held += pages
            case 1:
                pool.hold(some)
                held += some
            case 2:
                freed = pool.drop(some)
                for page in some:
                    held.remove(page)
                assert set(freed) == set(some) - set(held)
        assert [pool.count(page) for page in range(16)] == [held.count(page) for page in range(16)]
        assert pool.num_free == 16 - len(set(held))
