"""Page accounting: small facts; long random histories are in test_scheduler_machine.py."""

import pytest

from quantforge.runtime.kv.pool import BlockManager


def test_an_owner_grows_by_whole_pages_and_keeps_those_it_has() -> None:
    pool = BlockManager(num_pages=4, page_size=8)
    assert pool.grow("a", 1)
    first = list(pool.pages("a"))
    assert pool.grow("a", 8)
    assert list(pool.pages("a")) == first
    assert pool.grow("a", 9)
    assert list(pool.pages("a"))[:1] == first
    assert len(pool.pages("a")) == 2
    assert pool.num_free == 2
    pool.check()


def test_growth_that_does_not_fit_changes_nothing() -> None:
    pool = BlockManager(num_pages=3, page_size=4)
    assert pool.grow("a", 8)
    assert not pool.grow("b", 8)
    assert not pool.grow("a", 12, keep_free=1)
    assert pool.owners() == {"a"}
    assert pool.num_free == 1
    assert pool.grow("a", 12)
    pool.check()


def test_owners_never_hold_the_same_page() -> None:
    pool = BlockManager(num_pages=6, page_size=2)
    assert all(pool.grow(owner, 4) for owner in "abc")
    held = [page for owner in "abc" for page in pool.pages(owner)]
    assert sorted(held) == list(range(6))


def test_released_pages_can_be_owned_again() -> None:
    pool = BlockManager(num_pages=2, page_size=4)
    for _ in range(3):
        assert pool.grow("a", 8)
        pool.release("a")
        assert pool.num_free == 2
    pool.release("nobody")
    pool.check()


def test_a_shared_page_is_free_only_after_its_last_owner_is_gone() -> None:
    pool = BlockManager(num_pages=3, page_size=4)
    assert pool.grow("a", 8)
    pool.share("b", pool.pages("a")[:1])
    assert pool.grow("b", 8)
    assert pool.num_free == 0
    pool.check()
    pool.release("a")
    assert pool.num_free == 1
    pool.check()
    pool.release("b")
    assert pool.num_free == 3
    pool.check()


def test_check_finds_a_page_with_two_owners_and_a_leaked_page() -> None:
    pool = BlockManager(num_pages=3, page_size=4)
    pool.grow("a", 4)
    pool._owned["b"] = list(pool.pages("a"))
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check()
    pool._owned.clear()
    pool._ref_count = [0, 0, 0]
    with pytest.raises(AssertionError, match="neither free nor owned"):
        pool.check()
